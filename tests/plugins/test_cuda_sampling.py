"""Sampling kernels on CUDA against the plain torch form on the CPU. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trtllm_av.plugins import sampling_ops
from trtllm_av.plugins.sampling_laws import LOG2_E
from trtllm_av.plugins.sampling_ops import Laws, Verdict
from trtllm_av.runtime.random_source import Purpose, RandomKeys, uniforms

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_gpu(value: Any) -> Any:
    """A tensor, or laws, on the GPU."""
    if isinstance(value, Laws):
        return Laws(value.logits.cuda(), value.vocab_size, *map(Tensor.cuda, value.row_numbers))
    return value.cuda()


def hard_logits(num_rows: int, width: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Random rows, with ties, NaN, −inf and +inf among them, and large padded columns."""
    logits = torch.randn(num_rows, width) * 3
    logits[1::9] = logits[1::9].round()
    logits[2::9, ::3] = torch.nan
    logits[3::9, min(5, vocab_size - 1) :] = -torch.inf
    logits[4::27, vocab_size // 2] = torch.inf
    logits[5::27] = -torch.inf
    logits[6::27] = torch.nan
    logits[:, vocab_size:] = 50.0
    return logits.to(dtype)


def temperatures(num_rows: int) -> Tensor:
    return torch.tensor([0.0, 1e-40, 1e-4, 0.3, 1.0, 1.7])[torch.randint(6, (num_rows,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "width"), [(2, 2), (111, 128), (32000, 32000), (151936, 152064)]
)
def test_statistics_are_those_of_plain_torch(
    dtype: torch.dtype, vocab_size: int, width: int
) -> None:
    """Guards against a wrong first maximum among ties, a poisoned sum, and padded columns that count."""
    torch.manual_seed(vocab_size)
    logits, temperature = hard_logits(54, width, vocab_size, dtype), temperatures(54)
    ours = sampling_ops.row_statistics(logits.cuda(), temperature.cuda(), vocab_size)
    plain = sampling_ops.row_statistics(logits, temperature, vocab_size)
    assert torch.equal(ours.point.cpu(), plain.point)
    assert torch.equal(ours.maximum.cpu(), plain.maximum)
    torch.testing.assert_close(ours.scale.cpu(), plain.scale, rtol=3e-7, atol=0)
    torch.testing.assert_close(ours.total.cpu(), plain.total, rtol=1e-5, atol=0)


def laws_of(num_rows: int, width: int, vocab_size: int, dtype: torch.dtype) -> Laws:
    """Laws with cuts, on the CPU."""
    laws = sampling_ops.row_statistics(
        hard_logits(num_rows, width, vocab_size, dtype), temperatures(num_rows), vocab_size
    )
    top_k = torch.tensor([0, 0, 1, 5, 50])[torch.randint(5, (num_rows,))]
    top_p = torch.tensor([1.0, 1.0, 0.3, 0.9])[torch.randint(4, (num_rows,))]
    return sampling_ops.cut_thresholds(laws, top_k, top_p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "width"), [(2, 2), (5000, 5008), (49152, 49152)])
def test_draws_are_those_of_plain_torch(dtype: torch.dtype, vocab_size: int, width: int) -> None:
    """Guards against a draw off by a block, a token without probability, and a cut that is ignored."""
    torch.manual_seed(vocab_size)
    laws = laws_of(300, width, vocab_size, dtype)
    u = torch.rand(300, dtype=torch.float64)
    u[:20], u[20:40] = 0.0, 1.0 - 2.0**-53
    drawn = sampling_ops.draw(on_gpu(laws), u.cuda()).cpu()
    assert (sampling_ops.probability(laws, torch.arange(300), drawn) > 0).all()
    middle = slice(40, None)  # at the ends, rounding decides between tokens of no weight
    same = drawn[middle] == sampling_ops.draw(laws, u)[middle]
    assert same.sum() >= 259  # a number may lie within a rounding error of a border


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_reduced", [False, True])
def test_rounds_are_those_of_plain_torch(dtype: torch.dtype, is_reduced: bool) -> None:
    """Guards against another verdict, another replacement, another overlap: acceptance would be biased."""
    torch.manual_seed(7)
    num_rows, depth, vocab_size = 200, 5, 9001
    draft_to_target = torch.randperm(vocab_size)[:4000].sort().values if is_reduced else None
    columns = torch.arange(vocab_size) if draft_to_target is None else draft_to_target
    draft_lens = torch.randint(0, depth + 1, (num_rows,)).int()
    verify_lens = (draft_lens * torch.rand(num_rows)).round().int()
    ends = (verify_lens + 1).cumsum(0)
    first_rows = ends - verify_lens - 1
    first_rows[7] = -1  # a dead slot's
    logits = torch.randn(int(ends[-1]), vocab_size).mul_(2)
    temperature = temperatures(num_rows)
    row_of = torch.repeat_interleave(torch.arange(num_rows), (verify_lens + 1).long())
    target = sampling_ops.row_statistics(logits.to(dtype), temperature[row_of], vocab_size)
    draft_logits = torch.randn(num_rows, depth, columns.numel())
    offset = torch.arange(row_of.numel()) - first_rows.clamp(min=0)[row_of]
    is_drafted = offset < depth
    draft_logits[row_of[is_drafted], offset[is_drafted]] += logits[is_drafted][:, columns]
    drafts = sampling_ops.row_statistics(
        draft_logits.view(-1, columns.numel()).to(dtype),
        temperature.repeat_interleave(depth),
        columns.numel(),
    )
    u = torch.rand(3, num_rows, depth, dtype=torch.float64)
    draft_tokens = sampling_ops.draw(drafts, u[0].flatten()).view(num_rows, depth)
    draft_tokens = columns[draft_tokens]
    draft_tokens[torch.arange(depth) >= verify_lens[:, None]] = -5
    inverse = sampling_ops.inverse_map(columns, vocab_size) if is_reduced else None

    def decide(move: Any) -> tuple[Verdict, Tensor, Tensor]:
        mapped = None if inverse is None else move(inverse)
        laws, others = move(target), move(drafts)
        tensors = map(move, (draft_tokens.int(), draft_lens, verify_lens, u[1]))
        verdict = sampling_ops.accept(laws, move(first_rows), others, *tensors, mapped)
        return verdict, *sampling_ops.draw_next(
            laws, others, verdict, move(u[2, :, 0].contiguous()), mapped
        )

    verdict, tokens, overlap = decide(lambda value: value)
    ours, our_tokens, our_overlap = decide(on_gpu)
    for name in ("accepted_lens", "rows", "draft_rows", "is_rejected"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(verdict, name)), name
    assert (our_tokens.cpu() == tokens).sum() >= num_rows - 1
    torch.testing.assert_close(our_overlap.cpu(), overlap, rtol=1e-3, atol=1e-5, equal_nan=True)
    assert 0.1 < verdict.is_rejected.float().mean() < 0.9


def test_uniforms_are_the_very_numbers_of_the_host() -> None:
    """Guards against another stream: a seed would no longer reproduce its tokens on another device."""
    torch.manual_seed(3)
    top = 2**63 - 1
    seeds, requests = torch.randint(-top, top, (500, 1)), torch.randint(-top, top, (500, 1))
    rounds, positions = torch.randint(2**32 - 1, (500, 1)), torch.randint(2**30 - 1, (3,))
    purposes = torch.randint(4, (500, 3))
    ours = sampling_ops.keyed_uniforms(
        *(x.cuda() for x in (seeds, requests, rounds, positions, purposes))
    ).cpu()
    draft = sampling_ops.keyed_uniforms(
        *(x.cuda() for x in (seeds, requests, rounds, positions)), Purpose.DRAFT
    ).cpu()
    wide = torch.broadcast_tensors(seeds, requests, rounds, positions)
    for purpose in Purpose:
        host = uniforms(RandomKeys(*(x.flatten() for x in wide), purpose)).reshape(500, 3)
        expected = torch.from_numpy(host)
        assert torch.equal(ours[purposes == purpose], expected[purposes == purpose])
        if purpose == Purpose.DRAFT:
            assert torch.equal(draft, expected)


def test_all_of_a_round_is_captured() -> None:
    """Guards against a synchronisation or a shape that depends on data inside a round's graph."""
    torch.manual_seed(5)
    target, drafts = (
        on_gpu(laws_of(12, 777, 777, torch.bfloat16)),
        on_gpu(laws_of(8, 777, 777, torch.bfloat16)),
    )
    rows = torch.arange(4, device="cuda")
    lens = torch.full((4,), 2, dtype=torch.int32, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        laws = sampling_ops.row_statistics(target.logits, target.total, 777)
        laws = sampling_ops.cut_thresholds(laws, laws.point % 9, laws.total.clamp(0.1, 1.0))
        u = sampling_ops.keyed_uniforms(rows[:, None], rows[:, None], rows[:, None], rows[:2], 1)
        tokens = sampling_ops.draw(drafts, u.flatten()).view(4, 2)
        verdict = sampling_ops.accept(laws, rows * 3, drafts, tokens, lens, lens, u)
        return sampling_ops.draw_next(laws, drafts, verdict, u[:, 0])

    expected = run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            result = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1], equal_nan=True)


def test_total_is_only_replaced_by_a_cut() -> None:
    """Guards against laws that share memory: a cut must not change the law it was made from."""
    laws = on_gpu(laws_of(9, 50, 50, torch.float32))
    before = replace(laws, total=laws.total.clone())
    sampling_ops.cut_thresholds(laws, torch.full_like(laws.point, 3), torch.ones_like(laws.total))
    assert torch.equal(laws.total, before.total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "width"), [(111, 128), (2049, 2064), (32000, 32000)])
def test_cuts_are_those_of_plain_torch(dtype: torch.dtype, vocab_size: int, width: int) -> None:
    """Guards against ties cut apart, a cut on the wrong side of zero, and a nucleus of another size."""
    torch.manual_seed(11)
    laws = sampling_ops.row_statistics(
        hard_logits(108, width, vocab_size, dtype), temperatures(108), vocab_size
    )
    # Up to 2048 tokens are searched apart from their row.
    top_k = torch.tensor([0, 1, 50, 2047, 2048, 2049, vocab_size - 1, vocab_size])
    top_k = top_k[torch.randint(8, (108,))]
    top_p = torch.tensor([1.0, 0.0, 1e-9, 0.3, 0.9, 0.999])[torch.randint(6, (108,))]
    plain = sampling_ops.cut_thresholds(laws, top_k, top_p)
    ours = sampling_ops.cut_thresholds(on_gpu(laws), top_k.cuda(), top_p.cuda())
    is_cut = laws.scale > 0
    cut, total = ours.cut.cpu()[is_cut], ours.total.cpu()
    # Where the share lies within a rounding error of a border, one token more or less is kept.
    assert (cut == plain.cut[is_cut]).sum() >= is_cut.sum() - 1
    same = (ours.cut.cpu() == plain.cut) | ~is_cut
    torch.testing.assert_close(total[same], plain.total[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_share_that_is_met_exactly_ends_the_nucleus(dtype: torch.dtype) -> None:
    """Guards against one token too many where the likeliest ones hold the share to the bit."""
    logits = torch.tensor([[-1.0, 0.0, -2.0, -2.0]], dtype=dtype, device="cuda")
    laws = sampling_ops.row_statistics(logits, torch.tensor([LOG2_E], device="cuda"), 4)
    off = torch.zeros(1, dtype=torch.long, device="cuda")
    for top_p, smallest in ((0.5, 0.0), (0.75, -1.0), (0.76, -2.0)):
        cut = sampling_ops.cut_thresholds(laws, off, torch.tensor([top_p], device="cuda"))
        assert cut.cut.item() == smallest
