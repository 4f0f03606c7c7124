"""The target of an engine behind the face that the scheduler drives, whatever runs its verify plan."""

from __future__ import annotations

from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.engines.plan import Plan
from trtllm_av.runtime.engines.plan_pass import PlanPass
from trtllm_av.runtime.models.batch import PackedBatch


class PlanExecutor:
    """``plan`` has the outputs ``logits`` and ``hidden``; ``vocab_size`` is the real one."""

    def __init__(self, plan: Plan, *, vocab_size: int) -> None:
        self.plan = plan
        self.vocab_size = vocab_size
        self._pass = PlanPass(plan)

    @property
    def num_slots(self) -> int:
        return self.plan.num_slots

    @property
    def max_len(self) -> int:
        return self.plan.max_len

    @property
    def identity(self) -> ExecutorIdentity:
        return self.plan.identity

    def verify(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return self._pass(batch)

    def prefill(self, batch: PackedBatch, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._pass(batch, logit_rows)
