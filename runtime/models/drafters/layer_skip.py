"""Drafting with the target itself, some of its layers left out.

Source: Zhang et al. 2023, "Draft & Verify". Needs no second model: weights and the KV cache of the kept
layers are the target's. Invariants: drafting writes only at positions that the target has not verified
yet (from ``lens − 1`` on), and the verification of the same round rewrites those of them that later
passes read; so the drafter never lags and has nothing to reset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig


def default_skip_layers(num_layers: int) -> list[int]:
    """The middle ``max(1, num_layers // 15)`` layers: 14 and 15 of 30, so 14 stay on either side."""
    count = max(1, num_layers // 15)
    first = (num_layers - count) // 2
    return list(range(first, first + count))


def kept_layers(num_layers: int, skip_layers: Sequence[int] | None) -> list[int]:
    """Indices of the layers that draft; ``skip_layers`` None takes the default.

    Raises UsageError for an index out of range, one named twice, or if no layer would be left.
    """
    skipped = default_skip_layers(num_layers) if skip_layers is None else list(skip_layers)
    for layer in skipped:
        if not 0 <= layer < num_layers:
            raise UsageError(
                f"skip_layers names layer {layer}; the target has 0 … {num_layers - 1}"
            )
    if len(set(skipped)) != len(skipped):
        raise UsageError(f"skip_layers={skipped} names a layer twice")
    kept = [layer for layer in range(num_layers) if layer not in set(skipped)]
    if not kept:
        raise UsageError(f"skip_layers={skipped} leaves none of the target's {num_layers} layers")
    return kept


class LayerSkip(NoConfidenceHead, ABC):
    """See the module docstring; subclasses run the kept ``layers``."""

    name = "layer_skip"
    is_block = False
    reads_hidden = False
    draft_to_target: Tensor | None = None

    def __init__(self, layers: Sequence[int], max_draft_len: int) -> None:
        self.max_draft_len = max_draft_len
        self.layers = list(layers)
        self.cost_key = f"{self.name} {','.join(map(str, self.layers))}"
        self._slots = torch.empty(0, dtype=torch.int64)
        self._first_position = torch.empty(0, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        """Nothing is kept per slot."""

    def observe(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        """Hidden states are not read."""

    def lag(self, context: DraftContext) -> Tensor:
        return torch.zeros_like(context.lens)

    def refresh(self, context: DraftContext) -> None:
        """The target's cache is always up to date."""

    def start(self, context: DraftContext) -> Tensor:
        self._slots = context.slots
        self._first_position = context.lens - 1
        return self._logits(context.history[context.slots, self._first_position], 0)

    def step(self, position: int, tokens: Tensor) -> Tensor:
        return self._logits(tokens, position)

    def _logits(self, tokens: Tensor, position: int) -> Tensor:
        batch = PackedBatch.pack(
            tokens, self._slots, self._first_position + position, torch.ones_like(self._slots)
        )
        return self._forward(batch)

    @abstractmethod
    def _forward(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V] of the kept layers, which write into the target's cache."""


class LayerSkipDrafter(LayerSkip):
    """The family on a torch module; ``cache`` is the target's own."""

    def __init__(
        self, target: LoadedModel, cache: KVCache, layers: Sequence[int], max_draft_len: int
    ) -> None:
        super().__init__(layers, max_draft_len)
        self._model = target.model
        self._cache = cache

    def _forward(self, batch: PackedBatch) -> Tensor:
        return self._model.forward(batch, self._cache, layers=self.layers).logits


def create_layer_skip(
    config: SpeculativeConfig, target: LoadedModel, cache: KVCache
) -> LayerSkipDrafter:
    """Factory for method ``layer_skip``; raises UsageError for a setting that it cannot honour."""
    if config.model is not None:
        raise UsageError(
            f"model={config.model!r}: method 'layer_skip' drafts with the target; remove it"
        )
    layers = kept_layers(target.config.num_layers, config.skip_layers)
    return LayerSkipDrafter(target, cache, layers, config.num_speculative_tokens)
