"""Keys and values of every live request, one linear row ("slot") each.

Objective: requests come and go without copying anyone else's state. Invariants: a slot's row is valid up
to the length that its owner tracks and garbage behind it; nothing is ever cleared, because attention
never looks behind a row's length; entries start at zero so that garbage is finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_av.runtime.models.config import LlamaConfig


class KVCache:
    """Per layer two tensors [num_slots, num_kv_heads, max_len, head_dim]."""

    def __init__(
        self,
        config: LlamaConfig,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (num_slots, config.num_kv_heads, max_len, config.head_dim)
        self.num_slots = num_slots
        self.max_len = max_len
        self.dtype = dtype
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]

    @staticmethod
    def num_bytes(config: LlamaConfig, num_slots: int, max_len: int, dtype: torch.dtype) -> int:
        """Memory that a cache of this size takes."""
        per_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return num_slots * max_len * per_position * dtype.itemsize

    def write(
        self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [T, num_kv_heads, head_dim] at (slots[t], positions[t])."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, num_kv_heads, length, head_dim] of the slots ``rows``.

        A slice gives views; an index tensor [R] int64 copies.
        """
        keys = self.keys[layer][:, :, :length]
        values = self.values[layer][:, :, :length]
        if isinstance(rows, slice):
            return keys[rows], values[rows]
        return keys.index_select(0, rows), values.index_select(0, rows)


def contiguous_rows(slots: Sequence[int]) -> slice | None:
    """``slots`` as a slice if they are consecutive and ascending, so that reading needs no copy."""
    first = slots[0]
    if all(slot == first + row for row, slot in enumerate(slots)):
        return slice(first, first + len(slots))
    return None
