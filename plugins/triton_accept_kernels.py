"""Kernels of ``sampling_ops.accept`` and ``keyed_uniforms``."""

from __future__ import annotations

from trtllm_av.plugins.triton_language import jit, tl
from trtllm_av.plugins.triton_statistics_kernels import probability_of


@jit
def accept_kernel(
    target: tl.tensor,
    target_stride: tl.tensor,
    p_point: tl.tensor,
    p_maximum: tl.tensor,
    p_scale: tl.tensor,
    p_cut: tl.tensor,
    p_total: tl.tensor,
    num_target_rows: tl.tensor,
    first_rows: tl.tensor,
    drafts: tl.tensor,
    draft_stride: tl.tensor,
    q_point: tl.tensor,
    q_maximum: tl.tensor,
    q_scale: tl.tensor,
    q_cut: tl.tensor,
    q_total: tl.tensor,
    draft_tokens: tl.tensor,
    token_stride: tl.tensor,
    draft_lens: tl.tensor,
    verify_lens: tl.tensor,
    uniforms: tl.tensor,
    target_to_draft: tl.tensor,
    accepted_lens: tl.tensor,
    rows: tl.tensor,
    draft_rows: tl.tensor,
    is_rejected: tl.tensor,
    num_positions: tl.tensor,
    HAS_MAP: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """Program (row): a lane a draft."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, POSITIONS)
    first = tl.load(first_rows + row).to(tl.int64)
    verified = tl.load(verify_lens + row).to(tl.int32)
    drafted = tl.load(draft_lens + row).to(tl.int32)
    is_judged = (position < verified) & (position < num_positions)
    token = tl.load(draft_tokens + row * token_stride + position, mask=is_judged, other=0).to(
        tl.int64
    )
    last_row = num_target_rows - 1
    t = tl.minimum(tl.maximum(first + position, 0), last_row)
    value = tl.load(target + t * target_stride + token, mask=is_judged, other=float("-inf"))
    p = probability_of(
        value.to(tl.float32), token, tl.load(p_point + t), tl.load(p_maximum + t),
        tl.load(p_scale + t), tl.load(p_cut + t), tl.load(p_total + t),
    )  # fmt: skip
    d = row * num_positions + tl.minimum(position, num_positions - 1)
    own = token
    if HAS_MAP:
        own = tl.load(target_to_draft + token, mask=is_judged, other=-1).to(tl.int64)
    is_known = is_judged & (own >= 0)
    value = tl.load(drafts + d * draft_stride + own, mask=is_known, other=float("-inf"))
    q = probability_of(
        value.to(tl.float32), own, tl.load(q_point + d), tl.load(q_maximum + d),
        tl.load(q_scale + d), tl.load(q_cut + d), tl.load(q_total + d),
    )  # fmt: skip
    q = tl.where(is_known, q, 0.0)
    u = tl.load(uniforms + row * num_positions + position, mask=is_judged, other=0.0)
    is_accepted = is_judged & (u * q.to(tl.float64) < p.to(tl.float64))
    accepted = tl.min(tl.where(is_accepted, POSITIONS, position), 0)
    accepted = tl.minimum(accepted, num_positions)
    tl.store(accepted_lens + row, accepted)
    tl.store(rows + row, tl.minimum(tl.maximum(first + accepted, 0), last_row))
    at = row * num_positions + tl.minimum(accepted, num_positions - 1)
    tl.store(draft_rows + row, tl.where(accepted < drafted, at, -1))
    tl.store(is_rejected + row, accepted < verified)


@jit
def uniforms_kernel(
    seeds: tl.tensor,
    requests: tl.tensor,
    rounds: tl.tensor,
    positions: tl.tensor,
    purposes: tl.tensor,
    result: tl.tensor,
    seed_row: tl.tensor,
    seed_column: tl.tensor,
    request_row: tl.tensor,
    request_column: tl.tensor,
    round_row: tl.tensor,
    round_column: tl.tensor,
    position_row: tl.tensor,
    position_column: tl.tensor,
    purpose_row: tl.tensor,
    purpose_column: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    purpose: tl.tensor,
    HAS_PURPOSES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Philox-4x32-10 of [rows, columns] keys, each array with its own strides."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < count
    i, j = index // columns, index % columns
    seed = tl.load(seeds + i * seed_row + j * seed_column, mask=exists, other=0).to(tl.int64)
    request = tl.load(requests + i * request_row + j * request_column, mask=exists, other=0).to(
        tl.int64
    )
    turn = tl.load(rounds + i * round_row + j * round_column, mask=exists, other=0).to(tl.int64)
    position = tl.load(positions + i * position_row + j * position_column, mask=exists, other=0)
    place = (position.to(tl.int64) << 2) | purpose
    if HAS_PURPOSES:
        place = place | tl.load(
            purposes + i * purpose_row + j * purpose_column, mask=exists, other=0
        ).to(tl.int64)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b = (turn & 0xFFFFFFFF).to(tl.uint32), (place & 0xFFFFFFFF).to(tl.uint32)
    c, d = (request & 0xFFFFFFFF).to(tl.uint32), ((request >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = tl.full([BLOCK], 0xD2511F53, tl.uint32)
    second = tl.full([BLOCK], 0xCD9E8D57, tl.uint32)
    first_step = tl.full([BLOCK], 0x9E3779B9, tl.uint32)
    second_step = tl.full([BLOCK], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high_left, high_right = tl.umulhi(first, a), tl.umulhi(second, c)
        low_left, low_right = first * a, second * c
        a, b, c, d = high_right ^ b ^ k0, low_right, high_left ^ d ^ k1, low_left
        k0, k1 = k0 + first_step, k1 + second_step
    bits = ((a.to(tl.uint64) << 32) | b.to(tl.uint64)) >> 11
    tl.store(result + index, bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=exists)
