"""The target's final hidden states of every committed token, kept per slot for drafters that read them.

Invariants: a slot's states are valid for the positions that were stored since another request took it
over, and garbage behind them; they are kept for every position, so that a drafter may stay behind for
any time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """[T] int64: ``lengths[r]`` positions from ``starts[r]`` on, row after row."""
    ends = lengths.cumsum(0)
    offsets = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + offsets


class HiddenStates:
    """[num_slots, max_len, H] states, written as ``Drafter.observe`` receives them."""

    def __init__(self, num_slots: int, max_len: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._states = torch.zeros(num_slots, max_len, hidden_size, dtype=dtype)

    def store(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        """Take packed states [T, H]: row r has ``cu_seqlens[r + 1] − cu_seqlens[r]`` from ``starts[r]`` on."""
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        self._states[slots.repeat_interleave(lengths), packed_positions(starts, lengths)] = hidden

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        """States [T, H] at (slots[t], positions[t])."""
        return self._states[slots, positions]
