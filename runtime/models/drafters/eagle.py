"""Drafting with a one-layer head on the target's hidden state, whose weights are in ``eagle_head``.

Sources: EAGLE (Li et al., 2024) and, for chained training and the reduced draft vocabulary, EAGLE-3
(Li et al., 2025); ``eagle_head`` says what is not taken over.

Entry t of a slot stands for the committed tokens t and t + 1: it takes the target's final hidden state of
token t and the embedding of token t + 1, and its output predicts token t + 2. Invariants: entries of
committed tokens are computed from the target's hidden states, also where a draft of the same token was
computed from the head's own before; entries written while drafting are overwritten by the next round.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead
from trtllm_av.runtime.models.drafters.catch_up import catch_up_passes
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, load_head
from trtllm_av.runtime.models.drafters.head_file import open_head, packaged_file
from trtllm_av.runtime.models.drafters.head_pass import head_pass
from trtllm_av.runtime.models.drafters.hidden_states import packed_positions
from trtllm_av.runtime.models.drafters.reduced_vocabulary import output_rows
from trtllm_av.runtime.models.drafters.state_drafter import StateDrafter
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.params import SpeculativeConfig

#: Heads that come with this package, by the fingerprint of their target.
PACKAGED_HEADS = {"9645f96f8a509d86": "smollm2-135m-instruct-eagle.safetensors"}


class HeadDrafter(NoConfidenceHead, StateDrafter):
    """See the module docstring; ``num_slots`` and ``max_len`` are those of the target's cache, ``dtype``
    is that of its hidden states. Subclasses run the head."""

    name = "eagle"
    is_block = False

    _slots = _first_position = torch.empty(0, dtype=torch.int64)
    _state = torch.empty(0)

    def _hold(self, context: DraftContext) -> None:
        self._catch_up(context, wants_logits=False)

    def start(self, context: DraftContext) -> Tensor:
        self._slots, self._first_position = context.slots, context.lens - 1
        logits, self._state = self._catch_up(context)
        return logits

    def step(self, position: int, tokens: Tensor) -> Tensor:
        batch = PackedBatch.pack(
            tokens,
            self._slots,
            self._first_position + (position - 1),
            torch.ones_like(self._slots),
        )
        logits, self._state = self._feed(batch, self._state, torch.arange(tokens.numel()))
        return logits

    def _catch_up(
        self, context: DraftContext, *, wants_logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compute the entries that are missing; draft logits [R, V_d] (none if they are not wanted) and
        states [R, H] of each row's last one.

        The last entry is computed in any case, because drafting starts from its state.
        """
        ends = context.lens - 1
        starts = self._held[0, context.slots].minimum(ends - 1)
        passes = list(catch_up_passes(starts, ends, self.max_draft_len + 1))
        logits = state = last_rows = self._state
        for number, (rows, first, last) in enumerate(passes, 1):
            slots, lengths = context.slots[rows], last - first
            token_slots, positions = (
                slots.repeat_interleave(lengths),
                packed_positions(first, lengths),
            )
            batch = PackedBatch.pack(
                context.history[token_slots, positions + 1], slots, first, lengths
            )
            last_rows = batch.cu_seqlens[1:] - 1
            has_logits = wants_logits and number == len(passes)
            logits, state = self._feed(
                batch,
                self._hidden.read(token_slots, positions),
                last_rows if has_logits else last_rows[:0],
            )
        self._held[0, context.slots] = ends
        return logits, state[last_rows]

    @abstractmethod
    def _feed(
        self, batch: PackedBatch, hidden: Tensor, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft logits [N, V_d] of the packed rows ``logit_rows`` and head states [T, H] of the entries of
        ``batch``, whose token ids are those one position on; ``hidden`` [T, H] belongs to the entries."""


class EagleDrafter(HeadDrafter):
    """The family on a torch module."""

    def __init__(
        self,
        head: EagleHead,
        draft_to_target: Tensor,
        target: LoadedModel,
        *,
        num_slots: int,
        max_len: int,
        max_draft_len: int,
    ) -> None:
        super().__init__(
            head.config,
            draft_to_target,
            target.dtype,
            num_slots=num_slots,
            max_len=max_len,
            max_draft_len=max_draft_len,
        )
        self._head, self._layer, self._model = head, head.config.as_layer(), target.model
        self._output = Linear(output_rows(target, draft_to_target))
        self._cache = KVCache(self._layer, num_slots, max_len, target.dtype)

    @torch.inference_mode()
    def _feed(
        self, batch: PackedBatch, hidden: Tensor, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedding = self._model.embed(batch.token_ids)
        state = head_pass(self._head, self._layer, self._cache, batch, embedding, hidden)
        return self._output(state[logit_rows]), state


def has_packaged_head(target: LoadedModel) -> bool:
    """True if this package ships weights that were trained for ``target``."""
    return packaged_file(target, PACKAGED_HEADS) is not None


def create_eagle(config: SpeculativeConfig, target: LoadedModel, cache: KVCache) -> EagleDrafter:
    """Factory for method ``eagle``; ``model`` is a file of weights, None the packaged ones.

    Raises UsageError for a setting that it cannot honour or if no packaged head fits the target,
    CheckpointError for weights that cannot be read or were trained for another target.
    """
    head, draft_to_target = open_head(config, target, EagleDrafter.name, PACKAGED_HEADS, load_head)
    head.prepack()
    return EagleDrafter(
        head,
        draft_to_target,
        target,
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        max_draft_len=config.num_speculative_tokens,
    )
