"""Depth and budget together, the d = 0 arm, and the probe schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.closed_loop import COST_PROFILE
from trtllm_av.runtime import depth as depth_module
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import MAX_PROBE_PERIOD, MIN_PROBE_PERIOD, Decision, DepthController

K = 4


def model(
    step_ms: float, draft_ms: float, *, is_block: bool = False, request_ms: float = 0.0
) -> CostModel:
    """Verify costs 10 ms and ``step_ms`` a token, a full draft ``draft_ms`` for one row.

    Each further row of the draft adds ``request_ms``.
    """
    return CostModel.from_table(
        {
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": [[1, 10.0 + step_ms], [1001, 10.0 + 1001 * step_ms]],
            "draft_ms_by_requests": [[1, draft_ms], [101, draft_ms + 100 * request_ms]],
        },
        num_positions=K,
        is_block=is_block,
    )


class Batch:
    """A controller with a batch that stays the same."""

    def __init__(
        self, cost_model: CostModel, survival: Any, *, min_gain: float = 0.0, **lens: Any
    ) -> None:
        self.controller = DepthController(cost_model, min_gain=min_gain)
        self.survival = np.asarray(survival, np.float32)
        rows = self.survival.shape[0]
        self.limits = np.array(lens.get("limits", [K] * rows), np.int32)
        self.floors = np.array(lens.get("floors", [0] * rows), np.int32)

    def decide(self) -> Decision:
        rows = self.survival.shape[0]
        return self.controller.decide(
            self.survival, self.limits, self.floors, rows, sampling_rows=rows
        )

    def run(self, rounds: int) -> list[Decision]:
        return [self.decide() for _ in range(rounds)]


GOOD = [[0.9, 0.81, 0.73, 0.66]] * 4
BAD = [[0.2, 0.04, 0.01, 0.0]] * 4


@pytest.mark.parametrize("is_block", [False, True])
def test_drafting_stops_where_it_does_not_pay(is_block: bool) -> None:
    """Guards against a decision that cannot stop drafting and is worse than plain decoding."""
    batch = Batch(model(0.1, 8.0, is_block=is_block), BAD)
    usual = [decision for decision in batch.run(60) if not decision.is_probe]
    assert {decision.depth for decision in usual} == {0}
    assert {decision.budget for decision in usual} == {0}
    assert not any(decision.draft_lens.any() for decision in usual)
    # Depth 0 costs the verify pass alone.
    assert usual[0].cost_ms == pytest.approx(10.4)
    assert usual[0].expected_tokens == 4


def test_the_published_profile_prefers_plain_decoding_at_a_full_load() -> None:
    """Guards against the reference's trap: R = 256, acceptance .4, drafting forced, 16.7 for 22.6 tok/ms."""
    survival = np.tile(0.4 ** np.arange(1, 8), (256, 1)).astype(np.float32)
    costs = CostModel.from_table(COST_PROFILE, num_positions=7, is_block=True)
    controller = DepthController(costs)
    limits, floors = np.full(256, 7, np.int32), np.zeros(256, np.int32)
    controller.decide(survival, limits, floors, 256, sampling_rows=256)
    decision = controller.decide(survival, limits, floors, 256, sampling_rows=256)
    assert decision.depth == 0
    assert decision.expected_tokens / decision.cost_ms == pytest.approx(256 / 11.9)


def test_the_depth_follows_the_survival() -> None:
    """Guards against a depth that stays at K or at 0 whatever the acceptance."""
    cheap = model(0.05, 1.0)
    assert {decision.depth for decision in Batch(cheap, GOOD).run(20) if not decision.is_probe} == {
        K
    }
    dear = Batch(model(0.05, 12.0), [[0.9, 0.81, 0.1, 0.01]] * 4)
    assert {decision.depth for decision in dear.run(20) if not decision.is_probe} == {2}


def test_a_block_drafter_drafts_all_or_nothing() -> None:
    """Guards against a depth that a block drafter cannot save anything with."""
    batch = Batch(model(0.05, 1.0, is_block=True), GOOD)
    assert {decision.depth for decision in batch.run(10)} == {K}
    batch.survival[:] = BAD[0]
    assert {decision.depth for decision in batch.run(40)} <= {0, K}


def test_a_local_best_does_not_hold_the_depth() -> None:
    """Guards against a search that tries d ± 1 only and never crosses a step of the staircase."""
    table = {
        "unit": "ms",
        "graph_limit_tokens": 8,
        # 2 tokens are cheap, 3 cost as much as 8.
        "verify_ms_by_tokens": [[1, 10.0], [2, 10.5], [8, 16.0]],
        "draft_ms_by_requests": [[1, 0.4]],
    }
    costs = CostModel.from_table(table, num_positions=K)
    batch = Batch(costs, [[0.5, 0.1, 0.05, 0.01]])
    batch.run(3)
    assert batch.decide().depth == 1
    batch.survival[:] = [0.9, 0.81, 0.76, 0.74]
    # Depth 2 (2.71/16.2) is worse than depth 1 (1.9/10.6), depth 4 (4.21/16.4) is best.
    depths = [decision.depth for decision in batch.run(2 * K) if not decision.is_probe]
    assert depths[-1] == K


def test_a_round_tries_three_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a decision whose time grows with K."""
    tried: list[tuple[int, ...]] = []
    find = depth_module.find_budgets

    def spy(*args: Any, **kwargs: Any) -> Any:
        tried.append(tuple(args[5]))
        return find(*args, **kwargs)

    monkeypatch.setattr(depth_module, "find_budgets", spy)
    batch = Batch(model(0.05, 12.0), [[0.9, 0.81, 0.1, 0.01]] * 4)
    batch.run(8)
    assert tried[0] == (0, 1, 2, 3, 4)
    assert tried[1] == (3,)  # the probe of round 1
    assert tried[2:] == [(2, 0, 1), (2, 0, 3), (2, 0, 4)] * 2 + [(2, 0, 1)]


def test_probes_come_at_round_one_and_then_ever_more_seldom() -> None:
    """Guards against a schedule that stops, or that costs as much after a day as at the start."""
    batch = Batch(model(0.1, 8.0), BAD)
    decisions = batch.run(400)
    probes = [index + 1 for index, decision in enumerate(decisions) if decision.is_probe]
    assert probes == [1, 9, 25, 57, 121, 185, 249, 313, 377]
    assert batch.controller.num_probes == len(probes)
    costs = [decision.cost_ms for decision in decisions if decision.is_probe]
    assert batch.controller.probe_ms == pytest.approx(sum(costs))


def test_broken_promises_bring_the_probes_back() -> None:
    """Guards against a changed workload that is noticed at the next refit only, 64 rounds a probe."""
    batch = Batch(model(0.1, 8.0), BAD)
    batch.run(130)
    assert batch.controller.probe_period == MAX_PROBE_PERIOD
    batch.controller.observe(100.0, 25.0, 111.0)  # inside 1.96·√(5² + 3²)
    assert batch.controller.probe_period == MAX_PROBE_PERIOD
    for actual in (112.0, 88.0):
        batch = Batch(model(0.1, 8.0), BAD)
        batch.run(130)
        batch.controller.observe(100.0, 25.0, actual)
        assert batch.controller.probe_period == MIN_PROBE_PERIOD
        assert sum(decision.is_probe for decision in batch.run(MIN_PROBE_PERIOD)) == 1


def test_large_batches_do_not_probe_for_an_error_that_any_fit_has() -> None:
    """Guards against: thousands of drafts a check, whose 95 % interval is narrower than a good fit errs."""
    batch = Batch(model(0.1, 8.0), BAD)
    batch.run(130)
    batch.controller.observe(10_000.0, 2_500.0, 10_400.0)  # eight standard deviations of the draws
    assert batch.controller.probe_period == MAX_PROBE_PERIOD
    for expected in (10_000.0, float("nan")):
        batch = Batch(model(0.1, 8.0), BAD)
        batch.run(130)
        batch.controller.observe(expected, 2_500.0, 10_700.0)
        assert batch.controller.probe_period == MIN_PROBE_PERIOD


def test_a_probe_drafts_one_deeper_and_verifies_one_row_in_full() -> None:
    """Guards against labels that never reach the next depth."""
    batch = Batch(model(0.05, 12.0), [[0.9, 0.81, 0.1, 0.01]] * 3)
    for decision in batch.run(60):
        if not decision.is_probe:
            assert decision.probe_row == -1
            assert not decision.min_verify_lens.any()
            continue
        assert decision.depth == 3
        assert (decision.draft_lens == 3).all()
        assert decision.min_verify_lens[decision.probe_row] == 3
        assert decision.min_verify_lens.sum() == 3
        assert decision.budget >= 3
    assert not batch.floors.any()  # the caller's array is left alone


def test_the_probe_row_goes_round_robin_whatever_the_survival() -> None:
    """Guards against case 18: a probe row picked by survival is a choice by the drafts themselves."""
    rows = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        batch = Batch(model(0.1, 8.0), np.sort(rng.random((5, K)))[:, ::-1], floors=[0, K, 0, 0, 0])
        batch.limits[3] = 0  # a prefill row
        taken = []
        for _ in range(6):
            batch.controller.observe(1.0, 0.0, 2.0)
            taken += [d.probe_row for d in batch.run(MIN_PROBE_PERIOD) if d.is_probe]
        rows.append(taken)
    assert rows[0] == rows[1] == [0, 2, 4, 0, 2, 4]


def test_rows_that_do_not_adapt_keep_their_draft() -> None:
    """Guards against adaptive=False rows that are trimmed, or drafted no deeper than the others."""
    costs = model(0.1, 8.0, request_ms=4.0)
    batch = Batch(costs, BAD, limits=[4, 3, 4, 4], floors=[0, 3, 0, 0])
    for decision in batch.run(30):
        assert decision.draft_lens[1] == decision.min_verify_lens[1] == 3
        assert decision.budget >= 3
    decision = next(decision for decision in batch.run(2) if not decision.is_probe)
    assert decision.depth == 0
    assert decision.draft_lens.tolist() == [0, 3, 0, 0]
    # The drafter runs 3 of 4 positions; 4 base tokens and 3 drafts are verified.
    assert decision.cost_ms == pytest.approx(8.0 * 3 / 4 + 10.7)


def test_without_an_adaptive_row_there_is_nothing_to_decide_or_probe() -> None:
    """Guards against probes in a batch of prefill and fixed rows, and against a first search wasted on it."""
    batch = Batch(model(0.05, 1.0), GOOD, limits=[0, 0, 4, 4], floors=[0, 0, 4, 4])
    for decision in batch.run(20):
        assert not decision.is_probe
        assert decision.draft_lens.tolist() == [0, 0, 4, 4]
        assert decision.budget == 8
    batch.floors[:] = 0
    first, second = batch.run(2)
    assert first.is_probe
    assert second.depth == K


def test_an_empty_batch() -> None:
    """Guards against a crash in the round in which the batch drained to zero."""
    batch = Batch(model(0.05, 1.0), np.zeros((0, K)))
    decision = batch.decide()
    assert decision.budget == decision.depth == 0
    assert decision.draft_lens.shape == (0,)
    assert not decision.is_probe


def test_decisions_repeat() -> None:
    """Guards against ranks that disagree: the same inputs must give the same decisions."""
    rng = np.random.default_rng(0)
    rounds = [np.sort(rng.random((8, K)))[:, ::-1] for _ in range(50)]
    runs = []
    for _ in range(2):
        batch = Batch(model(0.5, 3.0), rounds[0])
        decisions = []
        for survival in rounds:
            batch.survival = survival.astype(np.float32)
            decision = batch.decide()
            decisions.append((decision.depth, decision.budget, decision.probe_row))
        runs.append(decisions)
    assert runs[0] == runs[1]


def test_a_small_gain_does_not_leave_the_uniform_path() -> None:
    """Guards against case 14: a trim that gains 1 % by forecast and costs more than that by being ragged."""
    costs = model(0.5, 1.0)
    survival = [[0.9, 0.8, 0.7, 0.2], [0.9, 0.8, 0.7, 0.1]] * 2

    def usual(min_gain: float) -> Decision:
        decisions = Batch(costs, survival, min_gain=min_gain).run(30)
        return next(d for d in reversed(decisions) if not d.is_probe)

    trimmed, uniform = usual(0.0), usual(0.05)
    gain = (trimmed.expected_tokens / trimmed.cost_ms) / (uniform.expected_tokens / uniform.cost_ms)
    assert 1.0 <= gain < 1.05
    assert not trimmed.is_uniform
    assert uniform.is_uniform
    assert uniform.budget == uniform.draft_lens.sum()
    np.testing.assert_array_equal(uniform.min_verify_lens, uniform.draft_lens)
    # 4 base tokens and all drafts.
    tokens = 4 + 4 * uniform.depth
    assert uniform.cost_ms == pytest.approx(10.0 + 0.5 * tokens + uniform.depth / K)


def test_a_large_gain_leaves_the_uniform_path() -> None:
    """Guards against a threshold that switches adaptive verification off."""
    costs = model(2.0, 0.4, is_block=True)
    survival = [[0.95, 0.9, 0.85, 0.8]] + [[0.3, 0.1, 0.05, 0.01]] * 3
    decisions = Batch(costs, survival, min_gain=0.05).run(30)
    assert not any(decision.is_uniform for decision in decisions)


def test_probes_are_no_uniform_rounds() -> None:
    """Guards against a probe counted as uniform, whose floor is one row's."""
    batch = Batch(model(0.1, 8.0), BAD, min_gain=0.5)
    decisions = batch.run(60)
    assert any(decision.is_probe for decision in decisions)
    assert all(decision.is_uniform != decision.is_probe for decision in decisions)
    assert {d.depth for d in decisions if d.is_uniform} == {0}
