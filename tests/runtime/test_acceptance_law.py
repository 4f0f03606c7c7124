"""The exact law of one round, by weighing every outcome of its draws: all settings, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.runtime.random_sources import ScriptedSource
from trtllm_av.runtime.acceptance import Acceptance, accept_drafts
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import Purpose
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
