"""The kernels of ``triton_attention``; what each computes is said in ``attention``.

Invariants: float32 softmax and sums; nothing behind the positions that a query may see reaches a result,
be it NaN.
"""

from __future__ import annotations

from trtllm_av.plugins.triton_language import jit, tl


@jit
def attend_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_top: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    key_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Program (tile of queries and split of keys, KV head, row); rows that fit take a tile of ``SHORT_M``."""
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(cu_seqlens + row).to(tl.int64)
    length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
    if tile * BLOCK_M // GROUP >= length:
        return
    kv_len = tl.load(kv_lens + row).to(tl.int32)
    slot = tl.load(slots + row).to(tl.int64)
    # Offsets within one KV head of one slot fit 32 bits.
    keys += slot * slot_stride + kv_head * head_stride
    values += slot * slot_stride + kv_head * head_stride
    if SHORT_M == BLOCK_M:
        attend_tile(
            queries, keys, values, kv_len, start, length, tile, split, kv_head, scale, out, partial,
            partial_top, query_stride, query_head_stride, key_stride, out_stride, out_head_stride,
            splits, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, IS_SPLIT,
        )  # fmt: skip
    else:
        if length * GROUP <= SHORT_M:
            attend_tile(
                queries, keys, values, kv_len, start, length, tile, split, kv_head, scale, out,
                partial, partial_top, query_stride, query_head_stride, key_stride, out_stride,
                out_head_stride, splits, GROUP, HEAD_DIM, BLOCK_D, SHORT_M, BLOCK_N, IS_SPLIT,
            )  # fmt: skip
        else:
            attend_tile(
                queries, keys, values, kv_len, start, length, tile, split, kv_head, scale, out,
                partial, partial_top, query_stride, query_head_stride, key_stride, out_stride,
                out_head_stride, splits, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, IS_SPLIT,
            )  # fmt: skip


@jit
def attend_tile(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    kv_len: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    tile: tl.tensor,
    split: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_top: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One tile of a row of ``length`` queries; ``keys`` and ``values`` point at its slot and KV head."""
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    column = tl.arange(0, BLOCK_D)
    is_live = (query < length)[:, None] & (column < HEAD_DIM)[None, :]
    token = start + query
    q = tl.load(
        queries
        + token[:, None] * query_stride
        + (head * query_head_stride)[:, None]
        + column[None, :],
        mask=is_live,
        other=0.0,
    )
    # The keys that some query of the tile sees; this program's part of them.
    seen = kv_len + tl.minimum(length, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    blocks = tl.cdiv(tl.cdiv(seen, BLOCK_N), splits)
    begin = split * blocks * BLOCK_N
    end = tl.minimum(begin + blocks * BLOCK_N, seen)
    last_visible = kv_len + query
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # One loop, masked throughout: a second one for the keys at the end would wait for its first loads.
    for first in tl.range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        place = position[:, None] * key_stride + column[None, :]
        exists = (position < end)[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(keys + place, mask=exists, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        is_visible = position[None, :] <= last_visible[:, None]
        score = tl.where(is_visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shift = new_top
        if IS_SPLIT:  # a query that sees no key of this split has no maximum to subtract
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weight, 1)
        value = tl.load(values + place, mask=exists, other=0.0)
        mixed = tl.dot(
            weight.to(value.dtype), value, mixed * rescale[:, None], input_precision="ieee"
        )
        top = new_top
    is_empty = total == 0.0
    result = mixed / tl.where(is_empty, 1.0, total)[:, None]
    if not IS_SPLIT:
        place = token[:, None] * out_stride + (head * out_head_stride)[:, None] + column[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=is_live)
    else:
        num_heads = tl.num_programs(1) * GROUP
        place = (token * num_heads + head) * splits + split
        tl.store(
            partial_top + place,
            tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total))),
            mask=query < length,
        )
        tl.store(partial + place[:, None] * HEAD_DIM + column[None, :], result, mask=is_live)


@jit
def merge_kernel(
    partial: tl.tensor,
    partial_top: tl.tensor,
    cu_seqlens: tl.tensor,
    num_rows: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Program (token, block of heads): the splits' results, weighted by the mass that each has seen."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(cu_seqlens + num_rows):
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_D)
    place = (token * num_heads + head)[:, None] * SPLITS + split[None, :]
    is_head = head < num_heads
    mass = tl.load(partial_top + place, mask=is_head[:, None], other=0.0)
    weight = tl.exp2(mass - tl.max(mass, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    exists = (
        (weight > 0.0)[:, :, None] & is_head[:, None, None] & (column < HEAD_DIM)[None, None, :]
    )
    values = tl.load(
        partial + place[:, :, None] * HEAD_DIM + column[None, None, :], mask=exists, other=0.0
    )
    merged = tl.sum(values * weight[:, :, None], 1)
    where = token * out_stride + (head * out_head_stride)[:, None] + column[None, :]
    tl.store(
        out + where,
        merged.to(out.dtype.element_ty),
        mask=is_head[:, None] & (column < HEAD_DIM)[None, :],
    )


@jit
def write_kv_kernel(
    new_keys: tl.tensor,
    new_values: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    write_offsets: tl.tensor,
    reach: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    position_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (token): all its KV heads."""
    token = tl.program_id(0).to(tl.int64)
    offset = tl.load(write_offsets + token)
    slot = offset // reach
    element = tl.arange(0, BLOCK)
    head = element // HEAD_DIM
    column = element % HEAD_DIM
    exists = head < NUM_HEADS
    place = slot * slot_stride + (offset - slot * reach) * position_stride
    place = place + head * head_stride + column
    key = token * key_token_stride + head * key_head_stride + column
    value = token * value_token_stride + head * value_head_stride + column
    tl.store(keys + place, tl.load(new_keys + key, mask=exists), mask=exists)
    tl.store(values + place, tl.load(new_values + value, mask=exists), mask=exists)
