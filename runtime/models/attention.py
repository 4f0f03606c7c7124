"""Attention of a packed, ragged batch over the slot-based cache.

Objective: dense layers run on T packed tokens; only here rows are padded, to the longest row M,
right-aligned. Invariants: a query at position p sees exactly positions 0 … p of its own slot; padded
queries repeat their row's first token, so that no softmax row is empty, and their results are dropped.
All that depends on lengths only is computed once per pass and shared by the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.kv_cache import KVCache, contiguous_rows


@dataclass(slots=True)
class AttentionPlan:
    """How the T tokens of one pass look at the cache.

    ``token_slots`` [T] int64; ``rows`` the slots to read, as a slice where they are consecutive;
    ``reach`` the longest cache length after the pass; ``pad_index`` [R·M] packed token of each padded
    query and ``unpad_index`` [T] its inverse, both None if all rows have length M; ``mask``
    [R, 1, G·M, reach] additive (G query heads per KV head, folded into the queries; [R, 1, 1, reach] for
    M = 1), None if every query sees everything.
    """

    num_rows: int
    max_length: int
    reach: int
    rows: slice | Tensor
    token_slots: Tensor
    pad_index: Tensor | None
    unpad_index: Tensor | None
    mask: Tensor | None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [T, H, D], keys and values [R, Hk, reach, D] → [T, H·D]."""
        num_heads, head_dim = queries.shape[1:]
        num_kv_heads = keys.shape[1]
        rows, length = self.num_rows, self.max_length
        if self.pad_index is not None:
            queries = queries.index_select(0, self.pad_index)
        padded = queries.view(rows, length, num_heads, head_dim).transpose(1, 2)
        if length == 1:
            mixed = F.scaled_dot_product_attention(
                padded, keys, values, attn_mask=self.mask, enable_gqa=num_heads != num_kv_heads
            )
        else:
            # Query heads that share a KV head become further queries of it: one pass over the keys.
            folded = padded.reshape(rows, num_kv_heads, -1, head_dim)
            mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask)
        grouped = mixed.view(rows, num_kv_heads, -1, length, head_dim)
        packed = grouped.permute(0, 3, 1, 2, 4).reshape(rows * length, num_heads * head_dim)
        return packed if self.unpad_index is None else packed.index_select(0, self.unpad_index)


def plan_attention(batch: PackedBatch, config: LlamaConfig, cache: KVCache) -> AttentionPlan:
    """Plan one pass of ``batch``; T ≥ 1.

    Raises ValueError if a row leaves the cache or two rows share a slot: either would silently write
    into another request's context.
    """
    slots: list[int] = batch.slots.tolist()
    kv_lens: list[int] = batch.kv_lens.tolist()
    bounds: list[int] = batch.cu_seqlens.tolist()
    lengths = [end - begin for begin, end in pairwise(bounds)]
    max_length = max(lengths)
    reach = max(kv_len + length for kv_len, length in zip(kv_lens, lengths, strict=True))
    if reach > cache.max_len:
        raise ValueError(f"a row reaches {reach} tokens, but the KV cache holds {cache.max_len}")
    if min(slots) < 0 or max(slots) >= cache.num_slots or len(set(slots)) != len(slots):
        raise ValueError(f"slots {slots} must be distinct and below num_slots={cache.num_slots}")

    row_lengths = batch.lengths
    is_uniform = min(lengths) == max_length
    pad_index = unpad_index = None
    offsets = torch.arange(max_length)
    if not is_uniform:
        # Right-aligned: the last token of each row sits in column M − 1.
        padding = max_length - row_lengths
        offsets = (offsets - padding[:, None]).clamp_min_(0)
        num_tokens = batch.token_ids.numel()
        pad_index = (batch.cu_seqlens[:-1, None] + offsets).clamp_max_(num_tokens - 1).view(-1)
        row_of_token = torch.repeat_interleave(torch.arange(len(slots)), row_lengths)
        first_column = torch.arange(len(slots)) * max_length + padding - batch.cu_seqlens[:-1]
        unpad_index = torch.arange(num_tokens) + first_column[row_of_token]
        token_slots = batch.slots[row_of_token]
    elif max_length == 1:
        token_slots = batch.slots
    else:
        token_slots = batch.slots.repeat_interleave(max_length)

    rows = contiguous_rows(slots)
    mask = None
    if max_length > 1 or min(kv_lens) != max(kv_lens):
        last_visible = batch.kv_lens[:, None] + offsets
        hidden = torch.arange(reach) > last_visible[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, float("-inf"))
        if max_length > 1:
            mask = mask.repeat(1, config.num_heads // config.num_kv_heads, 1)
        mask = mask[:, None]
    return AttentionPlan(
        num_rows=len(slots),
        max_length=max_length,
        reach=reach,
        rows=batch.slots if rows is None else rows,
        token_slots=token_slots,
        pad_index=pad_index,
        unpad_index=unpad_index,
        mask=mask,
    )
