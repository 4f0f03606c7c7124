"""Triton kernels behind ``round_ops``: a program per row, or per row and block of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins.sampling_laws import Laws, Verdict
from trtllm_av.plugins.triton_language import jit, tl, triton
from trtllm_av.runtime.engines.cuda.round_ops import DraftRecord, RoundEnd, Rows
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.step import NO_TOKEN

_ROWS = 128  # of one program that reads rows
_COLUMNS = 4096  # of one program that copies logits
_KV_LEN = tl.constexpr(int(Field.KV_LEN))
_LAST_TOKEN = tl.constexpr(int(Field.LAST_TOKEN))
_REMAINING = tl.constexpr(int(Field.REMAINING))
_ROUNDS = tl.constexpr(int(Field.ROUNDS))
_NUM_FIELDS = tl.constexpr(len(Field))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def read_rows(
    integers: Tensor, floats: Tensor, slots: Tensor, planned_lens: Tensor, rows: Rows
) -> None:
    """As ``round_ops.read_rows``."""
    count = slots.numel()
    _read_rows[(triton.cdiv(count, _ROWS),)](
        integers, floats, slots, planned_lens, rows.integers, rows.floats, rows.kv_lens,
        rows.base_lens, rows.draft_lens, integers.shape[1], count, BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def record_draft(
    record: DraftRecord,
    position: Tensor,
    laws: Laws,
    tokens: Tensor,
    draft_to_target: Tensor,
    state: Tensor,
    *,
    keeps_law: bool,
) -> None:
    """As ``round_ops.record_draft``."""
    count, width = record.draft_tokens.shape
    columns = laws.logits.shape[1]
    blocks = triton.cdiv(columns, _COLUMNS) if keeps_law else 1
    _record_draft[(count, blocks)](
        position, laws.logits, laws.point, laws.maximum, laws.scale, laws.cut, laws.total, tokens,
        draft_to_target, state, record.draft_tokens, record.points, record.laws, record.logits,
        record.token, record.state, count, width, columns, laws.logits.stride(0), state.shape[1],
        KEEPS_LAW=keeps_law, BLOCK=_COLUMNS,
        BLOCK_STATE=triton.next_power_of_2(state.shape[1]), num_warps=4,
    )  # fmt: skip


def finish_round(
    integers: Tensor,
    slots: Tensor,
    rows: Rows,
    cu_seqlens: Tensor,
    verify_lens: Tensor,
    draft_tokens: Tensor,
    laws: Laws,
    verdict: Verdict,
    tokens: Tensor,
    overlap: Tensor,
    score: tuple[Tensor, Tensor] | None,
    results: dict[str, Tensor],
) -> RoundEnd:
    """As ``round_ops.finish_round``."""
    count, width = draft_tokens.shape
    next_ids = torch.zeros_like(laws.point)
    last_positions = torch.empty_like(rows.kv_lens)
    features, confidence = (overlap, overlap) if score is None else score
    _finish_round[(count,)](
        integers, slots, rows.kv_lens, rows.base_lens, rows.draft_lens, cu_seqlens, verify_lens,
        draft_tokens, laws.maximum, verdict.rows, verdict.accepted_lens, tokens, overlap, features,
        confidence, results["overlap"], results["features"], results["confidence"],
        results["lens"], results["tokens"], next_ids, last_positions, integers.shape[1], count,
        width, HAS_SCORE=score is not None, BLOCK=triton.next_power_of_2(width + 1), num_warps=1,
    )  # fmt: skip
    return RoundEnd(next_ids, last_positions)


@jit
def _read_rows(
    integers: tl.tensor,
    floats: tl.tensor,
    slots: tl.tensor,
    planned_lens: tl.tensor,
    row_integers: tl.tensor,
    row_floats: tl.tensor,
    kv_lens: tl.tensor,
    base_lens: tl.tensor,
    draft_lens: tl.tensor,
    num_slots: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=0)
    for field in tl.static_range(_NUM_FIELDS):
        value = tl.load(integers + field * num_slots + slot, mask=inside, other=0)
        tl.store(row_integers + field * count + row, value, mask=inside)
    for field in tl.static_range(2):
        share = tl.load(floats + field * num_slots + slot, mask=inside, other=0.0)
        tl.store(row_floats + field * count + row, share, mask=inside)
    kv_len = tl.load(integers + _KV_LEN * num_slots + slot, mask=inside, other=0)
    remaining = tl.load(integers + _REMAINING * num_slots + slot, mask=inside, other=0)
    planned = tl.load(planned_lens + row, mask=inside, other=0)
    room = tl.maximum(remaining - 1, 0)
    tl.store(kv_lens + row, kv_len.to(tl.int32), mask=inside)
    tl.store(base_lens + row, (remaining > 0).to(tl.int32), mask=inside)
    tl.store(draft_lens + row, tl.minimum(planned.to(tl.int64), room).to(tl.int32), mask=inside)


@jit
def _record_draft(
    position: tl.tensor,
    logits: tl.tensor,
    point: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    total: tl.tensor,
    tokens: tl.tensor,
    draft_to_target: tl.tensor,
    state: tl.tensor,
    draft_tokens: tl.tensor,
    points: tl.tensor,
    kept_laws: tl.tensor,
    kept_logits: tl.tensor,
    kept_token: tl.tensor,
    kept_state: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    logit_stride: tl.tensor,
    hidden: tl.tensor,
    KEEPS_LAW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = tl.load(position).to(tl.int64)
    place = row * width + at
    if KEEPS_LAW:
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        copied = tl.load(logits + row * logit_stride + column, mask=inside)
        tl.store(kept_logits + place * columns + column, copied, mask=inside)
    if block == 0:
        token = tl.load(draft_to_target + tl.load(tokens + row))
        tl.store(draft_tokens + place, token)
        tl.store(kept_token + row, token)
        tl.store(points + place, tl.load(point + row))
        if KEEPS_LAW:
            size = count * width
            tl.store(kept_laws + place, tl.load(maximum + row))
            tl.store(kept_laws + size + place, tl.load(scale + row))
            tl.store(kept_laws + 2 * size + place, tl.load(cut + row))
            tl.store(kept_laws + 3 * size + place, tl.load(total + row))
        lane = tl.arange(0, BLOCK_STATE)
        is_state = lane < hidden
        part = tl.load(state + row * hidden + lane, mask=is_state)
        tl.store(kept_state + row * hidden + lane, part, mask=is_state)


@jit
def _finish_round(
    integers: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    base_lens: tl.tensor,
    draft_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    verify_lens: tl.tensor,
    draft_tokens: tl.tensor,
    maximum: tl.tensor,
    judges: tl.tensor,
    accepted_lens: tl.tensor,
    tokens: tl.tensor,
    overlap: tl.tensor,
    features: tl.tensor,
    confidence: tl.tensor,
    out_overlap: tl.tensor,
    out_features: tl.tensor,
    out_confidence: tl.tensor,
    out_lens: tl.tensor,
    out_tokens: tl.tensor,
    next_ids: tl.tensor,
    last_positions: tl.tensor,
    num_slots: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    HAS_SCORE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    base = tl.load(base_lens + row)
    accepted = tl.load(accepted_lens + row)
    emitted = (accepted + 1) * base
    token = tl.load(tokens + row)
    is_empty = tl.load(maximum + tl.load(judges + row)) == float("-inf")
    token = tl.where(is_empty, _NO_TOKEN, token)
    valid = tl.maximum(token, 0)

    table = integers + slot
    kv_len = tl.load(table + _KV_LEN * num_slots)
    remaining = tl.load(table + _REMAINING * num_slots)
    rounds = tl.load(table + _ROUNDS * num_slots)
    if base > 0:
        tl.store(table + _KV_LEN * num_slots, kv_len + emitted)
        tl.store(table + _LAST_TOKEN * num_slots, valid)
        tl.store(table + _REMAINING * num_slots, remaining - emitted)
        tl.store(table + _ROUNDS * num_slots, rounds + 1)

    tl.store(out_overlap + row, tl.load(overlap + row))
    tl.store(out_lens + row, tl.load(draft_lens + row))
    tl.store(out_lens + count + row, tl.load(verify_lens + row))
    tl.store(out_lens + 2 * count + row, accepted)
    tl.store(out_lens + 3 * count + row, emitted)
    offset = tl.arange(0, BLOCK)
    is_draft = offset < width
    drafted = tl.load(draft_tokens + row * width + offset, mask=is_draft, other=0)
    if HAS_SCORE:
        place = row * width + offset
        tl.store(out_features + place, tl.load(features + place, mask=is_draft), mask=is_draft)
        tl.store(out_confidence + place, tl.load(confidence + place, mask=is_draft), mask=is_draft)
    tl.store(out_tokens + row * (width + 1) + offset, drafted, mask=is_draft)
    tl.store(out_tokens + row * (width + 1) + width, token)
    behind = tl.where(offset < accepted, drafted, valid)
    first = tl.load(cu_seqlens + row)
    tl.store(next_ids + first + offset, behind, mask=offset < emitted)
    tl.store(last_positions + row, tl.load(kv_lens + row) + accepted)
