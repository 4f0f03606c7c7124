"""Lossless acceptance: exact laws by weighing every outcome, and the frequencies of real draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.runtime.random_sources import RecordingSource, ScriptedSource, key_maker
from trtllm_av.runtime.acceptance import Acceptance, accept_drafts
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource, Purpose
from trtllm_av.runtime.sampling import Distribution, distribution
from trtllm_av.runtime.token_rules import TokenRules

V, K = 3, 3
Prefix = tuple[int, ...]
Laws = dict[Prefix, Distribution]  # the law behind each prefix, one row


@dataclass(frozen=True)
class Setting:
    """How a request draws: of its target, and of its draft."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    draft_temperature: float = 1.0
    is_penalised: bool = False


def random_laws(seed: int, temperature: float, setting: Setting) -> Laws:
    """A law behind each prefix of up to K tokens, random but fixed, with the setting's rules applied."""
    generator = torch.Generator().manual_seed(seed)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "bad_words_ids": [[0, 1]]}
    rules = TokenRules(
        SamplingParams(**(penalties if setting.is_penalised else {})), [2], vocab_size=V
    )
    laws = {}
    for length in range(K + 1):
        for prefix in product(range(V), repeat=length):
            logits = torch.randn(V, generator=generator, dtype=torch.float64) * 1.5
            laws[prefix] = distribution(
                rules.apply(logits, prefix)[None] if rules.is_active else logits[None],
                torch.tensor([temperature]),
                torch.tensor([setting.top_k]),
                torch.tensor([setting.top_p]),
                vocab_size=V,
                dtype=torch.float64,
            )
    return laws


def rows_behind(laws: Laws, prefixes: list[Prefix]) -> Distribution:
    """One batch in which row r is the law behind ``prefixes[r]``; one-hot laws stay one-hot."""
    order = {prefix: i for i, prefix in enumerate(laws)}
    dense = [law.dense for law in laws.values()]
    sizes = torch.tensor([table.shape[0] for table in dense])
    first = sizes.cumsum(0) - sizes
    rows = [
        torch.where(law.dense_row < 0, -1, law.dense_row + first[i])
        for i, law in enumerate(laws.values())
    ]
    whole = Distribution(
        torch.cat([law.point for law in laws.values()]), torch.cat(dense), torch.cat(rows)
    )
    return whole.rows(torch.tensor([order[prefix] for prefix in prefixes]))


def play_all(
    target: Laws, draft: Laws, verify_len: Callable[[Prefix], int]
) -> tuple[Acceptance, Tensor, Tensor]:
    """Every outcome of a round at once: (acceptance, drafts [R, K], exact weight of each row [R])."""
    source = ScriptedSource(V, K)
    everyone = torch.arange(source.num_rows)
    tokens = torch.zeros((source.num_rows, K), dtype=torch.int64)
    drafts = []
    for i in range(K):
        drafts.append(rows_behind(draft, [tuple(row[:i]) for row in tokens.tolist()]))
        keys = source.keys(everyone, torch.full_like(everyone, i), Purpose.DRAFT)
        tokens[:, i] = drafts[i].draw(source, keys)
    verify_lens = torch.tensor([verify_len(tuple(row)) for row in tokens.tolist()])
    prefixes = [
        tuple(row[:j])
        for row, length in zip(tokens.tolist(), verify_lens.tolist(), strict=True)
        for j in range(length + 1)
    ]
    acceptance = accept_drafts(
        rows_behind(target, prefixes),
        torch.cat([torch.zeros(1, dtype=torch.int64), (verify_lens + 1).cumsum(0)]),
        tokens,
        drafts,
        torch.full_like(verify_lens, K),
        verify_lens,
        source.keys,
        source,
    )
    assert (acceptance.accepted_lens <= verify_lens).all()
    has_overlap = (acceptance.accepted_lens == verify_lens) & (verify_lens < K)
    assert torch.equal(~acceptance.overlap.isnan(), has_overlap)
    return acceptance, tokens, source.weights


def law_of_text(target: Laws, acceptance: Acceptance, tokens: Tensor, weights: Tensor) -> Tensor:
    """Law [V, …, V] of the first K+1 tokens if plain decoding continues what the round emitted."""
    outcomes: dict[Prefix, Tensor] = {}
    for row, accepted, token, weight in zip(
        tokens.tolist(),
        acceptance.accepted_lens.tolist(),
        acceptance.next_tokens.tolist(),
        weights,
        strict=True,
    ):
        emitted = (*row[:accepted], token)
        outcomes[emitted] = outcomes.get(emitted, 0.0) + weight
    result = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    for emitted, weight in outcomes.items():
        result[emitted] += weight * continuation(target, emitted)
    return result


def continuation(target: Laws, prefix: Prefix) -> Tensor:
    """Law of what follows ``prefix``, up to K+1 tokens in all."""
    if len(prefix) == K + 1:
        return torch.tensor(1.0, dtype=torch.float64)
    law = target[prefix].full()[0]
    return torch.stack([law[t] * continuation(target, (*prefix, t)) for t in range(V)])


def stopping_rule(drawn: Prefix) -> int:
    """A verified length that looks at earlier drafts only: what a lossless trim may do."""
    length = 0
    while length < K and (sum(drawn[:length]) + length) % 4 != 3:
        length += 1
    return length


SETTINGS = {
    "dense": Setting(),
    "top_k": Setting(top_k=2),
    "top_p": Setting(top_p=0.7),
    "penalised": Setting(is_penalised=True),
    "greedy_draft": Setting(draft_temperature=0.0),
    "greedy_target": Setting(temperature=0.0),
    "greedy": Setting(temperature=0.0, draft_temperature=0.0),
    "penalised_greedy_draft": Setting(draft_temperature=0.0, is_penalised=True, top_p=0.9),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "verify_len",
    [lambda _: 0, lambda _: 1, lambda _: K, stopping_rule],
    ids=["0", "1", "K", "stop"],
)
def test_emitted_law_is_the_targets(name: str, verify_len: Callable[[Prefix], int]) -> None:
    """Guards losslessness itself: wrong residual, wrong row, wrong bonus, a draft judged by another q."""
    setting = SETTINGS[name]
    target = random_laws(1, setting.temperature, setting)
    draft = random_laws(2, setting.draft_temperature, setting)
    acceptance, tokens, weights = play_all(target, draft, verify_len)
    got = law_of_text(target, acceptance, tokens, weights)
    torch.testing.assert_close(got, continuation(target, ()), rtol=0, atol=1e-12)


def test_trim_that_sees_the_drawn_token_is_caught() -> None:
    """Guards the test above: trimming by q of the drawn token is lossy and must show."""
    target, draft = random_laws(1, 1.0, Setting()), random_laws(2, 1.0, Setting())

    def by_sampled_probability(drawn: Prefix) -> int:
        return K if draft[()].full()[0, drawn[0]] > 0.4 else 0

    got = law_of_text(target, *play_all(target, draft, by_sampled_probability))
    assert (got - continuation(target, ())).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("is_stale", "expected"), [(True, 0.7), (False, 0.85)], ids=["stale", "current"]
)
def test_budget_from_current_confidences_is_lossy(is_stale: bool, expected: float) -> None:
    """Guards the acceptance against hiding a lossy budget: .7 if the length is fixed, else .85."""
    p, q = (
        torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64),
        torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64),
    )
    prefixes = list(random_laws(0, 1.0, Setting()))
    target = {prefix: Distribution.from_probabilities(p[None]) for prefix in prefixes}
    draft = {prefix: Distribution.from_probabilities(q[None]) for prefix in prefixes}
    # 2 drafts pay only if the second is likely to be accepted, which token 0 in front makes it.
    acceptance, tokens, weights = play_all(
        target, draft, lambda drawn: 2 if is_stale or drawn[0] == 0 else 0
    )
    got = law_of_text(target, acceptance, tokens, weights).sum((1, 2, 3))
    assert got.tolist() == pytest.approx([expected, 1 - expected, 0.0], abs=1e-12)


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


def test_forbidden_drafts_leave_the_law_exact() -> None:
    """Guards the same in total: drafts that the target forbids must not shift the other tokens."""
    p, q = (
        torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64),
        torch.tensor([[0.6, 0.1, 0.3]], dtype=torch.float64),
    )
    prefixes = list(random_laws(0, 1.0, Setting()))
    target = {prefix: Distribution.from_probabilities(p) for prefix in prefixes}
    draft = {prefix: Distribution.from_probabilities(q) for prefix in prefixes}
    got = law_of_text(target, *play_all(target, draft, lambda _: K))
    torch.testing.assert_close(got, continuation(target, ()), rtol=0, atol=1e-12)


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


def test_overlap_is_the_acceptance_probability() -> None:
    """Guards Σ min(p, q) against any other formula, for each mixture of one-hot and dense laws."""
    for name in SETTINGS:
        setting = SETTINGS[name]
        target = random_laws(1, setting.temperature, setting)
        draft = random_laws(2, setting.draft_temperature, setting)
        for length in range(K):
            trimmed, _, weights = play_all(target, draft, lambda _, n=length: n)
            predicted = (trimmed.overlap * weights).nansum()
            verified, _, weights = play_all(target, draft, lambda _, n=length + 1: n)
            chance = weights[verified.accepted_lens == length + 1].sum()
            torch.testing.assert_close(predicted, chance, rtol=0, atol=1e-12)


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
