"""An engine's report as Prometheus metrics; needs the package prometheus_client (extra ``metrics``).

| name | type | meaning |
|---|---|---|
| trtllm_av_rounds_total | counter | decode rounds |
| trtllm_av_row_rounds_total | counter | requests over decode rounds |
| trtllm_av_tokens_total | counter | tokens emitted |
| trtllm_av_drafts_total{stage} | counter | drafts drafted, verified, trimmed, accepted |
| trtllm_av_position_drafts_total{stage, position} | counter | drafts by 1-based position: verified, judged, accepted |
| trtllm_av_expected_accepted_total | counter | accepted drafts that the confidences promised |
| trtllm_av_checked_accepted_total | counter | what came of those drafts |
| trtllm_av_calibration_error | gauge | expected calibration error of the confidences, 15 bins |
| trtllm_av_decode_seconds_total, trtllm_av_prefill_seconds_total | counter | wall-clock time |
| trtllm_av_predicted_seconds_total, trtllm_av_measured_seconds_total | counter | rounds as modelled and as timed |
| trtllm_av_cost_error_seconds_total | counter | Σ distance of the two |
| trtllm_av_depth | histogram | drafted positions of a round |
| trtllm_av_verify_length | histogram | verified drafts of a row in a round |
| trtllm_av_budget_total, trtllm_av_decided_budget_total | counter | Σ budgets carried out, and decided |
| trtllm_av_probe_rounds_total, trtllm_av_probe_seconds_total | counter | probes of a depth, their modelled time |
| trtllm_av_uniform_rounds_total | counter | rounds that trimmed nothing because it would gain too little |
| trtllm_av_explored_rows_total, trtllm_av_explored_tokens_total | counter | rows verified deeper, tokens given up |
| trtllm_av_untrained_rows_total | counter | rows that drafted and were left out of the fit |
| trtllm_av_fallbacks_total{reason} | counter | what an engine did instead of what was asked |
| trtllm_av_refits_total | counter | changes of the coefficients |
| trtllm_av_coefficient{name} | gauge | slope_1 …, then intercept_1 … of the K positions |

Every metric has the label ``engine``. Invariants: one scrape reads one report, so its figures belong
together; nothing is computed between scrapes; counters restart with the report, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trtllm_av.runtime.errors import MissingDependencyError, UsageError
from trtllm_av.runtime.metrics import RoundReport

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "trtllm_av"

_TOTALS: dict[str, tuple[str, Callable[[RoundReport], float]]] = {
    "rounds": ("Decode rounds.", lambda r: r.rounds),
    "row_rounds": ("Requests over decode rounds.", lambda r: r.row_rounds),
    "tokens": ("Tokens emitted.", lambda r: r.emitted),
    "expected_accepted": ("Accepted drafts promised.", lambda r: r.expected_accepted),
    "checked_accepted": ("Accepted drafts of those promised.", lambda r: r.checked_accepted),
    "decode_seconds": ("Time of decode rounds.", lambda r: r.decode_seconds),
    "prefill_seconds": ("Time of prefill passes.", lambda r: r.prefill_seconds),
    "predicted_seconds": ("Modelled time of rounds.", lambda r: r.predicted_ms / 1e3),
    "measured_seconds": ("Measured time of the same rounds.", lambda r: r.measured_ms / 1e3),
    "cost_error_seconds": ("Distance of the two, added up.", lambda r: r.cost_error_ms / 1e3),
    "budget": ("Drafts that were to be verified.", lambda r: r.budget_sum),
    "decided_budget": ("Drafts that the controller wanted verified.", lambda r: r.decided_budget),
    "probe_rounds": ("Rounds that probe a depth.", lambda r: r.probes),
    "probe_seconds": ("Modelled time of probes.", lambda r: r.probe_ms / 1e3),
    "uniform_rounds": ("Rounds not worth trimming.", lambda r: r.uniform_rounds),
    "explored_rows": ("Rows verified deeper for labels.", lambda r: r.explored_rows),
    "explored_tokens": ("Expected tokens given up for labels.", lambda r: r.explored_tokens),
    "untrained_rows": ("Rows left out of the fit.", lambda r: r.untrained_rows),
    "refits": ("Changes of the coefficients.", lambda r: r.refits),
}


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise MissingDependencyError(
            "Prometheus metrics need prometheus_client; "
            "pip install 'trtllm-adaptive-verification[metrics]'"
        ) from None
    return prometheus_client


class EngineCollector:
    """Reports of engines, for ``prometheus_client``'s registries.

    ``reports`` maps an engine's name to what reads its report, for instance ``llm.report``, which must be
    safe to call from the thread that scrapes.
    """

    def __init__(self, reports: dict[str, Callable[[], RoundReport]]) -> None:
        _client()
        self._reports = dict(reports)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read a report."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, each with a sample per engine."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        reports = {engine: read() for engine, read in self._reports.items()}
        for name, (text, value) in _TOTALS.items():
            counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["engine"])
            for engine, report in reports.items():
                counter.add_metric([engine], value(report))
            yield counter

        drafts = CounterMetricFamily(f"{PREFIX}_drafts", "Drafts.", labels=["engine", "stage"])
        by_position = CounterMetricFamily(
            f"{PREFIX}_position_drafts", "Drafts.", labels=["engine", "stage", "position"]
        )
        fallbacks = CounterMetricFamily(
            f"{PREFIX}_fallbacks", "Departures from what was asked.", labels=["engine", "reason"]
        )
        error = GaugeMetricFamily(
            f"{PREFIX}_calibration_error", "Of the confidences, 15 bins.", labels=["engine"]
        )
        coefficient = GaugeMetricFamily(
            f"{PREFIX}_coefficient", "Of the acceptance estimator.", labels=["engine", "name"]
        )
        depth = HistogramMetricFamily(f"{PREFIX}_depth", "Of a round.", labels=["engine"])
        length = HistogramMetricFamily(
            f"{PREFIX}_verify_length", "Of a row in a round.", labels=["engine"]
        )
        for engine, report in reports.items():
            for stage in ("drafted", "verified", "trimmed", "accepted"):
                drafts.add_metric([engine, stage], getattr(report, stage))
            for stage in ("verified", "judged", "accepted"):
                for position, count in enumerate(getattr(report, f"{stage}_by_position"), 1):
                    by_position.add_metric([engine, stage, str(position)], count)
            for reason, count in report.fallbacks.items():
                fallbacks.add_metric([engine, reason], count)
            if report.calibration_error is not None:
                error.add_metric([engine], report.calibration_error)
            for name, value_ in zip(_names(report), report.coefficients, strict=True):
                coefficient.add_metric([engine, name], value_)
            depth.add_metric([engine], *_histogram(report.rounds_by_depth))
            length.add_metric([engine], *_histogram(report.rows_by_verify_len))
        yield from (drafts, by_position, fallbacks, error, coefficient, depth, length)


def _names(report: RoundReport) -> list[str]:
    slopes = max(len(report.coefficients) - report.num_positions, 0)
    names = [f"slope_{i}" for i in range(1, slopes + 1)]
    return names + [f"intercept_{i}" for i in range(1, len(report.coefficients) - slopes + 1)]


def _histogram(counts: Sequence[int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets of ``counts`` of the values 0, 1, …, and the sum of the values."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for value, count in enumerate(counts):
        total += count
        buckets.append((str(value), total))
    return [*buckets, ("+Inf", total)], sum(v * n for v, n in enumerate(counts))


def start_exporter(
    reports: dict[str, Callable[[], RoundReport]], port: int, address: str = "127.0.0.1"
) -> Callable[[], None]:
    """Serve the metrics of ``reports`` over HTTP in a thread of its own; returns what ends it.

    Raises UsageError if the port cannot be opened, MissingDependencyError without prometheus_client.
    """
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(EngineCollector(reports))
    try:
        server, thread = client.start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot serve metrics on {address}:{port} ({error}); choose another port"
        ) from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
