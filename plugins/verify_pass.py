"""Two operators of an executor's round, composed of what ``reference`` defines.

``trtllm_av::trim_and_pack`` trims drafts and gathers the whole input of the next verify pass;
``trtllm_av::overlap_mass`` is Σ min(p, q), the soft label of a draft's first trimmed position. What they
mean, argument by argument, is said in ``cpu_verify_pass``. Invariants: as in ``torch_ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins import cpu_verify_pass, torch_ops


def trim_and_pack_shapes(
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
    """Check the arguments of ``trim_and_pack``; empty results of its shapes."""
    trimmed = torch_ops._trim_drafts_shapes(
        confidence, draft_lens, base_lens, min_verify_lens, draft_budget
    )
    gathered = {
        "last_tokens": last_tokens,
        "draft_tokens": draft_tokens,
        "kv_lens": kv_lens,
        "slots": slots,
    }
    for name, value in gathered.items():
        shape = tuple(confidence.shape if name == "draft_tokens" else draft_lens.shape)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; pass {shape}")
        if value.dtype != slots.dtype or slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} is {value.dtype} and slots {slots.dtype}; pass last_tokens, draft_tokens, "
                "kv_lens and slots all as torch.int32 or all as torch.int64"
            )
    packed = draft_lens.new_empty((capacity,))
    rows = [draft_lens.new_empty((capacity,), dtype=torch.int64) for _ in range(3)]
    return *trimmed, packed, rows[0], rows[1], rows[2]


def overlap_mass_shapes(
    target: Tensor, draft: Tensor, target_rows: Tensor, draft_rows: Tensor
) -> Tensor:
    """Check the arguments of ``overlap_mass``; an empty result of its shape."""
    if target.shape[1] != draft.shape[1] or target.dtype != draft.dtype:
        raise ValueError(
            f"target is {tuple(target.shape)} {target.dtype} and draft {tuple(draft.shape)} "
            f"{draft.dtype}; pass [N, V] and [M, V] of one type"
        )
    rows = tuple(target_rows.shape[:1])
    torch_ops._require("target_rows", target_rows, rows, is_int=True)
    torch_ops._require("draft_rows", draft_rows, rows, is_int=True)
    return target.new_empty(rows)


trim_and_pack = torch_ops._register(cpu_verify_pass.trim_and_pack, trim_and_pack_shapes)
overlap_mass = torch_ops._register(cpu_verify_pass.overlap_mass, overlap_mass_shapes)
