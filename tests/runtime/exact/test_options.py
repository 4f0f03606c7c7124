"""Every confidence source and every option of the fit and of the round leaves the emitted law exact.

Sources and features run on drafters that draft step by step and in blocks; rounds with a rule of their own
(exploration, minimum gain, early stop) must really have used it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.runtime.exact.fixed_plans import FixedPlans
from tests.runtime.exact.scenarios import Scenario, two_requests
from tests.runtime.exact.test_losslessness import check_exact, contended
from tests.runtime.exact.tiny_models import random_table
from trtllm_av.runtime.adaptive_options import AdaptiveOptions, Source
from trtllm_av.runtime.params import SamplingParams

SOURCES: tuple[Source, ...] = ("estimator", "head", "recalibrated", "head_then_estimator")
ALL_FEATURES = ("tail", "top2_gap", "entropy", "recent_acceptance")


def confidence_head(vocab_size: int = 2) -> Tensor:
    """Logits [V,V] of a head, given the last two tokens."""
    generator = torch.Generator().manual_seed(9)
    return 2.0 * torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)


def with_options(scenario: Scenario, options: AdaptiveOptions) -> Scenario:
    """``scenario`` with a confidence head, ``options``, and a refit after every round."""
    return replace(scenario, head=confidence_head(), options=options, refit_interval=1)


@pytest.mark.parametrize("is_block", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_leaves_the_law_exact(source: Source, is_block: bool) -> None:
    """Guards against a confidence that knows the token it judges, whoever computes it."""
    scenario = with_options(contended(2, 3), AdaptiveOptions(source=source))
    result = check_exact(replace(scenario, is_block=is_block))
    assert result.trimmed_rounds > 0
    assert result.refit_rounds > 0


@pytest.mark.parametrize("source", ["estimator", "recalibrated"])
def test_extra_features_and_labels_leave_the_law_exact(source: Source) -> None:
    """Guards against a feature of the present round's outcome: all features, soft and discounted labels."""
    options = AdaptiveOptions(
        source=source, extra_features=ALL_FEATURES, soft_labels=True, discount=0.5
    )
    result = check_exact(with_options(contended(2, 3), options))
    assert result.trimmed_rounds > 0
    assert result.refit_rounds > 0


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_leaves_longer_drafts_exact(source: Source) -> None:
    """As above with two drafts a row, so that a confidence depends on a drawn token."""
    options = AdaptiveOptions(source=source, extra_features=ALL_FEATURES)
    result = check_exact(with_options(contended(2, 4), options))
    assert 2 in result.depths
    assert result.trimmed_rounds > 0


def exploring(max_tokens: int = 4) -> Scenario:
    """Blocks of two drafts with room for two of four, one of which goes to a row in turn."""
    plans = FixedPlans(depth=2, budget=2, rate=4.0, explored_share=1.0)
    return replace(contended(2, max_tokens), prepare=plans)


@pytest.mark.slow
def test_exploration_leaves_the_law_exact() -> None:
    """Guards against a floor that depends on what it verifies."""
    result = check_exact(exploring())
    assert result.explored_rounds > 0
    assert result.trimmed_rounds > 0


@pytest.mark.slow
def test_a_minimum_gain_leaves_the_law_exact() -> None:
    """Guards against a choice between the paths by what was drawn; both must occur."""
    result = check_exact(replace(two_requests(4), options=AdaptiveOptions(min_gain=0.05)))
    assert result.uniform_rounds > 0
    assert result.trimmed_rounds > 0


def stopping(threshold: float) -> Scenario:
    """Two step-by-step drafts a row and room for two of four; the second survival depends on x_0.

    Row 0 starts likely (.95) and goes on likely or not; row 1 starts at .5. A step costs what ``threshold``
    of survival is worth.
    """
    draft = torch.zeros(2, 2, 2, dtype=torch.float64)
    draft[0, 0, 0], draft[1, 1, 0], draft[1, 0, 1] = 4.0, 1.0, 0.1
    return Scenario(
        target=random_table(2, 1.0, seed=3),
        draft=draft,
        prompts=[[0, 0], [1, 1]],
        params=[SamplingParams(max_tokens=4, seed=1)] * 2,
        num_draft_tokens=2,
        costs={
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": [[1, 1.0], [6, 2.0]],
            "draft_ms_by_requests": [[1, 2.0], [2, 2.0]],
        },
        refit_interval=100,
        slope=1.0,
        intercept=-1.0,
        is_probing=False,
        options=AdaptiveOptions(early_stop=True),
        prepare=FixedPlans(depth=2, budget=2, rate=2.0 * threshold),
    )


def test_an_early_stop_leaves_the_law_exact() -> None:
    """Guards against a stop that tells a row what another one drew; drafts must stop and go on."""
    result = check_exact(stopping(0.3))
    assert result.early_stops > 0
    assert 2 in result.depths
    assert result.trimmed_rounds > 0
