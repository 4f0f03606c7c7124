"""The thread in which the adaptation runs beside the caller of an executor.

Invariants: handing results over never waits; they are taken in their order; an error ends the adaptation,
is logged and counted, and leaves the control block at verify-all.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trtllm_av.runtime.engines.trtllm_adaptation import StepResult, TrtllmAdaptation
from trtllm_av.runtime.engines.trtllm_control import ControlWriter
from trtllm_av.runtime.engines.trtllm_costs import Iteration

logger = logging.getLogger(__name__)


class AdaptationThread:
    """Feeds ``adaptation``; ``read_statistics`` returns the iterations since its last call."""

    def __init__(
        self,
        adaptation: TrtllmAdaptation,
        writer: ControlWriter,
        read_statistics: Callable[[], Iterable[Any]],
    ) -> None:
        self._adaptation = adaptation
        self._writer = writer
        self._read_statistics = read_statistics
        self._num_iterations = 0
        self._queue: queue.SimpleQueue[Sequence[StepResult] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trtllm-av-adaptation", daemon=True)
        self._thread.start()

    def put(self, results: Sequence[StepResult]) -> None:
        """Hand ``results`` over."""
        self._queue.put(results)

    def close(self) -> None:
        """Take in what was handed over, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (results := self._queue.get()) is not None:
                self._adaptation.observe(results)
                self._adaptation.observe_iterations(self._new_iterations())
        except Exception:  # whatever it is, serving goes on
            logger.exception("the adaptation ended; every draft is verified from here on")
            self._adaptation.fallbacks["the adaptation failed"] += 1
            self._writer.verify_all(round=self._writer.newest_round)

    def _new_iterations(self) -> list[Iteration]:
        new = []
        for statistics in self._read_statistics():
            batch = getattr(statistics, "inflight_batching_stats", None)
            if batch is None or not batch.num_scheduled_requests:
                continue
            self._num_iterations += 1
            new.append(
                Iteration(
                    ordinal=self._num_iterations,
                    generating=int(batch.num_gen_requests),
                    context_tokens=int(batch.num_ctx_tokens),
                    latency_ms=float(statistics.iter_latency_ms),
                )
            )
        return new
