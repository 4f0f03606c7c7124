"""The default executor: the packed torch module on the CPU, runs everywhere.

Invariants: all passes run under ``inference_mode``; the KV cache is allocated once, at start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.kv_cache import KVCache


class TorchExecutor:
    """A loaded model with ``num_slots`` cache slots of ``max_len`` positions each."""

    def __init__(self, loaded: LoadedModel, *, num_slots: int, max_len: int) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.num_slots = num_slots
        self.max_len = max_len
        self.cache = KVCache(loaded.config, num_slots, max_len, loaded.dtype)

    @property
    def identity(self) -> ExecutorIdentity:
        return ExecutorIdentity(
            "torch", "cpu", str(self.loaded.dtype).removeprefix("torch."), torch.get_num_threads()
        )

    @property
    def vocab_size(self) -> int:
        return self.loaded.config.vocab_size

    @torch.inference_mode()
    def verify(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        output = self.model(batch, self.cache)
        return output.logits, output.hidden

    @torch.inference_mode()
    def prefill(self, batch: PackedBatch, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(batch, self.cache, logit_rows=logit_rows)
        return output.logits, output.hidden
