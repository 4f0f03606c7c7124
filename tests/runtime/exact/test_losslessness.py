"""The emitted law equals the target's exactly, and the harness notices every known way to break that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.exact import scenarios
from tests.runtime.exact.scenarios import Scenario, largest_error, one_request, two_requests
from tests.runtime.exact.tiny_models import random_table
from trtllm_av.runtime.budget import find_budgets
from trtllm_av.runtime.operations import TorchOperations
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.sampling import Distribution
from trtllm_av.runtime.step import Drafts, Round, RoundPlan, Trim

EXACT = 1e-12

#: Deep drafts are cheap and verification is cheap up to six tokens: depths up to 3, trimmed.
DEEP = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [2, 1.02], [3, 1.04], [4, 1.06], [5, 1.08], [6, 1.5], [8, 3.0]],
    "draft_ms_by_requests": [[1, 0.01], [2, 0.01]],
}  # fmt: skip
#: A block drafter pays for every position, so that B lies below the drafted length for R = 1.
STEEP_BLOCK = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [2, 1.05], [3, 1.6], [4, 3.0]],
    "draft_ms_by_requests": [[1, 0.02]],
}

#: One verified draft is nearly free, a second is dear.
ONE_OF_TWO = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [2, 1.02], [3, 2.0], [4, 4.0]],
    "draft_ms_by_requests": [[1, 0.01]],
}


def check_exact(scenario: Scenario) -> scenarios.Enumeration:
    error, result = largest_error(scenario)
    assert error < EXACT
    assert sum(result.law.values()) == pytest.approx(1.0, abs=1e-10)
    return result


def test_two_requests_emit_the_product_of_their_laws() -> None:
    """Guards the whole round: V=2, K=3, R=2, penalties, trimming, depth choice and refits."""
    result = check_exact(two_requests(4))
    assert result.num_rounds >= 3
    assert result.refit_rounds > 0
    assert len(result.depths) >= 2
    assert result.trimmed_rounds > 0


@pytest.mark.slow
def test_two_requests_with_deep_drafts_emit_the_product_of_their_laws() -> None:
    """As above with drafts of full depth; longer than every commit can wait."""
    result = check_exact(two_requests(5, costs=DEEP))
    assert 3 in result.depths
    assert result.num_rounds >= 4
    assert result.trimmed_rounds > 0


@pytest.mark.parametrize("is_penalised", [True, False])
def test_one_request_emits_its_law(is_penalised: bool) -> None:
    """Guards a wider vocabulary: V=4, K=3, R=1, trimmed, with a frequency penalty or with refits."""
    scenario = one_request(
        4, is_penalised=is_penalised, costs=ONE_OF_TWO, is_probing=False, refit_interval=1
    )
    result = check_exact(scenario)
    assert result.num_rounds >= 4  # the prompt's and three that decode
    assert result.trimmed_rounds > 0
    assert (result.refit_rounds > 0) != is_penalised  # such a row must not train


@pytest.mark.slow
def test_one_request_with_trimmed_blocks_emits_its_law() -> None:
    """As above, long enough for full-depth blocks that a steep table trims, and with probe rounds."""
    result = check_exact(one_request(5, is_penalised=False, costs=STEEP_BLOCK))
    assert 3 in result.depths
    assert result.trimmed_rounds > 0
    assert result.refit_rounds > 0


def test_greedy_drafts_leave_the_law_exact() -> None:
    """Guards draft_sample_method "greedy": a one-hot q under a sampled target, trimmed, with refits."""
    scenario = one_request(
        4,
        is_penalised=False,
        costs=ONE_OF_TWO,
        is_probing=False,
        refit_interval=1,
        is_greedy_draft=True,
    )
    result = check_exact(scenario)
    assert result.trimmed_rounds > 0
    assert result.refit_rounds > 0


def test_detects_greedy_drafts_judged_by_the_full_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy draft was drawn with probability 1, not with the drafter's."""
    scenario = one_request(4, costs=ONE_OF_TWO, is_probing=False, is_greedy_draft=True)
    original = Round.draft

    def draft(self: Round, *args: Any) -> Drafts:
        drafts = original(self, *args)
        drafts.laws = [
            Distribution.from_probabilities((law.full() + 0.25) / 2.0) for law in drafts.laws
        ]
        return drafts

    detects(lambda patch: patch.setattr(Round, "draft", draft), scenario, monkeypatch)


# --- mutations: each must change the law by far more than rounding -----------------------------------


def contended(num_draft_tokens: int, max_tokens: int) -> Scenario:
    """Two requests with blocks of ``num_draft_tokens`` and room for one verified draft a round."""
    return Scenario(
        target=random_table(2, 1.0, seed=1),
        draft=random_table(2, 2.0, seed=51),
        prompts=[[0, 1], [1, 0]],
        params=[SamplingParams(max_tokens=max_tokens, seed=1)] * 2,
        num_draft_tokens=num_draft_tokens,
        costs={
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": [[1, 1.0], [3, 1.01], [4, 3.0], [6, 9.0]],
            "draft_ms_by_requests": [[1, 0.01]],
        },
        is_block=True,
        refit_interval=100,
        is_probing=False,
    )


def all_or_nothing() -> Scenario:
    """One request whose second confidence, and with it the best budget, depends on its first draft."""
    draft = torch.zeros(2, 2, 2, dtype=torch.float64)
    draft[0, 1, 0], draft[1, 0, 0] = 2.2, 4.8
    return Scenario(
        target=random_table(2, 1.0, seed=1),
        draft=draft,
        prompts=[[0, 0]],
        params=[SamplingParams(max_tokens=4, seed=1)],
        num_draft_tokens=2,
        costs={
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": [[1, 1.0], [2, 2.0], [3, 2.43]],
            "draft_ms_by_requests": [[1, 0.001]],
        },
        is_block=True,
        refit_interval=100,
        slope=0.5,
        intercept=0.3,
        is_probing=False,
    )


Install = Callable[[pytest.MonkeyPatch], None]


def detects(mutate: Install, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario is exact, and stops being so with the bug in."""
    check_exact(scenario)
    mutate(monkeypatch)
    error, _ = largest_error(scenario)
    assert error > 1e3 * EXACT


def replace_trim(
    monkeypatch: pytest.MonkeyPatch, edit: Callable[[Round, RoundPlan, Drafts], None]
) -> None:
    """Let ``edit`` change plan or drafts between drawing and trimming."""
    original = Round.trim

    def trim(self: Round, plan: RoundPlan, drafts: Drafts) -> Trim:
        edit(self, plan, drafts)
        return original(self, plan, drafts)

    monkeypatch.setattr(Round, "trim", trim)


def test_detects_budget_from_current_confidences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that sees this round's confidences knows what was drawn."""
    scenario = all_or_nothing()

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        survival = np.multiply.accumulate(drafts.confidence.numpy(), axis=1)
        lens, floors = plan.draft_lens.numpy(), plan.min_verify_lens.numpy()
        cost_model = scenario.cost_model()
        if lens.any():
            (choice,) = find_budgets(
                survival,
                lens,
                floors,
                len(lens),
                cost_model,
                [int(lens.max())],
                sampling_rows=len(lens),
                dtype=np.float64,
            )
            plan.draft_budget = choice.budget

    detects(lambda patch: replace_trim(patch, edit), scenario, monkeypatch)


def test_detects_score_of_the_drawn_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """q(x) as confidence trims unlikely drafts and leaves the likely ones."""

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        for position, law in enumerate(drafts.laws):
            drafts.confidence[:, position] = law.probability(drafts.tokens[:, position])

    detects(lambda patch: replace_trim(patch, edit), contended(1, 3), monkeypatch)


def test_detects_confidence_of_the_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one: the confidence at i comes from the logits after x_i."""

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        drafts.confidence[:, :-1] = drafts.confidence[:, 1:].clone()

    detects(lambda patch: replace_trim(patch, edit), contended(2, 4), monkeypatch)


def test_detects_draft_cut_for_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forbidden draft must be judged: cutting it hands its mass to all other tokens."""
    scenario = contended(1, 3)
    scenario.draft = random_table(3, 2.0, seed=51)
    scenario.target = random_table(3, 1.0, seed=1)
    scenario.target[:, :, 2] = -torch.inf
    original = Round.trim

    def trim(self: Round, plan: RoundPlan, drafts: Drafts) -> Trim:
        trimmed = original(self, plan, drafts)
        is_clean = (drafts.tokens != 2).to(torch.int32).cumprod(1).sum(1)
        lens = torch.minimum(trimmed.verify_lens, is_clean.to(torch.int32))
        ends = (lens + 1).cumsum(0, dtype=torch.int32)
        return Trim(trimmed.survival, lens, torch.cat([ends.new_zeros(1), ends]))

    detects(lambda patch: patch.setattr(Round, "trim", trim), scenario, monkeypatch)


def test_detects_judging_in_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """q drawn in one precision and judged in another is a small, steady bias."""
    original = Round.draft

    def draft(self: Round, *args: Any) -> Drafts:
        drafts = original(self, *args)
        drafts.laws = [
            Distribution(law.point, law.dense.float().double(), law.dense_row, law.is_empty)
            for law in drafts.laws
        ]
        return drafts

    detects(lambda patch: patch.setattr(Round, "draft", draft), contended(1, 3), monkeypatch)


def test_detects_keys_without_request_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two live requests with one seed would draw the same numbers."""
    original = scenarios.Engine.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        admit = self.slots.admit
        self.slots.admit = _WithoutNumber(admit)

    detects(
        lambda patch: patch.setattr(scenarios.Engine, "__init__", build),
        contended(1, 3),
        monkeypatch,
    )


class _WithoutNumber:
    """``SlotTable.admit`` with the request number left out (a class, so that states can be stored)."""

    def __init__(self, admit: Callable[..., None]) -> None:
        self.admit = admit

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.admit(*args, **{**kwargs, "request_number": 0})


def tied_requests() -> Scenario:
    """First survivals are equal; the second position of request 1 is certain after one of its tokens."""
    draft = torch.zeros(2, 2, 2, dtype=torch.float64)
    draft[:, 1, 0] = 15.0  # after token 1 the drafter is sure: confidence 1, an exact tie
    prompt = [0, 0]
    return Scenario(
        target=random_table(2, 1.0, seed=3),
        draft=draft,
        prompts=[prompt, prompt],
        params=[SamplingParams(max_tokens=4, seed=1), SamplingParams(max_tokens=4, seed=2)],
        costs={
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": [[1, 1.0], [3, 1.01], [4, 3.0], [6, 9.0]],
            "draft_ms_by_requests": [[1, 0.01], [2, 0.01]],
        },
        is_block=True,
        refit_interval=100,
        slope=4.0,
        intercept=0.1,
        is_probing=False,
    )


def test_detects_ties_broken_the_wrong_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper slots first on ties: a request's first slot then wins by what it has drawn."""
    original = TorchOperations.trim_drafts

    def trim(
        confidence: Tensor, draft_lens: Tensor, base: Tensor, floors: Tensor, budget: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        survival, _, _ = original(confidence, draft_lens, base, floors, budget)
        slots = [
            (-float(survival[r, i]), -i, r)
            for r in range(len(draft_lens))
            for i in range(int(floors[r]), int(draft_lens[r]))
        ]
        lens = floors.clone()
        for _, _, r in sorted(slots)[: int(budget) - int(floors.sum())]:
            lens[r] += 1
        ends = (lens + base).cumsum(0, dtype=torch.int32)
        return survival, lens, torch.cat([ends.new_zeros(1), ends])

    detects(
        lambda patch: patch.setattr(TorchOperations, "trim_drafts", staticmethod(trim)),
        tied_requests(),
        monkeypatch,
    )
