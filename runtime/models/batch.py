"""The packed, ragged batch that every forward pass of a target or an autoregressive drafter takes.

Invariants: rows lie one after another without padding; row r owns the packed tokens
``cu_seqlens[r] … cu_seqlens[r+1]−1``; its first token stands at position ``kv_lens[r]`` of slot
``slots[r]``; everything the slot's cache holds at or behind that position is garbage that the pass
overwrites. Positions beyond ``kv_lens + length`` are never read, so trimmed drafts need no clean-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class PackedBatch:
    """T tokens of R rows, each row continuing one slot of the KV cache.

    Shapes: ``token_ids`` [T] int64, ``positions`` [T] int64, ``slots`` [R] int64,
    ``kv_lens`` [R] int64 (tokens already in the cache), ``cu_seqlens`` [R+1] int64.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor

    @property
    def num_rows(self) -> int:
        return self.slots.numel()

    @property
    def lengths(self) -> Tensor:
        """[R] int64, tokens of each row in this pass."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @classmethod
    def pack(
        cls, token_ids: Tensor, slots: Tensor, kv_lens: Tensor, lengths: Tensor
    ) -> PackedBatch:
        """Build a batch from packed ``token_ids`` [T] and row ``lengths`` [R]."""
        cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=token_ids.device)
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        row = torch.repeat_interleave(
            torch.arange(lengths.numel(), device=token_ids.device), lengths
        )
        offset = torch.arange(token_ids.numel(), device=token_ids.device) - cu_seqlens[row]
        return cls(token_ids, kv_lens[row] + offset, slots, kv_lens, cu_seqlens)

    @classmethod
    def from_lists(
        cls, rows: Sequence[Sequence[int]], slots: Sequence[int], kv_lens: Sequence[int]
    ) -> PackedBatch:
        """Build a batch from one token list per row (all on the CPU)."""
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls.pack(
            tokens,
            torch.tensor(list(slots), dtype=torch.int64),
            torch.tensor(list(kv_lens), dtype=torch.int64),
            lengths,
        )
