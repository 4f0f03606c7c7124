"""Forward passes over static caches: the same number of tokens for every row, wherever the row stands.

Invariant: a query at position t reads the keys of positions ≤ t of its own row, so entries behind a
row's length may hold anything; the pass that reaches a position writes it first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.drafter_training.target import FrozenTarget, after_attention, before_attention
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.rope import rotate, rotation


class LayerCache:
    """Keys and values [rows, capacity, kv_heads, D] of one layer."""

    def __init__(
        self,
        config: LlamaConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_rows, capacity, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        """Write k, v [N, C, kv_heads, D]; attention output [N, C, heads·D] of q [N, C, heads, D]."""
        num_rows, length, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        self.keys[place.rows[:, None], place.positions] = k
        self.values[place.rows[:, None], place.positions] = v
        keys, values = (
            (part if place.is_all else part[place.rows])[:, : place.reach].transpose(1, 2)
            for part in (self.keys, self.values)
        )
        grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=place.mask)
        out = out.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4)
        joined: Tensor = out.reshape(num_rows, length, heads * head_dim)
        return joined


class Place:
    """Where N rows stand: C tokens each, from ``starts`` [N] on; ``rows`` None means all of the cache."""

    def __init__(
        self, starts: Tensor, length: int, reach: int, group: int, rows: Tensor | None = None
    ) -> None:
        """``reach``: keys to read, at least the last position + 1; ``group``: queries per key head."""
        device = starts.device
        self.is_all = rows is None
        self.rows = torch.arange(starts.numel(), device=device) if rows is None else rows
        self.positions = starts[:, None] + torch.arange(length, device=device)
        self.reach = reach
        visible = torch.arange(reach, device=device) <= self.positions[..., None]
        self.mask = visible.repeat(1, group, 1)[:, None]


class CachedTarget:
    """The frozen target over a cache of ``num_rows`` × ``capacity`` positions."""

    def __init__(self, target: FrozenTarget, num_rows: int, capacity: int) -> None:
        self.target = target
        self.group = target.config.num_heads // target.config.num_kv_heads
        self._caches = [
            LayerCache(target.config, num_rows, capacity, target.dtype, target.device)
            for _ in target.layers
        ]

    def forward(self, tokens: Tensor, place: Place) -> Tensor:
        """Final hidden states [N, C, H] of ``tokens`` [N, C]."""
        target, config = self.target, self.target.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        cos, signed_sin = (
            part.unflatten(0, tokens.shape)
            for part in rotation(place.positions.flatten(), target.frequencies, target.dtype)
        )
        x = target.embedding[tokens]
        for layer, cache in zip(target.layers, self._caches, strict=True):
            qkv = before_attention(x, layer, config.rms_norm_eps).unflatten(
                -1, (-1, config.head_dim)
            )
            both = rotate(qkv[..., : heads + kv_heads, :], cos, signed_sin)
            q, k = both.split((heads, kv_heads), -2)
            attention = cache.attend(q, k, qkv[..., heads + kv_heads :, :], place)
            x = after_attention(x, attention, layer, config.rms_norm_eps)
        return F.rms_norm(x, x.shape[-1:], target.final_norm, config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] f32 of ``hidden`` [..., H]."""
        logits: Tensor = hidden @ self.target.output_rows.T
        return logits.float()
