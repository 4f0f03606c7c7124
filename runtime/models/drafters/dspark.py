"""Drafting a block in one pass, corrected position by position by a small sequential head.

Source: DSpark (Cheng et al., 2026); ``dspark_head`` and ``block_head`` say what is taken over and what is
not.

Invariants: those of ``dflash`` for the block; the logits and the confidence of position i are made of the
block's state there and of the state that the sequential head carries behind x_{i−1}, before x_i is drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext
from trtllm_av.runtime.models.drafters.dflash import BlockDrafter, check_block_size
from trtllm_av.runtime.models.drafters.dspark_head import (
    DSparkHead,
    figures_of_logits,
    load_dspark_head,
)
from trtllm_av.runtime.models.drafters.head_file import open_head
from trtllm_av.runtime.models.drafters.reduced_vocabulary import output_rows
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.params import SpeculativeConfig

#: Heads that come with this package, by the fingerprint of their target.
PACKAGED_HEADS = {"9645f96f8a509d86": "smollm2-135m-instruct-dspark.safetensors"}


class DSparkDrafter(BlockDrafter):
    """See the module docstring."""

    name = "dspark"
    has_confidence_head = True

    _states = _read = _block_logits = _carried = _logits = torch.empty(0)
    _position = 0

    def __init__(
        self,
        head: DSparkHead,
        draft_to_target: Tensor,
        target: LoadedModel,
        *,
        num_slots: int,
        max_len: int,
        max_draft_len: int,
    ) -> None:
        super().__init__(
            head,
            draft_to_target,
            target,
            num_slots=num_slots,
            max_len=max_len,
            max_draft_len=max_draft_len,
        )
        self.cost_key += f",{head.config.state_size},{head.config.sequential_size}"
        self._sequential, self._confidence = head.sequential, head.confidence
        # The correction of a state through the output layer, as one matrix of the correction's rank.
        self._bias = Linear(output_rows(target, draft_to_target) @ head.sequential.lift)

    @torch.inference_mode()
    def start(self, context: DraftContext) -> Tensor:
        states, anchor = self._block(context)
        self._states, self._position = states, 0
        self._read = self._sequential.read_block(states.flatten(0, 1)).unflatten(
            0, states.shape[:2]
        )
        self._carried = self._sequential.advance(self._read[:, 0], anchor, None)
        corrected = states.clone()
        corrected[:, 0] += self._sequential.lifted(self._carried)
        logits = self._output(corrected.flatten(0, 1))
        self._block_logits = logits.view(*states.shape[:2], -1)
        self._logits = self._block_logits[:, 0]
        return self._logits

    @torch.inference_mode()
    def step(self, position: int, tokens: Tensor) -> Tensor:
        self._position = position
        embedding = self._model.embed(tokens)
        self._carried = self._sequential.advance(self._read[:, position], embedding, self._carried)
        self._logits = self._block_logits[:, position] + self._bias(self._carried)
        return self._logits

    @torch.inference_mode()
    def confidence_logit(self) -> Tensor:
        logit: Tensor = self._confidence(
            self._states[:, self._position], self._carried, figures_of_logits(self._logits)
        )
        return logit


def create_dspark(config: SpeculativeConfig, target: LoadedModel, cache: KVCache) -> DSparkDrafter:
    """Factory for method ``dspark``; ``model`` is a file of weights, None the packaged ones.

    Raises UsageError for a setting that it cannot honour or if no packaged head fits the target,
    CheckpointError for weights that cannot be read or were trained for another target.
    """
    head, draft_to_target = open_head(
        config, target, DSparkDrafter.name, PACKAGED_HEADS, load_dspark_head
    )
    check_block_size(config, head)
    head.prepack()
    return DSparkDrafter(
        head,
        draft_to_target,
        target,
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        max_draft_len=config.num_speculative_tokens,
    )
