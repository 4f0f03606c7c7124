"""Gauges and histograms on the server's /metrics page.

Invariants: one thread creates no race with itself: ``update`` and ``count_request`` are called on the
engine's thread only, because this backend crashes when several threads set metrics; gauges are at most
``PERIOD`` seconds old, and exact once the engine is idle. Families, labels and buckets that
TensorRT-LLM's repository has carry its names; ours is ``nv_trt_llm_adaptive_verification_metrics``.
"""

from __future__ import annotations

import os
import time
from typing import Any

from trtllm_av.runtime.engine_thread import Ticket
from trtllm_av.runtime.scheduler import Engine

PERIOD = 0.25

# Upstream's families have one label beside model and version that says what the figure is.
FAMILIES = {
    "nv_trt_llm_request_metrics": ("request_type", "requests"),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", "memory of the engine's process, bytes"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "cache, a slot being a block"),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "requests by phase",
    ),
    "nv_trt_llm_general_metrics": ("general_type", "iterations and time"),
    "nv_trt_llm_adaptive_verification_metrics": ("type", "drafts, their verification, and slots"),
}
# name -> value of the label "response_metric_type"
HISTOGRAMS = {
    "nv_llm_input_token_len": "total_input_tokens",
    "nv_llm_output_token_len": "total_output_tokens",
}
BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_figures(engine: Engine) -> dict[tuple[str, str], float]:
    """Value of each (family, type). Counts are totals since the start."""
    report = engine.report()
    slots = engine.executor.num_slots
    used = engine.num_live
    figures: dict[str, dict[str, float]] = {
        "nv_trt_llm_request_metrics": {
            "active": used + engine.num_waiting,
            "scheduled": used,
            "waiting": engine.num_waiting,
            "max": slots,
        },
        "nv_trt_llm_runtime_memory_metrics": {
            "cpu": resident_bytes(),
        },
        "nv_trt_llm_kv_cache_block_metrics": {
            "max": slots,
            "used": used,
            "free": slots - used,
            "tokens_per": engine.executor.max_len,
            "fraction": used / slots,
        },
        "nv_trt_llm_inflight_batcher_metrics": {
            "generation_requests": used,
            "total_context_tokens": report.prefill_tokens,
            "micro_batch_id": 0,
            "paused_requests": 0,
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
            "checked_accepted": report.checked_accepted,
            "decode_seconds": report.decode_seconds,
            "prefill_seconds": report.prefill_seconds,
            "fallbacks": sum(report.fallbacks.values()),
            "used_slots": used,
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
        for name in HISTOGRAMS:
            self._families[name] = pb_utils.MetricFamily(
                name=name,
                description="TensorRT-LLM response metrics, tokens of a request",
                kind=pb_utils.MetricFamily.HISTOGRAM,
            )
        self._histograms = [
            self._families[name].Metric(
                labels=self._labels | {"response_metric_type": kind}, buckets=BUCKETS
            )
            for name, kind in HISTOGRAMS.items()
        ]
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

    def count_request(self, ticket: Ticket) -> None:
        """Observe the lengths of a request that has ended."""
        lengths = (len(ticket.prompt_token_ids), ticket.num_output_tokens)
        for histogram, length in zip(self._histograms, lengths, strict=True):
            histogram.observe(float(length))

    def close(self) -> None:
        """Free the metrics; the server must not outlive them."""
        self._gauges.clear()
        self._histograms.clear()
        self._families.clear()
