"""Sampling without tables: the plain torch form against the runtime's sampling and acceptance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from trtllm_av.plugins import sampling_ops
from trtllm_av.plugins.sampling_laws import LOG2_E
from trtllm_av.plugins.sampling_ops import Laws
from trtllm_av.runtime import acceptance, sampling
from trtllm_av.runtime.random_source import KeyedSource, Purpose, RandomKeys, uniforms

V, WIDTH = 97, 104  # real and padded vocabulary


def hard_logits(num_rows: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """[num_rows, WIDTH] with ties, NaN, −inf and +inf, rows of −inf alone, and large padded columns."""
    logits = torch.randn(num_rows, WIDTH, generator=generator) * 3
    logits[1::7] = logits[1::7].round()  # ties
    logits[2::7, ::3] = torch.nan
    logits[3::7, 5:] = -torch.inf
    logits[4::21, 11] = torch.inf
    logits[5::21] = -torch.inf
    logits[6::21] = torch.nan
    logits[:, V:] = 50.0
    return logits.to(dtype)


def settings(num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """temperature, top_k and top_p of [num_rows], each off for some."""

    def choose(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)]

    return (
        choose([0.0, 1e-40, 1e-4, 0.3, 1.0, 1.7]),
        choose([0, 1, 2, 5, V - 1, V, V + 3]).long(),
        choose([1.0, 1.0, 0.0, 1e-9, 0.3, 0.9, 0.999]),
    )


def both(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Laws, sampling.Distribution]:
    laws = sampling_ops.cut_thresholds(
        sampling_ops.row_statistics(logits, temperature, V), top_k, top_p
    )
    return laws, sampling.distribution(logits, temperature, top_k, top_p, vocab_size=V)


def all_probabilities(laws: Laws) -> Tensor:
    rows = torch.arange(len(laws))[:, None]
    return sampling_ops.probability(laws, rows, torch.arange(V).expand(len(laws), V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_are_those_of_the_host(dtype: torch.dtype) -> None:
    """Guards against a law that differs on the device: ties cut apart, NaN, greedy, padded columns."""
    generator = torch.Generator().manual_seed(1)
    logits = hard_logits(420, generator, dtype)
    laws, host = both(logits, *settings(420, generator))
    torch.testing.assert_close(all_probabilities(laws), host.full(), rtol=2e-6, atol=1e-9)


def test_draws_are_those_of_the_host() -> None:
    """Guards against another reading of the same random number, and against drawing what has none."""
    generator = torch.Generator().manual_seed(2)
    logits = hard_logits(2100, generator, torch.float32)
    laws, host = both(logits, *settings(2100, generator))
    numbers = torch.arange(2100)
    keys = RandomKeys(numbers * 12345, numbers, numbers % 9, numbers % 7, Purpose.DRAFT)
    u = sampling_ops.keyed_uniforms(
        keys.seeds, keys.requests, keys.rounds, keys.positions, Purpose.DRAFT
    )
    drawn = sampling_ops.draw(laws, u)
    assert torch.equal(drawn, host.draw(KeyedSource(), keys))
    assert (sampling_ops.probability(laws, numbers, drawn) > 0).all()


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_draw_at_the_ends(u: float) -> None:
    """Guards against a token without probability at u = 0, or none at all at the largest u."""
    logits = torch.full((3, V), -torch.inf)
    logits[:, 40:43] = torch.tensor([0.0, 1.0, 0.5])
    laws = sampling_ops.row_statistics(logits, torch.ones(3), V)
    drawn = sampling_ops.draw(laws, torch.full((3,), u, dtype=torch.float64))
    assert drawn.tolist() == [40 if u == 0.0 else 42] * 3


def test_uniforms_are_the_very_numbers_of_the_host() -> None:
    """Guards against another stream: a seed would no longer reproduce its tokens on another device."""
    generator = torch.Generator().manual_seed(3)

    def integers(high: int) -> Tensor:
        return torch.randint(-high if high == 2**63 - 1 else 0, high, (500,), generator=generator)

    seeds, requests = integers(2**63 - 1), integers(2**63 - 1)
    rounds, positions = integers(2**32 - 1), integers(2**30 - 1)
    for purpose in Purpose:
        expected = uniforms(RandomKeys(seeds, requests, rounds, positions, purpose))
        ours = sampling_ops.keyed_uniforms(seeds, requests, rounds, positions, purpose)
        np.testing.assert_array_equal(ours.numpy(), expected)


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("is_greedy_draft", [False, True])
def test_rounds_are_those_of_the_host(is_reduced: bool, is_greedy_draft: bool) -> None:
    """Guards against any difference in who is accepted, what replaces it, and the overlap that trains."""
    num_rows, depth = 300, 4
    generator = torch.Generator().manual_seed(4)
    temperature, top_k, top_p = settings(num_rows, generator)
    draft_lens = torch.randint(0, depth + 1, (num_rows,), generator=generator)
    verify_lens = (draft_lens * torch.rand(num_rows, generator=generator)).round().long()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), (verify_lens + 1).cumsum(0)])
    row_of = torch.repeat_interleave(torch.arange(num_rows), verify_lens + 1)
    target_logits = torch.randn(row_of.numel(), WIDTH, generator=generator) * 2
    draft_to_target = torch.randperm(V, generator=generator)[:50] if is_reduced else None
    columns = torch.arange(V) if draft_to_target is None else draft_to_target
    offset = torch.arange(row_of.numel()) - cu_seqlens[row_of]
    draft_logits = torch.randn(num_rows, depth, columns.numel(), generator=generator)
    # Drafts resemble the target, so that some are accepted at every depth.
    is_drafted = offset < depth
    draft_logits[row_of[is_drafted], offset[is_drafted]] += target_logits[is_drafted][:, columns]
    draft_temperature = torch.zeros(num_rows) if is_greedy_draft else temperature
    num_columns = columns.numel()
    drafts = sampling_ops.row_statistics(
        draft_logits.view(-1, num_columns), draft_temperature.repeat_interleave(depth), num_columns
    )
    host_drafts, draft_tokens = [], torch.empty(num_rows, depth, dtype=torch.long)
    numbers = torch.arange(num_rows)
    source = KeyedSource()

    def keys(rows: Tensor, positions: Tensor, purpose: Purpose) -> RandomKeys:
        return RandomKeys(rows * 31, rows, torch.full_like(rows, 5), positions, purpose)

    off = torch.zeros(num_rows, dtype=torch.long)
    for i in range(depth):
        law = sampling.distribution(
            draft_logits[:, i], draft_temperature, off, torch.ones(num_rows), vocab_size=num_columns
        )
        if draft_to_target is not None:
            law = law.remap(draft_to_target, V)
        host_drafts.append(law)
        draft_tokens[:, i] = law.draw(
            source, keys(numbers, torch.full_like(numbers, i), Purpose.DRAFT)
        )

    target, host_target = both(target_logits, temperature[row_of], top_k[row_of], top_p[row_of])
    expected = acceptance.accept_drafts(
        host_target, cu_seqlens, draft_tokens, host_drafts, draft_lens, verify_lens, keys, source
    )

    inverse = None if draft_to_target is None else sampling_ops.inverse_map(draft_to_target, V)
    draft_tokens[torch.arange(depth) >= verify_lens[:, None]] = 10**9  # never looked at
    seeds, rounds = numbers * 31, torch.full_like(numbers, 5)
    positions = torch.arange(depth)
    u = sampling_ops.keyed_uniforms(
        seeds[:, None], numbers[:, None], rounds[:, None], positions, Purpose.ACCEPT
    )
    verdict = sampling_ops.accept(
        target, cu_seqlens[:-1], drafts, draft_tokens, draft_lens, verify_lens, u, inverse
    )
    purpose = torch.where(verdict.is_rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    u = sampling_ops.keyed_uniforms(seeds, numbers, rounds, verdict.accepted_lens, purpose)
    next_tokens, overlap = sampling_ops.draw_next(target, drafts, verdict, u, inverse)
    assert torch.equal(verdict.accepted_lens.long(), expected.accepted_lens)
    assert torch.equal(next_tokens, expected.next_tokens)
    torch.testing.assert_close(overlap, expected.overlap, rtol=2e-5, atol=1e-6, equal_nan=True)
    assert 0.1 < (verdict.accepted_lens == verify_lens).float().mean() < 0.95


def test_empty_residual_draws_from_the_target() -> None:
    """Guards against NaN or token 0 where p ≤ q everywhere and a draft of probability 0 was rejected."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 0.5]]).repeat(2, 1)
    target = sampling_ops.row_statistics(logits, torch.ones(2), 4)
    drafts = sampling_ops.row_statistics(logits[:1], torch.ones(1), 4)
    one = torch.ones(1, dtype=torch.int32)
    u = torch.zeros(1, 1, dtype=torch.float64)
    first = torch.zeros(1, dtype=torch.long)
    verdict = sampling_ops.accept(target, first, drafts, torch.zeros(1, 1), one, one, u)
    tokens, overlap = sampling_ops.draw_next(target, drafts, verdict, u[0])
    assert (verdict.accepted_lens.tolist(), tokens.tolist()) == ([0], [1])
    assert overlap.isnan().all()


def test_share_that_is_met_exactly_ends_the_nucleus() -> None:
    """Guards against one token too many where the likeliest ones hold the share to the bit."""
    logits = torch.tensor([[-1.0, 0.0, -2.0, -2.0]])
    laws = sampling_ops.row_statistics(logits, torch.tensor([LOG2_E]), 4)  # masses ½, 1, ¼, ¼
    off = torch.zeros(1, dtype=torch.long)
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.76, 4)):
        cut = sampling_ops.cut_thresholds(laws, off, torch.tensor([top_p]))
        probabilities = sampling_ops.probability(cut, off, torch.arange(4))
        assert (probabilities > 0).sum() == kept
