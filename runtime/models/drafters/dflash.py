"""Drafting all positions of a block in one pass, with the weights that are in ``block_head``.

Source: DFlash (Chen et al., 2026); ``block_head`` says what is taken over and what is not.

Invariants: entries of committed tokens are computed from the target's hidden states; the entries of a
block overwrite those of the last one and are never read by the next; position i of ``dflash`` does not
depend on any draft of its block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead
from trtllm_av.runtime.models.drafters.block_head import BlockHead, load_block_head
from trtllm_av.runtime.models.drafters.head_file import open_head
from trtllm_av.runtime.models.drafters.head_pass import head_pass
from trtllm_av.runtime.models.drafters.hidden_states import packed_positions
from trtllm_av.runtime.models.drafters.reduced_vocabulary import output_rows
from trtllm_av.runtime.models.drafters.state_drafter import StateDrafter
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.params import SpeculativeConfig

#: Longest stretch of one pass that catches up: bounds its temporaries.
CHUNK = 2048


class BlockDrafter(StateDrafter):
    """What block drafters share: the cache of committed entries and the pass over a block.

    ``num_slots`` and ``max_len`` are those of the target's cache; ``max_draft_len`` ≤ the head's block.
    """

    is_block = True

    def __init__(
        self,
        head: BlockHead,
        draft_to_target: Tensor,
        target: LoadedModel,
        *,
        num_slots: int,
        max_len: int,
        max_draft_len: int,
    ) -> None:
        """``draft_to_target`` [V_d] int64 names the target token of each row of the output layer."""
        layer = head.config.layer
        super().__init__(
            layer,
            draft_to_target,
            target.dtype,
            num_slots=num_slots,
            max_len=max_len,
            max_draft_len=max_draft_len,
        )
        self._head, self._layer, self._model = head.layer, layer.as_layer(), target.model
        no_mask = torch.zeros_like(head.masks[:1])
        self._masks = torch.cat([no_mask, head.masks[: max_draft_len - 1]])
        self._output = Linear(output_rows(target, draft_to_target))
        self._cache = KVCache(self._layer, num_slots, max_len, target.dtype)

    def _hold(self, context: DraftContext) -> None:
        self._write(context, context.lens - 1)

    @torch.inference_mode()
    def _write(self, context: DraftContext, ends: Tensor) -> None:
        """Keys and values of the committed entries up to ``ends`` [R] that the cache does not hold."""
        starts = self._held[0, context.slots].minimum(ends)
        lengths = ends - starts
        token_slots = context.slots.repeat_interleave(lengths)
        positions = packed_positions(starts, lengths)
        for slots, at in zip(token_slots.split(CHUNK), positions.split(CHUNK), strict=True):
            if not slots.numel():
                continue
            embedding = self._model.embed(context.history[slots, at + 1])
            _, _, k, v = self._head.before_attention(embedding, self._hidden.read(slots, at), at)
            self._cache.write(0, slots, at, k, v)
        self._held[0, context.slots] = ends

    @torch.inference_mode()
    def _block(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """States [R, K, H] of a block's positions, and the anchor's embedding [R, H]; catches up first."""
        self._write(context, context.lens - 2)
        width, slots = self.max_draft_len, context.slots
        anchor = context.history[slots, context.lens - 1]
        embedding = self._model.embed(anchor)
        hidden = self._hidden.read(slots, context.lens - 2)
        batch = PackedBatch.pack(
            anchor.repeat_interleave(width),
            slots,
            context.lens - 2,
            torch.full_like(slots, width),
        )
        states = head_pass(
            self._head,
            self._layer,
            self._cache,
            batch,
            (embedding[:, None] + self._masks).flatten(0, 1),
            hidden.repeat_interleave(width, 0),
        )
        self._held[0, slots] = context.lens - 1  # the first entry of a block is a committed one
        return states.unflatten(0, (-1, width)), embedding


class DFlashDrafter(NoConfidenceHead, BlockDrafter):
    """See the module docstring."""

    name = "dflash"

    _logits = torch.empty(0)

    def start(self, context: DraftContext) -> Tensor:
        states, _ = self._block(context)
        self._logits = self._output(states.flatten(0, 1)).view(*states.shape[:2], -1)
        return self._logits[:, 0]

    def step(self, position: int, tokens: Tensor) -> Tensor:
        return self._logits[:, position]


def check_block_size(config: SpeculativeConfig, head: BlockHead) -> None:
    """Raise UsageError for drafts that are longer than the block a head was trained for."""
    if config.num_speculative_tokens > head.config.block_size:
        raise UsageError(
            f"num_speculative_tokens={config.num_speculative_tokens}: this head drafts blocks of at most "
            f"{head.config.block_size}; lower it"
        )


def create_dflash(config: SpeculativeConfig, target: LoadedModel, cache: KVCache) -> DFlashDrafter:
    """Factory for method ``dflash``; ``model`` is a file of weights, none are packaged.

    Raises UsageError for a setting that it cannot honour, CheckpointError for weights that cannot be
    read or were trained for another target.
    """
    head, draft_to_target = open_head(config, target, DFlashDrafter.name, {}, load_block_head)
    check_block_size(config, head)
    head.prepack()
    return DFlashDrafter(
        head,
        draft_to_target,
        target,
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        max_draft_len=config.num_speculative_tokens,
    )
