"""Attention of a packed, ragged batch over the linear KV cache, with lengths that only the device knows.

Objective: the verify pass of a captured graph. Any mix of rows, each with its own number of queries and
of cached tokens, runs through one launch whose grid depends on shapes alone. Invariants: a query at
position p sees exactly positions 0 … p of its own slot; nothing behind a row's length is ever part of a
result; no call synchronises or has a shape that depends on data, so that all of it can be captured.

On CUDA the kernels of ``triton_attention`` run (Triton comes with CUDA builds of torch); the plain torch
forms below run on every other device and define what the kernels compute.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    out: Tensor,
) -> Tensor:
    """Causal attention of R rows of queries, each over its own slot of the cache; returns ``out``.

    Query j of row r stands at position ``kv_lens[r] + j`` and sees the positions up to its own, whose keys
    and values ``write_kv`` has stored before. Query head h reads KV head h // (H / Hk); scores are scaled
    by D^-0.5.

    Args:
        queries: [T, H, D] bf16, f16 or f32, packed; row r owns ``cu_seqlens[r]`` … ``cu_seqlens[r+1]`` − 1.
        keys, values: [S, Hk, L, D] of that type, one layer of the cache.
        slots: [R] int64, the cache row of each row.
        kv_lens: [R] int32, tokens that were cached before this pass.
        cu_seqlens: [R + 1] int32; rows without queries are allowed.
        max_length: at least the longest row's number of queries; decides the grid.
        out: [T, H, D] of the queries' type. Packed rows behind ``cu_seqlens[R]`` are left as they are.
    """
    if queries.is_cuda:
        from trtllm_av.plugins import triton_attention

        return triton_attention.attend(
            queries, keys, values, slots, kv_lens, cu_seqlens, max_length, out
        )
    return attend_torch(queries, keys, values, slots, kv_lens, cu_seqlens, max_length, out)


def write_kv(
    new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, write_offsets: Tensor
) -> None:
    """Store [T, Hk, D] keys and values of a pass in the cache [S, Hk, L, D].

    ``write_offsets`` [T] int64 is slot · L + position, as ``trim_and_pack`` gives it; rows that belong to
    no request carry the offset of a place that nobody reads. Offsets of live rows are distinct.
    """
    if new_keys.is_cuda:
        from trtllm_av.plugins import triton_attention

        triton_attention.write_kv(new_keys, new_values, keys, values, write_offsets)
    else:
        write_kv_torch(new_keys, new_values, keys, values, write_offsets)


def attend_torch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    out: Tensor,
) -> Tensor:
    """``attend`` in plain torch: rows are padded to ``max_length``, slots copied whole."""
    num_tokens, num_heads = queries.shape[:2]
    num_rows, num_kv_heads, reach = slots.numel(), keys.shape[1], keys.shape[2]
    if num_rows == 0 or num_tokens == 0:
        return out
    columns = torch.arange(max_length, device=queries.device)
    token = (cu_seqlens[:-1, None] + columns).clamp(max=num_tokens - 1)
    padded = queries[token.long()].transpose(1, 2)  # [R, H, M, D]
    last_visible = kv_lens[:, None] + columns
    is_visible = torch.arange(reach, device=queries.device) <= last_visible[:, :, None]
    mixed = F.scaled_dot_product_attention(
        padded,
        keys[slots],
        values[slots],
        attn_mask=is_visible[:, None],
        enable_gqa=num_heads != num_kv_heads,
    )
    packed = torch.arange(num_tokens, device=queries.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens[1:], packed, right=True).clamp(max=num_rows - 1)
    column = (packed - cu_seqlens[row]).clamp(0, max_length - 1)
    is_owned = (packed < cu_seqlens[-1])[:, None, None]
    return out.copy_(torch.where(is_owned, mixed[row, :, column], out))


def write_kv_torch(
    new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, write_offsets: Tensor
) -> None:
    """``write_kv`` in plain torch."""
    reach = keys.shape[2]
    slots, positions = write_offsets // reach, write_offsets % reach
    keys[slots, :, positions] = new_keys
    values[slots, :, positions] = new_values
