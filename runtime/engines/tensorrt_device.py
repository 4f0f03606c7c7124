"""The GPU under a plan: one stream for its copies and kernels, and CUDA graphs captured on it.

Invariants: everything of one engine runs on one stream, so that a pass sees the caches as the pass before
left them; it is not the default stream, on which TensorRT would synchronise the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

#: Runs again what was captured.
Replay = Callable[[], None]


class PlanDevice(Protocol):
    """Where buffers live and work is queued."""

    torch_device: torch.device
    name: str

    def queue(self) -> AbstractContextManager[int]:
        """Torch and TensorRT work inside goes to one stream, whose handle it gives."""
        ...

    def capture(self, work: Callable[[int], None]) -> Replay:
        """Record what ``work`` (given a stream's handle) queues, without running it."""
        ...


class CudaDevice:
    """The current CUDA device of torch."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name()
        self._stream = torch.cuda.Stream()

    @contextmanager
    def queue(self) -> Iterator[int]:
        with torch.cuda.stream(self._stream):
            yield int(self._stream.cuda_stream)

    def capture(self, work: Callable[[int], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work(int(self._stream.cuda_stream))
        return graph.replay
