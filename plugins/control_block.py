"""The control block: how a budget and coefficients reach a plugin whose engine takes no further inputs.

TensorRT-LLM's executor gives an engine the inputs it knows and no others, so the plugin ``TrimTree`` reads
what the runtime decided from memory that both see: page-locked host memory, read by the kernel at every
execution, replays of a CUDA graph included. Here is its layout and the runtime's side.

Layout, in 64-bit words: ``MAGIC`` with the layout's version; at ``PROGRESS`` the round that the plugin trimmed
last and the version it used; from ``SLOTS`` on two slots of ``SLOT_WORDS`` words. Every word of a slot carries
the version of its write in the upper half and one value in the lower. An aligned 64-bit word is never
read in part, so a reader that finds one version in all words of a slot has read one write, whatever the
order in which stores became visible; no fence and no lock is needed.

Invariants: a write goes into the slot of the older version, so the newer one stays whole meanwhile; a
version is used only in rounds after the ``round`` it names, and the newest such version is used; before the
first write, and when no slot qualifies, all drafts are verified. One writer, and one engine that reads.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.errors import BuildError, UsageError

LAYOUT_VERSION = 1
#: First word: the letters AVCB, and above them the version of the layout.
MAGIC = LAYOUT_VERSION << 32 | int.from_bytes(b"AVCB", "little")
#: Words before the slots, and the one that the plugin writes; on cache lines of their own.
PROGRESS, SLOTS = 8, 16
#: Levels of a tree, or positions of a chain, that a block has coefficients for.
MAX_LEVELS = 32
MAX_COEFFICIENTS = 1 + MAX_LEVELS
#: mode, round, budget, floor, then the coefficients.
HEADER_WORDS = 4
SLOT_WORDS = HEADER_WORDS + MAX_COEFFICIENTS
NUM_SLOTS = 2
#: Bytes of a block: one page, because whole pages are locked.
SIZE = 4096
VERIFY_ALL, TRIM = 0, 1
#: Where POSIX shared memory lies on Linux.
_SHARED_MEMORY = Path("/dev/shm")
_HALF = 32
_MASK = (1 << _HALF) - 1
_LIMIT = 1 << (_HALF - 1)
#: Reads of a block that changes twice during each of them, before all drafts are verified.
MAX_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Progress:
    """The last round that was trimmed (0: none yet) and the version it used (−1: all were verified)."""

    round: int
    version: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What a round is trimmed with. ``coefficients``: slope, then an intercept a level."""

    version: int
    mode: int
    round: int
    budget: int
    floor: int
    coefficients: tuple[float, ...]


class ControlBlock:
    """A block in ``buffer``, writable and of ``SIZE`` bytes or more; ``owner`` lives as long as the block.

    A buffer of zeros becomes an empty block; one with another layout raises UsageError.
    """

    def __init__(self, buffer: Any, owner: Any = None) -> None:
        self._words: NDArray[np.uint64] = np.frombuffer(buffer, np.uint64, SIZE // 8)
        self._owner = owner
        if not self._words.flags.writeable:
            raise UsageError("the control block's buffer is read-only; pass a writable one")
        found = int(self._words[0])
        if found not in (0, MAGIC):
            raise UsageError(
                f"the control block starts with {found:#x}, not {MAGIC:#x}: another version wrote it; "
                "use plugin and runtime of one version"
            )
        self._words[0] = MAGIC
        newest = _newest([slot for slot in self._slots() if slot is not None])
        self._version = 0 if newest is None else newest.version

    @classmethod
    def of_library(cls, path: Path) -> ControlBlock:
        """The block of the C++ plugin ``path`` in this process, loading it if it is not loaded yet."""
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            entry = library.av_control_block
        except (OSError, AttributeError) as error:
            raise BuildError(
                f"{path} is no plugin of this package ({error}); build it with "
                "`trtllm-av-doctor --build-plugin`"
            ) from None
        entry.restype = ctypes.c_void_p
        address = entry()
        if not address:
            raise UsageError(
                "the plugin has no control block: TRTLLM_AV_CONTROL_BLOCK names shared memory that does "
                "not exist; create it before the engine is loaded"
            )
        return cls((ctypes.c_char * SIZE).from_address(address), library)

    @classmethod
    def shared(cls, name: str, *, create: bool) -> ControlBlock:
        """The block in the shared memory ``name``; ``create`` makes it, and it lasts until ``unlink``.

        A POSIX object, which the C++ form opens too. Not ``multiprocessing.shared_memory``: before Python
        3.13 that removes memory when any process that had opened it ends.
        """
        path = _SHARED_MEMORY / name
        try:
            flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
            file = os.open(path, flags, 0o600)
            try:
                if create:
                    os.ftruncate(file, SIZE)
                memory = mmap.mmap(file, SIZE)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:  # ValueError: shorter than a block
            reason = getattr(error, "strerror", None) or str(error)
            remedy = "choose another name" if create else "start the process that creates it first"
            raise UsageError(f"shared memory {name!r}: {reason}; {remedy}") from None
        return cls(memory, path if create else None)

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return int(self._words.ctypes.data)

    def write(
        self, *, budget: int, coefficients: Sequence[float], floor: int = 1, round: int
    ) -> int:
        """Trim to ``budget`` drafts a round from the first round after ``round`` on; returns the version.

        ``coefficients``: [1 + levels] f32. ``round``: the newest round that went into these numbers.
        Raises UsageError for numbers that a plugin could not follow.
        """
        values = np.asarray(coefficients, np.float32)
        if values.ndim != 1 or not 2 <= values.size <= MAX_COEFFICIENTS:
            raise UsageError(
                f"coefficients have shape {values.shape}; pass a slope and 1 … {MAX_LEVELS} intercepts"
            )
        if not np.isfinite(values).all():
            raise UsageError(
                f"coefficients {values.tolist()} are not finite; keep the last good ones"
            )
        for name, value in (("budget", budget), ("floor", floor)):
            if not 0 <= value < _LIMIT:
                raise UsageError(f"{name}={value} must be in 0 … {_LIMIT - 1}")
        return self._write(TRIM, budget, floor, round, values)

    def verify_all(self, *, round: int) -> int:
        """Verify every draft from the first round after ``round`` on; returns the version."""
        return self._write(VERIFY_ALL, 0, 0, round, np.zeros(0, np.float32))

    def progress(self) -> Progress:
        """How far the plugin is; one word, so round and version belong together."""
        word = int(self._words[PROGRESS])
        return Progress(word & _MASK, _signed(word >> _HALF))

    def read(self, round: int) -> Settings | None:
        """What the plugin uses in ``round``, None for all drafts: the definition of the kernel's read."""
        for _ in range(MAX_ATTEMPTS):
            slots = self._slots()
            if all(slot is None for slot in slots):
                if not self._words[SLOTS]:
                    return None  # never written
                continue  # both changed while they were read
            usable = [s for s in slots if s is not None and _signed(round - s.round) > 0]
            newest = _newest(usable)
            return None if newest is None or newest.mode == VERIFY_ALL else newest
        return None

    def unlink(self) -> None:
        """End shared memory that this object created; processes that have it open keep it."""
        if isinstance(self._owner, Path):
            self._owner.unlink(missing_ok=True)

    def _write(
        self, mode: int, budget: int, floor: int, round: int, coefficients: NDArray[np.float32]
    ) -> int:
        version = (
            self._version + 1 & _MASK
        ) or NUM_SLOTS  # 0 means never written; slots still alternate
        values = np.zeros(SLOT_WORDS, np.uint64)
        values[:HEADER_WORDS] = [mode, round & _MASK, budget, floor]
        values[HEADER_WORDS : HEADER_WORDS + coefficients.size] = coefficients.view(np.uint32)
        first = SLOTS + version % NUM_SLOTS * SLOT_WORDS
        self._words[first : first + SLOT_WORDS] = values | np.uint64(version << _HALF)
        self._version = version
        return version

    def _slots(self) -> list[Settings | None]:
        """Both slots; None for one that was never written or is being written."""
        return [_parse(self._words[SLOTS + s * SLOT_WORDS :][:SLOT_WORDS].copy()) for s in range(2)]


@functools.cache
def process_block() -> ControlBlock:
    """The block that the Python form of the plugin reads in this process, found as the C++ form finds it."""
    name = os.environ.get("TRTLLM_AV_CONTROL_BLOCK")
    if not name:
        return ControlBlock(mmap.mmap(-1, SIZE))
    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    return ControlBlock.shared(name if rank is None else f"{name}.{rank}", create=False)


def _newest(slots: Sequence[Settings]) -> Settings | None:
    newest = None
    for slot in slots:
        if newest is None or _signed(slot.version - newest.version) > 0:
            newest = slot
    return newest


def _parse(words: NDArray[np.uint64]) -> Settings | None:
    version = int(words[0]) >> _HALF
    if version == 0 or (words >> np.uint64(_HALF) != version).any():
        return None
    values = (words & np.uint64(_MASK)).astype(np.uint32)
    mode, round_, budget, floor = map(int, values[:HEADER_WORDS])
    coefficients = tuple(values[HEADER_WORDS:].view(np.float32).tolist())
    return Settings(version, mode, round_, budget, floor, coefficients)


def _signed(value: int) -> int:
    """The lower 32 bits as a signed number: differences stay right when a counter passes 2³²."""
    return (value + _LIMIT & _MASK) - _LIMIT
