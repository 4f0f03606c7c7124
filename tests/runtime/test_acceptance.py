"""Lossless acceptance: single judgements, edges of a batch, keys, and the frequencies of real draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.runtime.random_sources import RecordingSource, key_maker
from trtllm_av.runtime.acceptance import Acceptance, accept_drafts
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource, Purpose
from trtllm_av.runtime.sampling import Distribution, distribution
from trtllm_av.runtime.token_rules import TokenRules

V, K = 3, 3
Prefix = tuple[int, ...]
Laws = dict[Prefix, Distribution]  # the law behind each prefix, one row


def judge_one(
    p: list[float], q: list[float] | int, token: int, *, verify_len: int = 1
) -> Acceptance:
    """One request, one draft; an integer ``q`` is a one-hot draft."""
    draft = (
        Distribution.one_hot(torch.tensor([q]), len(p), torch.float64)
        if isinstance(q, int)
        else Distribution.from_probabilities(torch.tensor([q], dtype=torch.float64))
    )
    zero = torch.zeros(1, dtype=torch.int64)
    return accept_drafts(
        Distribution.from_probabilities(torch.tensor([p] * (verify_len + 1), dtype=torch.float64)),
        torch.tensor([0, verify_len + 1]),
        torch.tensor([[token]]),
        [draft],
        torch.tensor([1]),
        torch.tensor([verify_len]),
        key_maker(zero, zero, zero),
        KeyedSource(),
    )


def test_forbidden_draft_is_judged_not_cut() -> None:
    """Guards against a forbidden draft that is accepted, or replaced by a draw from p ((.65,.35,0) then)."""
    p, q = [0.5, 0.5, 0.0], [0.6, 0.1, 0.3]
    outcome = judge_one(p, q, 2)
    assert outcome.accepted_lens.tolist() == [0]
    assert outcome.next_tokens.tolist() == [1]  # max(0, p − q) = (0, .4, 0)


def test_draft_that_neither_law_allows_is_rejected() -> None:
    """Guards against accepting on p ≥ q alone: 0 ≥ 0 would emit a forbidden token."""
    outcome = judge_one([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], 2)
    assert outcome.accepted_lens.tolist() == [0]
    assert outcome.next_tokens.item() in (0, 1)


def test_empty_residual_draws_from_the_target() -> None:
    """Guards against NaN or an arbitrary token where rounding makes p ≤ q everywhere."""
    p, q = [0.25 - 1e-17, 0.75, 0.0], [0.25, 0.75, 1e-9]
    outcome = judge_one(p, q, 2)
    assert outcome.accepted_lens.tolist() == [0]
    assert outcome.next_tokens.item() in (0, 1)


@pytest.mark.parametrize("q", [0, [1.0, 0.0, 0.0]], ids=["one-hot", "dense"])
def test_certain_draft_is_rejected_into_the_rest(q: list[float] | int) -> None:
    """Guards against a one-hot q that is not subtracted: the rejected token would come back."""
    outcome = judge_one([0.0, 1.0, 0.0], q, 0)
    assert (outcome.accepted_lens.item(), outcome.next_tokens.item()) == (0, 1)


@pytest.mark.parametrize(
    ("q", "expected"), [([0.5, 0.3, 0.2], 0.75), (1, 0.5)], ids=["dense", "one-hot"]
)
def test_overlap_is_given_at_the_first_trimmed_position(
    q: list[float] | int, expected: float
) -> None:
    """Guards against a soft label of the wrong row, or one where a draft was rejected or none trimmed."""
    p = [0.25, 0.5, 0.25]
    assert judge_one(p, q, 1, verify_len=0).overlap.item() == pytest.approx(expected)
    assert judge_one(p, q, 1, verify_len=1).overlap.isnan().all()


def test_rows_without_drafts_only_draw_the_bonus() -> None:
    """Guards against unset draft columns that are read, and against rows that shift by a draft."""
    target = Distribution.from_probabilities(torch.eye(4).double()[[3, 1, 2, 0]])
    drafts = [Distribution.from_probabilities(torch.eye(4).double()[[0, 1, 0]])]
    rows = torch.arange(3)
    outcome = accept_drafts(
        target,
        torch.tensor([0, 1, 3, 4], dtype=torch.int32),
        torch.tensor([[-1, -1], [1, -1], [99, -1]], dtype=torch.int32),
        drafts,
        torch.tensor([0, 1, 0], dtype=torch.int32),
        torch.tensor([0, 1, 0], dtype=torch.int32),
        key_maker(rows, rows, rows),
        KeyedSource(),
    )
    assert outcome.accepted_lens.tolist() == [0, 1, 0]
    assert outcome.next_tokens.tolist() == [3, 2, 0]
    assert outcome.overlap.isnan().all()


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_without_rows_or_drafts(depth: int) -> None:
    """Guards against a crash when the batch drains, or when nobody drafts."""
    none = torch.zeros(0, dtype=torch.int64)
    empty = Distribution.one_hot(none, 4)
    outcome = accept_drafts(
        empty,
        torch.tensor([0]),
        torch.zeros(0, 2, dtype=torch.int64),
        [empty] * depth,
        none,
        none,
        key_maker(none, none, none),
        KeyedSource(),
    )
    assert outcome.accepted_lens.shape == outcome.next_tokens.shape == outcome.overlap.shape == (0,)


def test_dead_rows_are_refused() -> None:
    """Guards against a dead row (no packed row of its own) that silently reads its neighbour's law."""
    law = Distribution.one_hot(torch.tensor([1, 2]), 4)
    zero = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="leave dead"):
        accept_drafts(
            law,
            torch.tensor([0, 0, 2]),
            torch.zeros(2, 1, dtype=torch.int64),
            [],
            zero,
            zero,
            key_maker(zero, zero, zero),
            KeyedSource(),
        )


def test_greedy_round_draws_no_random_number() -> None:
    """Guards the fast path, and greedy output against chance: all decisions are certain."""

    class Refusing:
        def categorical(self, probabilities: Tensor, keys: object) -> Tensor:
            raise AssertionError("drew a token")

        def accept(self, p: Tensor, q: Tensor, keys: object) -> Tensor:
            raise AssertionError("drew an acceptance")

    rows = torch.arange(2)
    outcome = accept_drafts(
        Distribution.one_hot(torch.tensor([1, 2, 3, 1, 5, 3]), 6),
        torch.tensor([0, 3, 6]),
        torch.tensor([[1, 2], [1, 2]]),
        [
            Distribution.one_hot(torch.tensor([1, 1]), 6),
            Distribution.one_hot(torch.tensor([2, 2]), 6),
        ],
        torch.tensor([2, 2]),
        torch.tensor([2, 2]),
        key_maker(rows, rows, rows),
        Refusing(),
    )
    assert outcome.accepted_lens.tolist() == [2, 1]
    assert outcome.next_tokens.tolist() == [3, 5]


def play_rounds(source: RecordingSource, num_rounds: int, *, counts_rounds: bool) -> None:
    """Rounds of two requests with one seed, trimmed at random lengths."""
    generator = torch.Generator().manual_seed(0)
    ones, everyone = torch.ones(2, dtype=torch.int64), torch.arange(2)
    for round_ in range(num_rounds):
        keys = key_maker(ones, everyone, ones * (round_ if counts_rounds else 0))
        laws = [
            Distribution.from_probabilities(torch.rand(2, V, generator=generator).softmax(-1))
            for _ in range(K)
        ]
        tokens = torch.stack(
            [
                law.draw(source, keys(everyone, torch.full_like(everyone, i), Purpose.DRAFT))
                for i, law in enumerate(laws)
            ],
            dim=1,
        )
        verify_lens = torch.randint(0, K + 1, (2,), generator=generator)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (verify_lens + 1).cumsum(0)])
        target = torch.rand(int(cu_seqlens[-1]), V, generator=generator).softmax(-1)
        accept_drafts(
            Distribution.from_probabilities(target),
            cu_seqlens,
            tokens,
            laws,
            torch.full((2,), K),
            verify_lens,
            keys,
            source,
        )


def test_no_key_is_used_twice_in_trimmed_rounds() -> None:
    """Guards case "random numbers": a draft redrawn with its old number makes a stale budget lossy."""
    source = RecordingSource(KeyedSource())
    play_rounds(source, 200, counts_rounds=True)
    assert {key[4] for key in source.used} == set(Purpose)
    with pytest.raises(AssertionError, match="key used twice"):
        play_rounds(RecordingSource(KeyedSource()), 200, counts_rounds=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_draws_follow_the_targets_law(dtype: torch.dtype) -> None:
    """Guards the real source in the real path: numbers shared between draft, accept and residual bias this."""
    width, n = 12, 6000
    torch.manual_seed(5)
    settings = [(1.0, 0, 1.0, 1.0), (0.8, 4, 1.0, 0.8), (1.3, 0, 0.8, 1.3), (1.0, 0, 1.0, 0.0)]
    rules = TokenRules(
        SamplingParams(presence_penalty=1.0, logit_bias={3: 1.5}), [1], vocab_size=width
    )
    target_logits, draft_logits = torch.randn(2, len(settings) + 1, width) * 1.5
    target_logits[-1] = rules.apply(target_logits[-1], [2, 2, 4])
    settings.append((1.0, 0, 1.0, 1.0))  # penalised target, plain draft
    group = torch.arange(len(settings)).repeat_interleave(n)

    def laws(logits: Tensor, temperature_column: int) -> Distribution:
        temperature, top_k, top_p = (
            torch.tensor([setting[column] for setting in settings])
            for column in (temperature_column, 1, 2)
        )
        return distribution(logits, temperature, top_k.long(), top_p, vocab_size=width, dtype=dtype)

    p, q = laws(target_logits, 0), laws(draft_logits, 3)
    rows = torch.arange(group.numel())
    keys = key_maker(torch.full_like(rows, 11), rows, torch.zeros_like(rows))
    drafts = [q.rows(group)]
    tokens = drafts[0].draw(KeyedSource(), keys(rows, torch.zeros_like(rows), Purpose.DRAFT))
    outcome = accept_drafts(
        p.rows(group.repeat_interleave(2)),
        torch.arange(rows.numel() + 1) * 2,
        tokens[:, None],
        drafts,
        torch.ones_like(rows),
        torch.ones_like(rows),
        keys,
        KeyedSource(),
    )
    first = torch.where(outcome.accepted_lens == 1, tokens, outcome.next_tokens)
    for g in range(len(settings)):
        expected = p.full()[g].double() * n
        counts = torch.bincount(first[group == g], minlength=width).double()
        assert counts[expected == 0].sum() == 0
        possible = expected > 0
        freedom = int(possible.sum()) - 1
        statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, settings[g]
        # The bonus is drawn with its own number: independent of how the draft was accepted.
        bonus = outcome.next_tokens[(group == g) & (outcome.accepted_lens == 1)]
        counts = torch.bincount(bonus, minlength=width).double()
        expected = expected * bonus.numel() / n
        statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, settings[g]


def test_overlaps_are_known_where_a_draft_was_judged() -> None:
    """Guards against Σ min(p, q) of another row or position, or of drafts that nobody judged."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.4, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.int64)
    # Row 0 accepts token 1 twice and verifies two of three; row 1 rejects its first; row 2 has none.
    target = torch.stack([p[0], p[1], p[2], p[2], p[0], p[0], p[1]])
    outcome = accept_drafts(
        Distribution.from_probabilities(target),
        torch.tensor([0, 3, 6, 7]),
        torch.tensor([[1, 1, 0], [2, 0, 0], [0, 0, 0]]),
        [Distribution.from_probabilities(law.repeat(3, 1)) for law in q],
        torch.tensor([3, 2, 0]),
        torch.tensor([2, 2, 0]),
        key_maker(zeros, zeros, zeros),
        KeyedSource(),
        has_overlaps=True,
    )
    accepted = outcome.accepted_lens.tolist()
    assert accepted[1:] == [0, 0]  # p(2) = 0 there
    assert outcome.overlaps is not None
    overlap = [[float(torch.minimum(a, b).sum()) for b in q] for a in p]
    expected = torch.full((3, 3), torch.nan, dtype=torch.float64)
    for position in range(min(accepted[0] + 1, 2)):
        expected[0, position] = overlap[position][position]
    expected[1, 0] = overlap[2][0]
    torch.testing.assert_close(outcome.overlaps, expected, equal_nan=True)
