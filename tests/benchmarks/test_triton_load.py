"""Figures of the load benchmark: what is counted when, and what the server loses against the API."""

from __future__ import annotations

import pytest

from benchmarks.triton_clients import _read_request
from benchmarks.triton_load import compare
from benchmarks.triton_timing import LoadRun, RequestTiming


def request(start: float, *responses: tuple[float, int]) -> RequestTiming:
    return RequestTiming(start, list(responses))


def test_a_run_in_which_the_last_request_is_alone() -> None:
    """Guards against: the end of a run, when places are empty, in the figure of the full time."""
    run = LoadRun(
        2,
        [
            request(0.0, (1.0, 1), (2.0, 3)),
            request(0.0, (1.0, 1), (3.0, 5)),
            request(2.0, (3.0, 1), (8.0, 9)),  # alone from 3 on
        ],
    )
    assert (run.tokens, run.seconds, run.tokens_per_second) == (20, 8.0, 2.5)
    assert run.full_window == (0.0, 3.0)
    assert run.full_tokens_per_second == pytest.approx(11 / 3)
    assert run.mean_in_flight == pytest.approx(2.0)
    assert run.first_token_ms == pytest.approx(1000.0)
    assert run.inter_token_ms == pytest.approx(1e3 * (1 + 2 + 5) / 17)


def test_a_client_that_leaves_places_empty_is_seen() -> None:
    """Guards against: a client whose places wait for one another, taken for a slow server."""
    early, late = [request(0.0, (1.0, 1)), request(0.0, (4.0, 1))], [request(4.0, (5.0, 1))] * 2
    run = LoadRun(2, early + late)
    assert run.full_window == (0.0, 5.0)
    assert run.mean_in_flight == pytest.approx((1 + 4 + 1 + 1) / 5)


def test_tokens_of_a_profile_are_differences() -> None:
    """Guards against: totals so far added up, or a response of several tokens counted as one."""
    entry = {
        "timestamp": 1_000_000_000,
        "response_timestamps": [2_000_000_000, 3_000_000_000],
        "response_outputs": [{"num_output_tokens": 1}, {"num_output_tokens": 4}],
    }
    assert _read_request(entry) == request(1.0, (2.0, 1), (3.0, 3))


def test_overhead_is_of_the_medians() -> None:
    """Guards against: an overhead with the sides exchanged, or of the best run instead of the median."""

    def runs(*seconds: float) -> list[LoadRun]:
        return [LoadRun(1, [request(0.0, (s / 2, 5), (s, 5))], {"engine": 2 * s}) for s in seconds]

    row = compare(1, "off", runs(1.0, 2.0, 9.0), runs(4.0, 1.5, 2.5))
    assert (row.api["tokens_per_second"]["median"], row.api["tokens"]) == (5.0, [10])
    assert row.server["tokens_per_second"] == {"median": 4.0, "least": 2.5, "most": 6.67}
    assert row.overhead == pytest.approx(0.2)
    assert row.server["cpu_seconds"] == {"engine": 5.0}
