"""The drafter families of ``runtime.models.drafters``, run by an engine's draft step.

Invariants: what is drafted when, and what is kept, is the family's own code; only the forward pass is the
plan's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_av.runtime.engines.plan import Plan
from trtllm_av.runtime.engines.plan_pass import PlanPass
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.draft_model import DraftModel
from trtllm_av.runtime.models.drafters.eagle import HeadDrafter
from trtllm_av.runtime.models.drafters.eagle_head import EagleHeadConfig
from trtllm_av.runtime.models.drafters.layer_skip import LayerSkip


class PlanHeadDrafter(HeadDrafter):
    """A head on the target's hidden state, whose plan has the outputs ``logits`` and ``state``."""

    def __init__(
        self,
        plan: Plan,
        config: EagleHeadConfig,
        draft_to_target: Tensor,
        dtype: torch.dtype,
        *,
        max_draft_len: int,
    ) -> None:
        super().__init__(
            config,
            draft_to_target,
            dtype,
            num_slots=plan.num_slots,
            max_len=plan.max_len,
            max_draft_len=max_draft_len,
        )
        self._pass = PlanPass(plan, state_name="state")

    def _feed(
        self, batch: PackedBatch, hidden: Tensor, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._pass(batch, logit_rows, {"hidden": hidden})


class PlanLayerSkipDrafter(LayerSkip):
    """``layers`` of the target, whose plan writes into the caches of the verify plan."""

    def __init__(self, plan: Plan, layers: Sequence[int], *, max_draft_len: int) -> None:
        super().__init__(layers, max_draft_len)
        self._pass = PlanPass(plan)

    def _forward(self, batch: PackedBatch) -> Tensor:
        return self._pass(batch)[0]


class PlanDraftModelDrafter(DraftModel):
    """A second checkpoint, named by ``digest``, whose plan has caches of its own."""

    def __init__(self, plan: Plan, digest: str, *, max_draft_len: int) -> None:
        super().__init__(
            digest, num_slots=plan.num_slots, max_len=plan.max_len, max_draft_len=max_draft_len
        )
        self._pass = PlanPass(plan)

    def _forward(self, batch: PackedBatch, logit_rows: Tensor | None) -> Tensor:
        return self._pass(batch, logit_rows)[0]
