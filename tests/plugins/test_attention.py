"""Attention over the linear cache: the plain torch form against a loop over single queries."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins import attention


def one_query(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[H, D] of one query [H, D] that sees all of keys and values [Hk, N, D], in float64."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = torch.einsum("hd,hnd->hn", query.double(), keys) * query.shape[-1] ** -0.5
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), values)


def reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
) -> Tensor:
    """``attend`` in float64, query by query."""
    result = out.double().clone()
    for row, slot in enumerate(slots.tolist()):
        for token in range(int(cu_seqlens[row]), int(cu_seqlens[row + 1])):
            seen = int(kv_lens[row]) + token - int(cu_seqlens[row]) + 1
            result[token] = one_query(queries[token], keys[slot, :, :seen], values[slot, :, :seen])
    return result


def test_each_query_sees_its_own_slot_up_to_itself() -> None:
    """Guards against a look ahead, a neighbour's slot, and rows of other lengths, none included."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([5, 0, 3, 1, 2])
    kv_lens = torch.tensor([0, 7, 20, 3, 11], dtype=torch.int32)
    lengths = torch.tensor([4, 1, 0, 3, 5])
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    num_tokens, num_heads, num_kv_heads, reach, head_dim = 16, 6, 2, 24, 8
    queries = torch.randn(num_tokens, num_heads, head_dim, generator=generator)
    cache = torch.randn(2, 6, num_kv_heads, reach, head_dim, generator=generator)
    out = torch.full_like(queries, 7.0)
    expected = reference(queries, *cache, slots, kv_lens, cu_seqlens, out)
    result = attention.attend(queries, *cache, slots, kv_lens, cu_seqlens, 5, out)
    assert result is out
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert (out[13:] == 7.0).all()  # the pass's tail is not touched


def test_write_goes_to_the_offsets_of_the_pass() -> None:
    """Guards against keys written to another head, position or slot."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.zeros(2, 3, 2, 5, 4)
    new = torch.randn(2, 3, 2, 4, generator=generator)
    attention.write_kv(*new, *cache, torch.tensor([2 * 5 + 4, 0 * 5 + 1, 1 * 5 + 0]))
    for which in range(2):
        for token, (slot, position) in enumerate([(2, 4), (0, 1), (1, 0)]):
            assert torch.equal(cache[which, slot, :, position], new[which, token])
    assert (cache != 0).sum() == new.numel()
