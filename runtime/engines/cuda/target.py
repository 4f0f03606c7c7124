"""The target as a static-shape forward pass over a token bucket, with lengths that only the device knows.

Invariants: a row's result depends on its own slot; packed rows behind the batch's end read and write the
scratch slot, which no request owns; nothing synchronises and no shape depends on data, so that a graph
can capture the pass; the same code runs on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.plugins import attention
from trtllm_av.runtime.engines.cuda.fused import (
    add_rms_norm,
    rotate_and_store,
    rotation_table,
    silu_and_multiply,
)
from trtllm_av.runtime.engines.cuda.weights import DecoderWeights
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """T packed tokens of R rows on the device, as ``trim_and_pack`` gives them.

    ``token_ids``, ``positions``, ``write_offsets`` (slot · L + position) [T] int64; ``slots`` [R] int64;
    ``kv_lens`` [R] int32, tokens cached before; ``cu_seqlens`` [R+1] int32; ``max_length`` bounds a row.
    """

    token_ids: Tensor
    positions: Tensor
    write_offsets: Tensor
    slots: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor
    max_length: int


class SlotCache:
    """Keys and values [S+1, Hk, L, D] of each layer; slot S is scratch."""

    def __init__(
        self,
        config: LlamaConfig,
        num_slots: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_slots + 1, config.num_kv_heads, max_len, config.head_dim)
        self.num_slots = num_slots
        self.max_len = max_len
        # Zeros: what lies behind a row's length is read under a mask and must be finite.
        self.keys, self.values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
            for _ in range(2)
        )

    @staticmethod
    def num_bytes(config: LlamaConfig, num_slots: int, max_len: int, dtype: torch.dtype) -> int:
        """Memory that such a cache takes."""
        return KVCache.num_bytes(config, num_slots + 1, max_len, dtype)


class DeviceTarget:
    """A Llama-family decoder with its cache of ``num_slots`` + 1 slots."""

    def __init__(
        self, config: LlamaConfig, weights: DecoderWeights, *, num_slots: int, max_len: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.cache = SlotCache(config, num_slots, max_len, self.device, self.dtype)
        frequencies = inverse_frequencies(config).to(self.device)
        self._table = rotation_table(max_len, frequencies, self.dtype)

    def forward(self, batch: PackedTokens) -> Tensor:
        """Final hidden states [T, H]; writes keys and values of the packed tokens."""
        config = self.config
        eps = config.rms_norm_eps
        x = self.embed(batch.token_ids)
        delta: Tensor | None = None
        # Rows behind the batch's end stay as the memory was: no other row ever sees them.
        mixed = x.new_empty((x.shape[0], config.num_heads, config.head_dim))
        for index, layer in enumerate(self.weights.layers):
            x, normed = add_rms_norm(x, delta, layer.attention_norm, eps)
            keys, values = self.cache.keys[index], self.cache.values[index]
            queries = rotate_and_store(
                layer.qkv(normed), self._table, batch.positions, batch.write_offsets, keys, values
            )
            attention.attend(
                queries,
                keys,
                values,
                batch.slots,
                batch.kv_lens,
                batch.cu_seqlens,
                batch.max_length,
                mixed,
            )
            x, normed = add_rms_norm(x, layer.output(mixed.flatten(1)), layer.mlp_norm, eps)
            delta = layer.down(silu_and_multiply(layer.gate_up(normed)))
        return add_rms_norm(x, delta, self.weights.final_norm, eps)[1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 → [T, H]."""
        return F.embedding(token_ids, self.weights.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, V] in the weights' type."""
        return self.weights.head(hidden)
