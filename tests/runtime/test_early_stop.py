"""When a batch stops drafting: the rule, its threshold, and what the round counts."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.exact.fixed_plans import FixedPlans
from tests.runtime.exact.tiny_models import TableDrafter, TableExecutor, random_table
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.early_stop import is_hopeless, stop_survival
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.scheduler import Engine
from trtllm_av.runtime.step import DecodeRows, Round, RoundPlan

TABLE = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [8, 2.0]],
    "draft_ms_by_requests_and_depth": [[1, 1, 0.5], [1, 3, 1.5], [4, 1, 0.7], [4, 3, 2.7]],
}


def plan(threshold: float, floors: list[int]) -> RoundPlan:
    return RoundPlan(
        draft_lens=torch.full((2,), 3, dtype=torch.int32),
        min_verify_lens=torch.tensor(floors, dtype=torch.int32),
        draft_budget=4,
        coefficients=torch.zeros(4),
        version=0,
        early_stop_survival=threshold,
    )


CONFIDENCE = torch.tensor([[0.9, 0.5, 0.9], [0.4, 0.9, 0.1]])  # survival .9 .45 .405 / .4 .36 .036


@pytest.mark.parametrize(
    ("threshold", "position", "floors", "stops"),
    [
        (0.44, 1, [0, 0], False),
        (0.46, 1, [0, 0], True),
        (0.46, 1, [2, 0], False),  # row 0 is to be verified up to position 1
        (0.46, 2, [2, 0], True),
        (0.41, 2, [0, 0], True),
        (0.40, 2, [0, 0], False),  # row 1 alone is not the batch
        (0.95, 0, [0, 0], False),  # the first draft is always drawn
        (0.0, 2, [0, 0], False),
    ],
)
def test_a_batch_stops_when_no_row_can_pay_for_a_step(
    threshold: float, position: int, floors: list[int], stops: bool
) -> None:
    """Guards against a rule over sums, a confidence in place of a survival, and floors left undrafted."""
    assert is_hopeless(CONFIDENCE, plan(threshold, floors), position) == stops


def test_the_threshold_is_what_a_step_costs_in_tokens_a_row() -> None:
    """Guards against a threshold in ms, or one that stops where a step is free."""
    costs = CostModel.from_table(TABLE, num_positions=3)
    # A step of 4 rows takes 1 ms, in which the round emits 2 tokens.
    assert stop_survival(costs, 4, 3, 2.0) == pytest.approx(0.5)
    assert stop_survival(costs, 1, 3, 2.0) == 1.0
    assert stop_survival(costs, 4, 1, 2.0) == 0.0  # nothing to save behind the first
    block = {**TABLE, "draft_ms_by_requests": [[1, 0.5], [4, 0.7]]}
    del block["draft_ms_by_requests_and_depth"]
    assert (
        stop_survival(CostModel.from_table(block, num_positions=3, is_block=True), 4, 3, 2.0) == 0
    )


class CountingDrafter(TableDrafter):
    """Counts positions that were computed."""

    num_steps = 0

    def step(self, position: int, tokens: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return super().step(position, tokens)


def test_an_early_stop_spares_steps_and_is_counted() -> None:
    """Guards against a stop that computes the draft all the same, or counts what was never planned."""
    vocab = 8
    target = random_table(vocab, 2.0, seed=1)
    for early_stop in (False, True):
        controller = AdaptiveController(
            "adaptive",
            5,
            2,
            CostModel.from_table(
                {
                    **TABLE,
                    "verify_ms_by_tokens": [[1, 3.0], [12, 3.3]],
                    "draft_ms_by_requests_and_depth": [[1, 1, 0.5], [1, 5, 2.5], [2, 5, 2.5]],
                },
                num_positions=5,
            ),
            options=AdaptiveOptions(early_stop=early_stop),
        )
        drafter = CountingDrafter(target + random_table(vocab, 1.0, seed=2), 5)
        engine = Engine(
            TableExecutor(target, 2, 160), drafter, controller, KeyedSource(), max_seq_len=128
        )
        FixedPlans(depth=4, budget=8, rate=1.4)(engine)  # a threshold of .35 for two rows
        for seed in range(6):
            engine.submit([1, 2], SamplingParams(max_tokens=100, seed=seed))
        planned = planned_steps = 0
        while engine.has_work:
            engine.step()
            if (decision := controller.last_decision) is not None:
                planned += int(decision.draft_lens.sum())
                planned_steps += max(int(decision.draft_lens.max()) - 1, 0)
        report = engine.report()
        assert report.emitted == 600
        assert planned - report.drafted == engine.round.num_undrafted
        assert (engine.round.num_early_stops > 0) == (engine.round.num_undrafted > 0) == early_stop
        assert (drafter.num_steps < planned_steps) == early_stop


@pytest.mark.parametrize(("threshold", "num_drawn"), [(0.0, 3), (1e-6, 3), (1.0, 1)])
def test_a_stopped_draft_computes_nothing_behind_its_end(threshold: float, num_drawn: int) -> None:
    """Guards against a stop that goes on computing, and a plan that still names what was not drawn."""
    drafter = CountingDrafter(random_table(4, 1.0, seed=1), 3)
    executor = TableExecutor(random_table(4, 1.0, seed=2), 2, 16)
    options = AdaptiveOptions(early_stop=True)
    round_ = Round(executor, drafter, KeyedSource(), num_speculative_tokens=3, options=options)
    zeros = torch.zeros(2, dtype=torch.int64)
    rows = DecodeRows(
        slots=torch.arange(2),
        lens=torch.full((2,), 4),
        history=torch.ones(2, 16, dtype=torch.int64),
        seeds=torch.arange(2),
        request_numbers=zeros,
        rounds=zeros,
        temperature=torch.ones(2),
        top_k=zeros,
        top_p=torch.ones(2),
        rules=[None] * 2,
        outputs=[[], []],
        wants_logprobs=[False] * 2,
    )
    planned = plan(threshold, [0, 0])
    planned.draft_lens = torch.tensor([3, 2], dtype=torch.int32)
    drafts = round_.draft(rows, planned)
    assert len(drafts.laws) == num_drawn
    assert planned.draft_lens.tolist() == [min(3, num_drawn), min(2, num_drawn)]
    is_stopped = num_drawn < 3
    assert round_.num_early_stops == is_stopped
    assert round_.num_undrafted == (3 if is_stopped else 0)
    assert drafter.num_steps == (1 if is_stopped else 2)  # the position that ended it is scored
    scored = None if drafts.scored_lens is None else drafts.scored_lens.tolist()
    assert scored == ([2, 2] if is_stopped else None)
