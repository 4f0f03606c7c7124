"""The host benchmark measures what it says."""

from __future__ import annotations

from benchmarks import host


def test_rows_name_every_op() -> None:
    """Guards against an op that is dropped from the benchmark, or timed with nothing to do."""
    rows = host.measure(requests=(4,), num_positions=3)
    assert [row.op for row in rows] == ["budget", "decide", "trim", "observe", "count", "round"]
    assert all(row.R == 4 and row.K == 3 and row.us > 1 for row in rows)
    whole = rows[-1].us
    assert whole > max(row.us for row in rows[:-1])


def test_the_round_adapts() -> None:
    """Guards against a benchmark of the trivial round: depth 0, nothing verified, or everything."""
    round_ = host.ControlledRound(64, 7)
    for _ in range(20):
        round_()
    decision = round_.controller.last_decision
    assert decision is not None
    assert 0 < decision.budget < decision.draft_lens.sum() + 1
    assert decision.depth > 0
    assert round_.controller.estimator.num_rejected == 0
