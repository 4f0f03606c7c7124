"""Gauges on the server's /metrics page.

Invariants: one thread creates no race with itself: ``update`` is called on the engine's thread only, because
this backend crashes when several threads set metrics; figures are at most ``PERIOD`` seconds old, and
exact once the engine is idle.
"""

from __future__ import annotations

import time
from typing import Any

from trtllm_av.runtime.scheduler import Engine

PERIOD = 0.25

# Upstream's families have one label beside model and version that says what the figure is.
FAMILIES = {
    "nv_trt_llm_request_metrics": ("request_type", "requests"),
    "nv_trt_llm_general_metrics": ("general_type", "iterations and time"),
    "nv_trt_llm_adaptive_verification_metrics": ("type", "drafts, their verification, and slots"),
}


def read_figures(engine: Engine) -> dict[tuple[str, str], float]:
    """Value of each (family, type). Counts are totals since the start."""
    report = engine.report()
    slots = engine.executor.num_slots
    figures: dict[str, dict[str, float]] = {
        "nv_trt_llm_request_metrics": {
            "active": engine.num_live + engine.num_waiting,
            "scheduled": engine.num_live,
            "waiting": engine.num_waiting,
            "max": slots,
        },
        "nv_trt_llm_general_metrics": {
            "iteration_counter": report.rounds,
            "timestamp": time.time(),
        },
        "nv_trt_llm_adaptive_verification_metrics": {
            "drafted": report.drafted,
            "verified": report.verified,
            "trimmed": report.trimmed,
            "accepted": report.accepted,
            "emitted": report.emitted,
            "probes": report.probes,
            "mean_depth": report.mean_depth,
            "mean_verify_len": report.mean_verify_len,
            "expected_accepted": report.expected_accepted,
            "decode_seconds": report.decode_seconds,
            "prefill_seconds": report.prefill_seconds,
            "fallbacks": sum(report.fallbacks.values()),
            "used_slots": engine.num_live,
            "max_slots": slots,
        },
    }
    return {
        (family, kind): value
        for family, values in figures.items()
        for kind, value in values.items()
    }


class Metrics:
    """The gauges of one model; ``pb_utils`` is the backend's module."""

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self._families = {
            name: pb_utils.MetricFamily(
                name=name, description=f"TensorRT-LLM {what}", kind=pb_utils.MetricFamily.GAUGE
            )
            for name, (_, what) in FAMILIES.items()
        }
        self._labels = {"model": model, "version": version}
        self._gauges: dict[tuple[str, str], Any] = {}
        self._next_update = 0.0

    def update(self, engine: Engine) -> None:
        now = time.monotonic()
        if now < self._next_update and engine.has_work:
            return
        self._next_update = now + PERIOD
        for key, value in read_figures(engine).items():
            if key not in self._gauges:
                family, kind = key
                labels = self._labels | {FAMILIES[family][0]: kind}
                self._gauges[key] = self._families[family].Metric(labels=labels)
            self._gauges[key].set(value)

    def close(self) -> None:
        """Free the gauges; the server must not outlive them."""
        self._gauges.clear()
        self._families.clear()
