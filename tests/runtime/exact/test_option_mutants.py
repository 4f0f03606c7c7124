"""Lossy variants of the options: each looks harmless, and the enumeration must notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.runtime.exact.scenarios import Scenario, largest_error
from tests.runtime.exact.test_losslessness import EXACT, contended, replace_trim
from tests.runtime.exact.test_options import confidence_head, exploring, stopping, with_options
from trtllm_av.runtime import step
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.step import Drafts, Round, RoundPlan


def check_noticed(scenario: Scenario) -> None:
    """The law is off by far more than rounding; that it is exact without the bug is tested elsewhere."""
    error, _ = largest_error(scenario)
    assert error > 1e3 * EXACT


def live_survival(drafts: Drafts) -> Tensor:
    return drafts.confidence.cumprod(1)


@pytest.mark.slow
def test_detects_an_exploration_row_chosen_by_live_survival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row whose draft looks worst "needs labels most" — and was chosen by its own x_0."""

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        if plan.explored_rows and int(plan.draft_lens.min()) == 2:
            row = int(live_survival(drafts)[:, 1].argmin())
            plan.min_verify_lens = torch.zeros_like(plan.draft_lens)
            plan.min_verify_lens[row] = 2

    replace_trim(monkeypatch, edit)
    check_noticed(exploring())


@pytest.mark.slow
def test_detects_a_minimum_gain_by_live_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying everything "because the trim would leave little out this time" knows what was drawn."""

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        kept = float(live_survival(drafts)[:, 1].sum())
        if kept > 1.0 and int(plan.draft_lens.min()) == 2:
            plan.min_verify_lens = plan.draft_lens
            plan.draft_budget = int(plan.draft_lens.sum())

    replace_trim(monkeypatch, edit)
    check_noticed(contended(2, 4))


@pytest.mark.slow
def test_detects_a_stop_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft thrown away because of what comes after it was cut for what it is."""
    original = Round._stop_early

    def stop(self: Round, plan: RoundPlan, drafts: Drafts, position: int) -> None:
        drafts.laws.pop()
        original(self, plan, drafts, position - 1)

    monkeypatch.setattr(Round, "_stop_early", stop)
    check_noticed(stopping(0.3))


@pytest.mark.parametrize(
    "reduce",
    [
        pytest.param(torch.mean, id="mean"),
        pytest.param(torch.sum, id="sum", marks=pytest.mark.slow),
    ],
)
def test_detects_a_stop_by_a_figure_of_the_batch(
    reduce: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean tells row 0 whether to go on by what row 1 drew, and its next slot displaces row 1's."""
    threshold = 0.55

    def is_hopeless(confidence: Tensor, plan: RoundPlan, position: int) -> bool:
        if position == 0:
            return False
        figure = float(reduce(confidence[:, : position + 1].prod(1)))
        return figure < threshold * (2.0 if reduce is torch.sum else 1.0)

    monkeypatch.setattr(step, "is_hopeless", is_hopeless)
    check_noticed(stopping(threshold))


def test_detects_a_head_fed_with_the_state_behind_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's logit of the state after x_i is as easy to take as the one before it."""
    head = confidence_head()

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        before = torch.cat([torch.zeros_like(drafts.tokens[:, :1]), drafts.tokens[:, :-1]], 1)
        drafts.confidence = head[before, drafts.tokens].sigmoid()

    scenario = with_options(contended(1, 3), AdaptiveOptions(source="head"))
    replace_trim(monkeypatch, edit)
    check_noticed(scenario)


def test_detects_an_own_acceptance_that_knows_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's acceptance "so far" must not count the drafts that it is to judge."""

    def edit(round_: Round, plan: RoundPlan, drafts: Drafts) -> None:
        for i, law in enumerate(drafts.laws):
            is_likeliest = law.full().argmax(-1) == drafts.tokens[:, i]
            drafts.confidence[:, i] *= 0.5 + 0.4 * is_likeliest

    options = AdaptiveOptions(extra_features=("recent_acceptance",))
    replace_trim(monkeypatch, edit)
    check_noticed(replace(contended(1, 3), options=options))
