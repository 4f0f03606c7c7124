"""The block drafters of ``runtime.models.drafters``, run by an engine's plans.

Invariants: those of ``dflash`` and ``dspark``; the runtime draws, so a block's plan hands out the logits of all
its positions, and a sequential head is a plan that runs once a position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.engines.plan import Plan
from trtllm_av.runtime.engines.plan_pass import PlanPass
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead
from trtllm_av.runtime.models.drafters.catch_up import catch_up_passes
from trtllm_av.runtime.models.drafters.eagle_head import EagleHeadConfig
from trtllm_av.runtime.models.drafters.hidden_states import packed_positions
from trtllm_av.runtime.models.drafters.state_drafter import StateDrafter


class PlanBlockDrafter(StateDrafter):
    """What both share; ``layer`` is the shape of the block's layer."""

    is_block = True

    def __init__(
        self,
        plan: Plan,
        layer: EagleHeadConfig,
        draft_to_target: Tensor,
        dtype: torch.dtype,
        *,
        max_draft_len: int,
    ) -> None:
        super().__init__(
            layer,
            draft_to_target,
            dtype,
            num_slots=plan.num_slots,
            max_len=plan.max_len,
            max_draft_len=max_draft_len,
        )
        self._pass = PlanPass(plan, state_name="state")

    def _hold(self, context: DraftContext) -> None:
        self._write(context, context.lens - 1)

    def _write(self, context: DraftContext, ends: Tensor) -> None:
        """Keys and values of the committed entries up to ``ends`` [R] that the cache does not hold."""
        starts = self._held[0, context.slots].minimum(ends)
        for rows, first, last in catch_up_passes(starts, ends, self.max_draft_len + 1):
            is_behind = last > first
            if not bool(is_behind.any()):
                continue
            slots, first = context.slots[rows][is_behind], first[is_behind]
            lengths = last[is_behind] - first
            token_slots = slots.repeat_interleave(lengths)
            positions = packed_positions(first, lengths)
            batch = PackedBatch.pack(
                context.history[token_slots, positions + 1], slots, first, lengths
            )
            hidden = self._hidden.read(token_slots, positions)
            masks = torch.zeros_like(positions)
            self._pass(batch, positions[:0], {"hidden": hidden, "mask_idx": masks})
        self._held[0, context.slots] = ends

    def _block(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Logits [R, K, V_d] and states [R, K, H] of a block; catches up first."""
        self._write(context, context.lens - 2)
        width, slots = self.max_draft_len, context.slots
        anchor = context.history[slots, context.lens - 1]
        batch = PackedBatch.pack(
            anchor.repeat_interleave(width),
            slots,
            context.lens - 2,
            torch.full_like(slots, width),
        )
        hidden = self._hidden.read(slots, context.lens - 2).repeat_interleave(width, 0)
        masks = torch.arange(width).repeat(slots.numel())
        logits, states = self._pass(batch, None, {"hidden": hidden, "mask_idx": masks})
        self._held[0, slots] = context.lens - 1  # the first entry of a block is a committed one
        shape = (slots.numel(), width)
        return logits.unflatten(0, shape), states.unflatten(0, shape)


class PlanDFlashDrafter(NoConfidenceHead, PlanBlockDrafter):
    """All positions from one pass."""

    name = "dflash"

    _logits = torch.empty(0)

    def start(self, context: DraftContext) -> Tensor:
        self._logits, _ = self._block(context)
        return self._logits[:, 0]

    def step(self, position: int, tokens: Tensor) -> Tensor:
        return self._logits[:, position]


class PlanDSparkDrafter(PlanBlockDrafter):
    """A pass over the block, then the sequential head of ``chain``, whose carried state has ``state_size``."""

    name = "dspark"
    has_confidence_head = True

    _block_logits = _states = _carried = _confidence = torch.empty(0)

    def __init__(
        self,
        plan: Plan,
        chain: Plan,
        layer: EagleHeadConfig,
        draft_to_target: Tensor,
        dtype: torch.dtype,
        *,
        state_size: int,
        sequential_size: int,
        max_draft_len: int,
    ) -> None:
        super().__init__(plan, layer, draft_to_target, dtype, max_draft_len=max_draft_len)
        self.cost_key += f",{state_size},{sequential_size}"
        self._chain = chain
        self._start_state = torch.zeros(1, state_size, dtype=dtype)

    def start(self, context: DraftContext) -> Tensor:
        self._block_logits, self._states = self._block(context)
        self._carried = self._start_state.expand(context.slots.numel(), -1)
        return self.step(0, context.history[context.slots, context.lens - 1])

    def step(self, position: int, tokens: Tensor) -> Tensor:
        feed = {
            "block_state": self._states[:, position],
            "block_logits": self._block_logits[:, position],
            "input_ids": tokens,
            "carried": self._carried,
        }
        names = ["logits", "next_carried", "confidence_logit"]
        logits, self._carried, self._confidence = self._chain.run(feed, names)
        return logits

    def confidence_logit(self) -> Tensor:
        return self._confidence
