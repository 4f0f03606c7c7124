"""Triton kernels behind ``fused``; Triton comes with CUDA builds of torch.

Invariants: a program handles one packed token, or one block of its columns; rows never mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins.triton_language import jit, tl, triton

_BLOCK = 1024


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As ``fused.add_rms_norm``."""
    num_rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(num_rows,)](
        x,
        x if delta is None else delta,
        weight,
        total,
        normed,
        eps,
        width,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )
    return total, normed


def join_norms(
    token_ids: Tensor, embedding: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """As ``fused.join_norms``."""
    num_rows, width = hidden.shape
    joined = hidden.new_empty((num_rows, 2 * width))
    block = triton.next_power_of_2(width)
    _join_norms[(num_rows, 2)](
        token_ids, embedding, hidden, weights[0], weights[1], joined, eps, width, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return joined


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """As ``fused.silu_and_multiply``."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, inner))
    _silu_and_multiply[(num_rows, triton.cdiv(inner, _BLOCK))](
        gate_up, out, inner, BLOCK=_BLOCK, num_warps=4
    )
    return out


def rotate_and_store(
    qkv: Tensor,
    table: tuple[Tensor, Tensor],
    positions: Tensor,
    write_offsets: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """As ``fused.rotate_and_store``."""
    kv_heads, reach, head_dim = keys.shape[1:]
    num_rows, all_heads = qkv.shape[0], qkv.shape[1] // head_dim
    num_heads = all_heads - 2 * kv_heads
    queries = qkv.new_empty((num_rows, num_heads, head_dim))
    _rotate_and_store[(num_rows,)](
        qkv,
        table[0],
        table[1],
        positions,
        write_offsets,
        keys,
        values,
        queries,
        reach,
        NUM_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(all_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return queries


@jit
def _add_rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + row + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + row + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + columns, (wide * scale * gain).to(value.dtype), mask=inside)


@jit
def _join_norms(
    token_ids: tl.tensor,
    embedding: tl.tensor,
    hidden: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    joined: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    is_second = tl.program_id(1) == 1
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if is_second:
        value = tl.load(hidden + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(second_weight + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        token = tl.load(token_ids + row)
        value = tl.load(embedding + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(first_weight + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    out = joined + row * 2 * width + tl.program_id(1) * width + columns
    tl.store(out, (value * scale * gain).to(joined.dtype.element_ty), mask=inside)


@jit
def _silu_and_multiply(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * inner + columns, product.to(gate.dtype), mask=inside)


@jit
def _rotate_and_store(
    qkv: tl.tensor,
    cos: tl.tensor,
    signed_sin: tl.tensor,
    positions: tl.tensor,
    write_offsets: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    queries: tl.tensor,
    reach: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    is_real = (head < NUM_HEADS + 2 * KV_HEADS) & (column < HEAD_DIM)
    base = qkv + token * (NUM_HEADS + 2 * KV_HEADS) * HEAD_DIM + head * HEAD_DIM
    own = tl.load(base + column, mask=is_real, other=0.0)
    # Pair i of a head is (i, i + D / 2).
    other = tl.load(base + (column + HEAD_DIM // 2) % HEAD_DIM, mask=is_real, other=0.0)
    position = tl.load(positions + token)
    is_column = column < HEAD_DIM
    c = tl.load(cos + position * HEAD_DIM + column, mask=is_column, other=0.0).to(tl.float32)
    s = tl.load(signed_sin + position * HEAD_DIM + column, mask=is_column, other=0.0)
    product = (own.to(tl.float32) * c).to(own.dtype).to(tl.float32)
    rotated = (product + other.to(tl.float32) * s.to(tl.float32)).to(own.dtype)
    result = tl.where(head < NUM_HEADS + KV_HEADS, rotated, own)

    is_query = is_real & (head < NUM_HEADS)
    tl.store(
        queries + token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + column, result, mask=is_query
    )
    offset = tl.load(write_offsets + token)
    slot, place = offset // reach, offset % reach
    key_head = head - NUM_HEADS
    is_key = is_real & (key_head >= 0) & (key_head < KV_HEADS)
    tl.store(
        keys + ((slot * KV_HEADS + key_head) * reach + place) * HEAD_DIM + column,
        result,
        mask=is_key,
    )
    value_head = key_head - KV_HEADS
    tl.store(
        values + ((slot * KV_HEADS + value_head) * reach + place) * HEAD_DIM + column,
        result,
        mask=is_real & (value_head >= 0),
    )
