"""The input of the next verify pass, and the overlap of two distributions, on the CPU.

Invariants: drawn tokens are only copied to their packed rows, never looked at, so that verify lengths are
those of ``trim_drafts`` whatever was drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins import cpu_trim


def trim_and_pack(
    confidence: Tensor,
    draft_lens: Tensor,
    base_lens: Tensor,
    min_verify_lens: Tensor,
    draft_budget: Tensor,
    last_tokens: Tensor,
    draft_tokens: Tensor,
    kv_lens: Tensor,
    slots: Tensor,
    *,
    stride: int,
    capacity: int,
    slot_stride: int,
    pad_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Trim, and the rows of the next verify pass.

    Row t of the pass is offset ``pack_index[t] % stride`` of request r = ``pack_index[t] // stride``: its
    last token at the offsets below base_lens (1 for a request that decodes; the ids of prefill chunks
    are the caller's), then its drafts.

    Args:
        confidence … draft_budget: as in ``reference.trim_drafts``.
        last_tokens, kv_lens, slots: [R], one integer type: what follows the cache, the tokens in it, and
            its row in the cache.
        draft_tokens: [R, K] of that type.
        stride, capacity: as in ``reference.pack_drafts``.
        slot_stride: tokens of one cache row.
        pad_offset: where rows behind the batch's end are written, a place that nobody reads.

    Returns:
        survival, verify_lens and cu_seqlens of ``reference.trim_drafts``, pack_index of
        ``reference.pack_drafts``, and [capacity] int64 each: token_ids and positions (0 in the tail)
        and write_offsets = slot · slot_stride + position (pad_offset in the tail).
    """
    survival, verify_lens, cu_seqlens = cpu_trim.trim_drafts(
        confidence, draft_lens, base_lens, min_verify_lens, draft_budget
    )
    pack_index = cpu_trim.pack_drafts(base_lens, verify_lens, stride=stride, capacity=capacity)
    packed = pack_index[: int(cu_seqlens[-1])].long()
    row = packed // stride
    offset = packed - row * stride
    from_draft = offset - base_lens[row]
    drafted = draft_tokens[row, from_draft.clamp(min=0)] if draft_tokens.numel() else 0
    token_ids = torch.zeros(capacity, dtype=torch.int64)
    positions = torch.zeros(capacity, dtype=torch.int64)
    write_offsets = torch.full((capacity,), pad_offset, dtype=torch.int64)
    token_ids[: packed.numel()] = torch.where(from_draft < 0, last_tokens[row], drafted).long()
    positions[: packed.numel()] = kv_lens[row] + offset
    write_offsets[: packed.numel()] = slots[row] * slot_stride + kv_lens[row] + offset
    return survival, verify_lens, cu_seqlens, pack_index, token_ids, positions, write_offsets


def overlap_mass(target: Tensor, draft: Tensor, target_rows: Tensor, draft_rows: Tensor) -> Tensor:
    """Σ min(p, q) of row ``target_rows[r]`` of target [N, V] and ``draft_rows[r]`` of draft [M, V].

    Both hold probabilities; rows are [R] int32, negative where no overlap is wanted: NaN there. Returns
    [R] in their float type, in a fixed order of summation.
    """
    is_wanted = (target_rows >= 0) & (draft_rows >= 0)
    overlap = torch.full(target_rows.shape, torch.nan, dtype=target.dtype)
    p = target[target_rows[is_wanted].long()]
    q = draft[draft_rows[is_wanted].long()]
    overlap[is_wanted] = torch.minimum(p, q).sum(-1)
    return overlap
