"""Triton kernels of generation and training; each has a plain PyTorch equal beside its caller.

Nothing here is used at run time of the product: the kernels make 50 million tokens of text and the
distillation fit into minutes. Each is one program per row, float32 inside, bfloat16 or float32 outside.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_store(
    qkv_ptr, table_ptr, position_ptr, q_ptr, k_ptr, v_ptr, capacity,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: rotate q and k, write q [B, heads, D] and the caches at ``position``.

    qkv [B, (heads + 2·kv)·D]; table [S, 2, HALF] f32; caches [B, kv, S, D].
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr)
    head = tl.arange(0, BLOCK)
    column = tl.arange(0, HALF)
    total: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    is_head = (head < total)[:, None]
    source = qkv_ptr + (row * total + head[:, None]) * (2 * HALF) + column[None, :]
    first = tl.load(source, mask=is_head, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_head, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + position * (2 * HALF) + column)[None, :]
    sin = tl.load(table_ptr + position * (2 * HALF) + HALF + column)[None, :]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    kind = q_ptr.dtype.element_ty

    is_q = (head < NUM_HEADS)[:, None]
    q = q_ptr + (row * NUM_HEADS + head[:, None]) * (2 * HALF) + column[None, :]
    tl.store(q, turned_first.to(kind), mask=is_q)
    tl.store(q + HALF, turned_second.to(kind), mask=is_q)

    k_head = head - NUM_HEADS
    is_k = ((k_head >= 0) & (k_head < NUM_KV_HEADS))[:, None]
    k_row = (row * NUM_KV_HEADS + k_head[:, None]) * capacity + position
    k = k_ptr + k_row * (2 * HALF) + column[None, :]
    tl.store(k, turned_first.to(kind), mask=is_k)
    tl.store(k + HALF, turned_second.to(kind), mask=is_k)

    v_head = k_head - NUM_KV_HEADS
    is_v = ((v_head >= 0) & (v_head < NUM_KV_HEADS))[:, None]
    v_row = (row * NUM_KV_HEADS + v_head[:, None]) * capacity + position
    v = v_ptr + v_row * (2 * HALF) + column[None, :]
    tl.store(v, first.to(kind), mask=is_v)
    tl.store(v + HALF, second.to(kind), mask=is_v)


@triton.jit
def decode_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, capacity, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (row, key head): GROUP queries over the ``position + 1`` live keys.

    The loop ends at the live length read on the device, so one captured graph serves every length.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(position_ptr) + 1
    member = tl.arange(0, 16)
    column = tl.arange(0, D)
    is_member = (member < GROUP)[:, None]
    at = (row * GROUP + member[:, None]) * D + column[None, :]
    q = tl.load(q_ptr + at, mask=is_member, other=0.0)
    maximum = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    result = tl.zeros([16, D], tl.float32)
    for start in range(0, length, BLOCK):
        key = start + tl.arange(0, BLOCK)
        is_live = key < length
        cell = (row * capacity + key[:, None]) * D + column[None, :]
        k = tl.load(k_ptr + cell, mask=is_live[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(is_live[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        shrink = tl.exp(maximum - new_maximum)
        weight = tl.exp(score - new_maximum[:, None])
        v = tl.load(v_ptr + cell, mask=is_live[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        result = result * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        maximum = new_maximum
    tl.store(out_ptr + at, (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_member)


@triton.jit
def gumbel_argmax(
    logits_ptr, inverse_temperature_ptr, seed_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr
):
    """One program per row: a draw from softmax(logits · inverse temperature) by the Gumbel maximum."""
    row = tl.program_id(0)
    scale = tl.load(inverse_temperature_ptr + row)
    seed = tl.load(seed_ptr)
    source = logits_ptr + row.to(tl.int64) * vocab_size
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, 4 * BLOCK):
        # One Philox call yields four numbers, one for each quarter of this stretch.
        u0, u1, u2, u3 = tl.rand4x(seed, (row * vocab_size + start) // 4 + lane)
        for quarter in tl.static_range(4):
            if quarter == 0:
                u = u0
            elif quarter == 1:
                u = u1
            elif quarter == 2:
                u = u2
            else:
                u = u3
            token = start + quarter * BLOCK + lane
            logit = tl.load(source + token, mask=token < vocab_size, other=float("-inf"))
            noise = -tl.log(tl.maximum(-tl.log(tl.maximum(u, 1e-10)), 1e-10))
            score = logit.to(tl.float32) * scale + noise
            is_better = score > best
            best = tl.where(is_better, score, best)
            best_id = tl.where(is_better, token, best_id)
    top = tl.max(best, 0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, best_id, vocab_size), 0).to(tl.int64))


@triton.jit
def distil_rows(
    draft_ptr, target_ptr, log_total_ptr, next_ptr, weight_ptr,
    entropy_ptr, overlap_ptr, ratio_ptr, log_top_ptr, spread_ptr,
    rows_per_sequence, target_rows, shift, vocab_size, entropy_share, overlap_share,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: losses of a draft row against its target row, and the gradient in place.

    See ``loss.distil_rows_plain`` for the definition. draft [M, V_d] is overwritten by its gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    target_row = (row // rows_per_sequence) * target_rows + row % rows_per_sequence + shift
    column = tl.arange(0, BLOCK)
    is_real = column < vocab_size
    z = tl.load(draft_ptr + row * vocab_size + column, mask=is_real, other=float("-inf"))
    z = z.to(tl.float32)
    log_p = tl.load(
        target_ptr + target_row * vocab_size + column, mask=is_real, other=float("-inf")
    )
    log_p = log_p.to(tl.float32) - tl.load(log_total_ptr + target_row)
    top = tl.max(z, 0)
    log_total = top + tl.log(tl.sum(tl.exp(z - top), 0))
    q = tl.exp(z - log_total)
    p = tl.exp(log_p)
    inside = tl.sum(p, 0)
    entropy = inside * log_total - tl.sum(tl.where(is_real, p * z, 0.0), 0)
    is_under = q < p
    under = tl.sum(tl.where(is_under, q, 0.0), 0)
    overlap = tl.sum(tl.minimum(p, q), 0)
    next_column = tl.load(next_ptr + row)
    at_next = column == next_column
    ratio = tl.sum(tl.where(at_next, tl.minimum(1.0, q / tl.maximum(p, 1e-30)), 0.0), 0)
    tl.store(entropy_ptr + row, entropy)
    tl.store(overlap_ptr + row, overlap)
    tl.store(ratio_ptr + row, ratio)
    tl.store(log_top_ptr + row, top - log_total)
    tl.store(spread_ptr + row, log_total - tl.sum(tl.where(is_real, q * z, 0.0), 0))
    gradient = entropy_share * (inside * q - p)
    gradient += overlap_share * q * (under - tl.where(is_under, 1.0, 0.0))
    gradient *= tl.load(weight_ptr + row)
    kind = draft_ptr.dtype.element_ty
    tl.store(draft_ptr + row * vocab_size + column, gradient.to(kind), mask=is_real)
