"""Where a confidence comes from: choice of the source, its arithmetic, and what it may not know."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.runtime.exact.tiny_models import (
    HeadedTableDrafter,
    TableDrafter,
    TableExecutor,
    random_table,
)
from trtllm_av.plugins import reference
from trtllm_av.runtime.adaptive_options import AdaptiveOptions, Source
from trtllm_av.runtime.confidence_source import ConfidenceScorer
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.estimator import cold_coefficients
from trtllm_av.runtime.operations import TorchOperations
from trtllm_av.runtime.params import SpeculativeConfig
from trtllm_av.runtime.random_source import RandomKeys
from trtllm_av.runtime.step import DecodeRows, Drafts, Round, RoundPlan

VOCAB, K, R = 5, 4, 3
SOURCES: tuple[Source, ...] = get_args(Source)
FEATURE_SETS = (
    (),
    ("tail",),
    ("top2_gap",),
    ("entropy",),
    ("recent_acceptance",),
    ("top2_gap", "entropy"),
)


def drafters() -> tuple[TableDrafter, HeadedTableDrafter]:
    table = random_table(VOCAB, 2.0, seed=1)
    head = random_table(VOCAB, 1.5, seed=2)[0]
    return TableDrafter(table, K), HeadedTableDrafter(table, head, K)


@pytest.mark.parametrize(
    ("asked", "has_head", "taken"),
    [
        ("auto", False, "estimator"),
        ("auto", True, "recalibrated"),
        ("head", True, "head"),
        ("estimator", True, "estimator"),
        ("estimator", False, "estimator"),
        ("recalibrated", True, "recalibrated"),
        ("head_then_estimator", True, "head_then_estimator"),
    ],
)
def test_the_source_follows_the_drafter_unless_asked(
    asked: str, has_head: bool, taken: str
) -> None:
    """Guards against a trained head that nobody reads, and against an override without effect."""
    config = SpeculativeConfig(confidence_source=asked)  # type: ignore[arg-type]
    assert AdaptiveOptions.resolve(config, drafters()[has_head]).source == taken


@pytest.mark.parametrize("source", ["head", "recalibrated", "head_then_estimator"])
def test_a_source_that_the_drafter_lacks_is_refused(source: str) -> None:
    """Guards against confidences from a head that does not exist."""
    config = SpeculativeConfig(confidence_source=source)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=f"confidence_source='{source}' needs.*'table'.*choose"
    ) as e:
        AdaptiveOptions.resolve(config, drafters()[0])
    assert "\n" not in str(e.value)
    with pytest.raises(RuntimeError, match="no confidence head"):
        drafters()[0].confidence_logit()


def test_features_are_in_one_order_however_listed() -> None:
    """Guards against saved slopes that a reordered list gives to other features."""
    config = SpeculativeConfig(extra_features=["recent_acceptance", "top2_gap", "top2_gap"])
    options = AdaptiveOptions.resolve(config, None)
    assert options.extra_features == ("top2_gap", "recent_acceptance")
    assert options.num_features == 3


class ScriptedSource:
    """Draws the tokens of ``script`` [K][R], one position after the other."""

    def __init__(self, script: list[list[int]]) -> None:
        self.script = script

    def categorical(self, probabilities: Tensor, keys: RandomKeys) -> Tensor:
        return torch.tensor(self.script[int(keys.positions[0])])

    def accept(self, p: Tensor, q: Tensor, keys: RandomKeys) -> Tensor:
        raise AssertionError("nothing is judged here")


def draft(script: list[list[int]], options: AdaptiveOptions) -> Drafts:
    """The drafts of R rows whose tokens are ``script`` [K][R]."""
    drafter = drafters()[options.needs_head]
    executor = TableExecutor(random_table(VOCAB, 1.0, seed=3), R, 16)
    round_ = Round(
        executor,
        drafter,
        ScriptedSource(script),
        num_speculative_tokens=K,
        options=options,
    )
    zeros = torch.zeros(R, dtype=torch.int64)
    rows = DecodeRows(
        slots=torch.arange(R),
        lens=torch.full((R,), 4),
        history=torch.arange(R * 16).reshape(R, 16) % VOCAB,
        seeds=zeros,
        request_numbers=zeros,
        rounds=zeros,
        temperature=torch.tensor([1.0, 0.7, 1.3]),
        top_k=zeros,
        top_p=torch.ones(R),
        rules=[None] * R,
        outputs=[[] for _ in range(R)],
        wants_logprobs=[False] * R,
    )
    coefficients = cold_coefficients(K, options.num_features)
    coefficients[1 : options.num_features] = 0.3
    plan = RoundPlan(
        draft_lens=torch.tensor([K, K, K - 1], dtype=torch.int32),
        min_verify_lens=torch.zeros(R, dtype=torch.int32),
        draft_budget=5,
        coefficients=torch.from_numpy(coefficients),
        version=0,
        recent_acceptance=torch.tensor([0.5, -1.0, 0.0]),
    )
    return round_.draft(rows, plan)


@pytest.mark.parametrize("features", FEATURE_SETS, ids="+".join)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_drawn_changes_no_confidence_up_to_it(
    source: Source, features: tuple[str, ...]
) -> None:
    """Guards against case 18, lookahead: other tokens x_i leave confidences at positions ≤ i bit-equal."""
    options = AdaptiveOptions(source=source, extra_features=features)  # type: ignore[arg-type]
    script = [[0] * R for _ in range(K)]
    before = draft(script, options)
    for position, token in itertools.product(range(K), range(1, VOCAB)):
        script[position] = [token] * R
        after = draft(script, options)
        known = slice(0, position + 1)
        assert torch.equal(after.confidence[:, known], before.confidence[:, known])
        for features_of in (after.features, before.features):
            features_of.nan_to_num_(nan=99.0)  # of a row that drafts no more
        assert torch.equal(after.features[:, known], before.features[:, known])
        if position < K - 1:  # so that the comparison above can fail
            next_one = position + 1
            assert not torch.equal(after.confidence[:, next_one], before.confidence[:, next_one])
        script[position] = [0] * R


def test_a_row_that_ended_its_draft_has_no_confidence() -> None:
    """Guards against a head whose logit of a row that drafts no more admits a slot that is not there."""
    for source in SOURCES:
        drafts = draft([[0] * R] * K, AdaptiveOptions(source=source))
        assert (drafts.confidence[:2] > 0).all()
        assert drafts.confidence[2, K - 1] == 0


def score(source: Source, logits: Tensor, head: Tensor, position: int) -> tuple[Tensor, Tensor]:
    options = AdaptiveOptions(source=source, extra_features=("entropy",))
    coefficients = torch.tensor([0.5, -0.25, 0.1, 0.2, 0.3, 0.4])
    return ConfidenceScorer(options).score(
        TorchOperations(),
        logits,
        torch.ones(len(logits)),
        coefficients,
        position,
        vocab_size=VOCAB,
        draft_lens=torch.full((len(logits),), K, dtype=torch.int32),
        head_logit=head,
        recent_acceptance=None,
    )


def test_confidences_of_every_source() -> None:
    """Guards against a slope, an intercept or a position that belongs to another one."""
    logits = random_table(VOCAB, 2.0, seed=7)[0].float()
    head = torch.linspace(-2.0, 2.0, VOCAB)
    top, _ = reference.score_drafts(
        logits[:, None], torch.ones(VOCAB), [1.0] * 5, [0], vocab_size=VOCAB
    )
    entropy = reference.law_features(logits[:, None], torch.ones(VOCAB), vocab_size=VOCAB)[:, 0, 1]
    own = 0.5 * torch.tensor(top[:, 0, 0]) - 0.25 * torch.tensor(entropy)
    recalibrated = 0.5 * head - 0.25 * torch.tensor(entropy)
    for position, intercept in ((0, 0.1), (2, 0.3)):
        expected = {
            "estimator": (own + intercept).sigmoid(),
            "head": head.sigmoid(),
            "recalibrated": (recalibrated + intercept).sigmoid(),
            "head_then_estimator": (own + intercept if position else head).sigmoid(),
        }
        for source in SOURCES:
            features, confidence = score(source, logits, head, position)
            torch.testing.assert_close(confidence, expected[source], msg=source)
            first = head if source == "recalibrated" else torch.tensor(top[:, 0, 0])
            torch.testing.assert_close(features[:, 0], first)
            torch.testing.assert_close(features[:, 1], torch.tensor(entropy))


def test_what_cannot_be_scored_trains_nothing_and_is_admitted_last() -> None:
    """Guards against a NaN in logits or head that poisons the fit, or that passes as certain."""
    logits = random_table(VOCAB, 2.0, seed=7)[0].float()
    logits[1] = -torch.inf
    head = torch.zeros(VOCAB)
    head[2] = torch.nan
    for source in SOURCES:
        features, confidence = score(source, logits, head, 0)
        trains = torch.isfinite(features).all(-1) & (confidence > 0)
        if source in ("estimator", "head", "head_then_estimator"):
            assert not trains[1]
        if source != "estimator":
            assert confidence[2] == 0
        assert trains[3:].all()
    assert (score("head", logits, head, 0)[1][1]) == 0.5  # the head may still say something
