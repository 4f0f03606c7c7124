"""What the options make of a plan, and of what comes back from its round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trtllm_av.runtime.acceptance import Acceptance
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.params import AvMode
from trtllm_av.runtime.sampling import Distribution
from trtllm_av.runtime.step import Drafts, RoundOutcome, RoundPlan, Trim

R, K = 4, 3
COSTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [8, 1.2], [10, 1.6], [16, 4.0]],
    "draft_ms_by_requests": [[1, 0.15], [4, 0.3]],
}


class Running:
    """A controller whose rounds accept every verified draft, or none."""

    is_accepting = True

    def __init__(
        self, mode: AvMode = "adaptive", *, is_block: bool = False, **options: Any
    ) -> None:
        self.controller = AdaptiveController(
            mode,
            K,
            R,
            CostModel.from_table(COSTS, num_positions=K, is_block=is_block),
            options=AdaptiveOptions(**options),
        )
        self.slots = np.arange(R)
        self.num_features = self.controller.options.num_features

    def plan(self) -> RoundPlan:
        return self.controller.plan(self.slots, draft_limits=[K] * R, is_adaptive=[True] * R)

    def finish(self, plan: RoundPlan, scored_lens: torch.Tensor | None = None) -> None:
        lens = torch.minimum(plan.draft_lens, torch.tensor(plan.draft_budget // R))
        drafts = Drafts(
            torch.zeros(R, K, dtype=torch.int64),
            torch.full((R, K, self.num_features), 2.0),
            torch.full((R, K), 0.6),
            [Distribution.one_hot(torch.zeros(R, dtype=torch.int64), 1)],
            scored_lens,
        )
        trim = Trim(torch.zeros(R, K), lens, torch.zeros(R + 1, dtype=torch.int32))
        none = torch.full((R,), torch.nan)
        overlaps = torch.full((R, K), 0.6) if self.controller.options.soft_labels else None
        accepted_lens = lens.long() * self.is_accepting
        acceptance = Acceptance(accepted_lens, torch.zeros(R, dtype=torch.int64), none, overlaps)
        outcome = RoundOutcome(drafts, trim, acceptance, [], [])
        self.controller.observe(self.slots, plan, outcome, [K] * R)

    def run(self, rounds: int) -> list[RoundPlan]:
        plans = []
        for _ in range(rounds):
            plans.append(self.plan())
            self.finish(plans[-1])
        return plans


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 1),
        ({"extra_features": ("entropy",)}, 2),
        ({"source": "recalibrated", "extra_features": ("top2_gap", "recent_acceptance")}, 3),
    ],
)
def test_a_plan_has_a_coefficient_for_every_feature(options: dict[str, Any], size: int) -> None:
    """Guards against slopes read as intercepts; a head's logit starts as it is."""
    running = Running(**options)
    first = running.plan()
    assert first.coefficients.numel() == size + K
    assert first.coefficients[1:size].abs().sum() == 0
    expected = [1.0, 0.0] if options.get("source") == "recalibrated" else [0.5, -0.2]
    assert first.coefficients[[0, size]].tolist() == pytest.approx(expected)
    running.run(120)
    assert running.controller.estimator.num_refits > 0


def test_own_acceptance_is_fixed_before_the_round_and_reset_with_the_slot() -> None:
    """Guards against a feature of the round itself, and of the request that had the slot before."""
    running = Running(extra_features=("recent_acceptance",))
    plan = running.plan()
    assert plan.recent_acceptance is not None
    assert plan.recent_acceptance.tolist() == [0.0] * R
    running.finish(plan)
    assert plan.recent_acceptance.tolist() == [0.0] * R
    running.run(10)
    running.controller.admit(2)
    later = running.plan().recent_acceptance
    assert later is not None
    assert later[2] == 0.0
    assert (later[[0, 1, 3]] > 0.5).all()
    assert Running().plan().recent_acceptance is None


def test_uniform_rounds_are_planned_and_counted() -> None:
    """Guards against a plan that says uniform and trims, or a count that forgets rounds."""
    running = Running(min_gain=1.0)
    plans = running.run(40)
    uniform = [plan for plan in plans if plan.is_uniform]
    assert running.controller.num_uniform_rounds == len(uniform) > 20
    for plan in uniform:
        assert plan.draft_budget == int(plan.draft_lens.sum())
        assert torch.equal(plan.min_verify_lens, plan.draft_lens)


def test_explored_rows_reach_the_plan() -> None:
    """Guards against exploration that is decided, paid for and not carried out."""
    running = Running(exploration=0.01, is_block=True)
    explored = [plan for plan in running.run(300) if plan.explored_rows]
    exploration = running.controller.exploration
    assert exploration is not None
    assert exploration.num_rounds == len(explored) > 0
    assert all(int(plan.min_verify_lens.max()) > 0 for plan in explored)
    assert all(plan.draft_budget >= int(plan.min_verify_lens.sum()) for plan in explored)


def test_shadow_neither_explores_nor_stops() -> None:
    """Guards against a shadow mode whose drafts depend on other rows, so that a seed repeats nothing."""
    running = Running("shadow", is_block=True, exploration=0.01, early_stop=True)
    running.is_accepting = False  # deep positions starve, although they are verified
    for plan in running.run(150):
        assert plan.explored_rows == plan.early_stop_survival == 0
        assert plan.draft_lens.tolist() == plan.min_verify_lens.tolist() == [K] * R
    assert running.controller.exploration is not None
    assert running.controller.exploration.num_rounds == 0
    uniform = Running("shadow", min_gain=1.0)
    uniform.run(20)
    assert uniform.controller.num_uniform_rounds == 0


def test_the_stop_survival_comes_with_the_plan() -> None:
    """Guards against a threshold from the round that it ends, and one where the option is off."""
    assert all(plan.early_stop_survival == 0 for plan in Running().run(20))
    running = Running(early_stop=True)
    for _ in range(20):
        (plan,) = running.run(1)
        decision = running.controller.last_decision
        assert decision is not None
        step_ms = 0.3 / K
        rate = decision.expected_tokens / decision.cost_ms
        expected = min(rate * step_ms / R, 1.0) if decision.depth > 1 else 0.0
        assert plan.early_stop_survival == pytest.approx(expected)


def test_what_was_scored_and_not_drafted_is_remembered() -> None:
    """Guards against a depth that stays too deep because the survivals that ended drafts were forgotten."""
    running = Running(early_stop=True)
    for _ in range(30):
        plan = running.plan()
        plan.draft_lens = plan.draft_lens.clamp(max=1)
        running.finish(plan, scored_lens=plan.draft_lens + 1)
    survival = running.controller.history.survival(running.slots)
    np.testing.assert_allclose(survival[:, :2], [[0.6, 0.36]] * R, rtol=1e-6)


def test_soft_labels_are_asked_for_and_used() -> None:
    """Guards against an option that trains on what became of the draft all the same."""
    accepted, soft = Running(), Running(soft_labels=True)
    for running in (accepted, soft):
        running.run(400)
    logits = [
        2.0 * running.controller.estimator.coefficients[0]
        + running.controller.estimator.coefficients[1]
        for running in (accepted, soft)
    ]
    chance = [1 / (1 + np.exp(-logit)) for logit in logits]
    assert chance[0] > 0.85  # every verified draft was accepted
    assert chance[1] == pytest.approx(0.6, abs=0.05)
