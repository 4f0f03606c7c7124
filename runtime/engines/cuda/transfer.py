"""Copies between host and device that never wait, through rings of pinned memory.

Invariants: a slot of a ring is written again only after the copy that read it has finished; on a device
that is the host's own memory all of it happens at once, so that the code can be tested without a GPU.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on ``device``, in stream order; the host does not wait."""
    if device.type == "cpu":
        return value.clone()
    # The allocator of pinned memory keeps the block until the copy is done.
    return value.pin_memory().to(device, non_blocking=True)


class Fence:
    """A point in the stream. The CPU's work is done when it is recorded, and its clock is the host's."""

    __slots__ = ("_event", "_host_time")

    def __init__(self, device: torch.device, *, is_timed: bool = False) -> None:
        self._event = torch.cuda.Event(enable_timing=is_timed) if device.type == "cuda" else None
        self._host_time = 0.0

    def record(self) -> None:
        if self._event is None:
            self._host_time = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        """Block the host until the stream has passed it."""
        if self._event is not None:
            self._event.synchronize()

    def ms_since(self, earlier: Fence) -> float:
        """Milliseconds of the device between two timed fences, both passed."""
        if self._event is None or earlier._event is None:
            return 1e3 * (self._host_time - earlier._host_time)
        return float(earlier._event.elapsed_time(self._event))


class RingSlot:
    """Host memory of one transfer, ``data`` [n] uint8, and the fence behind the transfer."""

    __slots__ = ("data", "fence")

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.fence = Fence(device)
        self.fence.record()


class PinnedRing:
    """``num_slots`` host buffers that take turns."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self.slots = [RingSlot(num_bytes, device) for _ in range(num_slots)]
        self._next = 0

    def take(self) -> RingSlot:
        """The next buffer, once the device is done with it."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        slot.fence.wait()
        return slot


def align(num_bytes: int) -> int:
    """``num_bytes`` up to a multiple of 16, so that parts of one buffer can be of any type."""
    return -(-num_bytes // 16) * 16


def carve(data: Tensor, parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Views into ``data`` [n] uint8, one after another, each on a 16-byte boundary."""
    views = {}
    offset = 0
    for name, (dtype, shape) in parts.items():
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        views[name] = data[offset : offset + num_bytes].view(dtype).view(shape)
        offset += align(num_bytes)
    return views


def carved_bytes(parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """The bytes that ``carve`` takes."""
    return sum(align(dtype.itemsize * torch.Size(shape).numel()) for dtype, shape in parts.values())
