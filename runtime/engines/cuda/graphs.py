"""Captured graphs by key; on the CPU the same functions run as they are.

Invariants: all graphs share one memory pool, because they are replayed one after another in one stream
and hand results on only through memory that was allocated outside; a function runs once before it is
captured, so that nothing is compiled or loaded inside a capture; a failure names its graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from trtllm_av.runtime.errors import DeviceError

Stage = Callable[[], None]


class GraphCache:
    """Runs stages on ``device``, each from a graph where the device has graphs.

    ``num_captured`` and ``capture_seconds`` report what warm-up cost.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.capture_seconds = 0.0

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def is_capturing(self) -> bool:
        """True on a device that replays graphs."""
        return self._device.type == "cuda"

    def has(self, key: Hashable) -> bool:
        """True if ``run`` will replay, or needs no graph."""
        return not self.is_capturing or key in self._graphs

    def capture(self, key: Hashable, stage: Stage) -> None:
        """Run ``stage`` once and capture it; its inputs must be harmless ones."""
        started = time.perf_counter()
        try:
            stage()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                stage()
        except RuntimeError as error:
            raise device_error(f"capturing {key}", error) from error
        self._graphs[key] = graph
        self.capture_seconds += time.perf_counter() - started

    def run(self, key: Hashable, stage: Stage) -> None:
        """Replay the graph of ``key``; without graphs, run ``stage``."""
        if not self.is_capturing:
            stage()
            return
        self._graphs[key].replay()


def device_error(what: str, error: Exception) -> Exception:
    """A failure of the device as one line; other errors as they are."""
    reason = str(error).strip().partition("\n")[0]
    # The classes of these errors differ between releases of torch, their first words do not.
    if isinstance(error, torch.cuda.OutOfMemoryError) or reason.startswith("CUDA"):
        return DeviceError(f"{what} failed: {reason}")
    return error
