"""How much of each draft is verified while recording: all of it, or what the product decides.

Invariant: the decision is the product's own (controller and trim operator), with given step costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.acceptance import Acceptance
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.sampling import Distribution
from trtllm_av.runtime.step import Drafts, RoundOutcome, RoundPlan, Trim

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Trimming(Protocol):
    """Decides lengths of rounds. Slots are those of the live rows, in rising order."""

    def admit(self, slot: int) -> None: ...

    def plan(self, slots: NDArray[np.int64], limits: Ints) -> Ints:
        """[R] draft lengths within ``limits``; called before the round's first draw."""
        ...

    def verify_lens(self, feature: Floats) -> Ints:
        """[R] admitted drafts, given the ``feature`` [R, K] of the round's drafts."""
        ...

    def observe(self, accepted: Ints, labelled: Ints, overlap: Floats) -> None:
        """The round's end: ``overlap`` [R] at the first trimmed position, NaN where there is none."""
        ...


class VerifyAll:
    """No trimming."""

    def admit(self, slot: int) -> None:
        """Nothing is kept between rounds."""

    def plan(self, slots: NDArray[np.int64], limits: Ints) -> Ints:
        self._lens = limits
        return limits

    def verify_lens(self, feature: Floats) -> Ints:
        return self._lens

    def observe(self, accepted: Ints, labelled: Ints, overlap: Floats) -> None:
        """Nothing is learnt."""


class ProductTrimming:
    """The product's controller over ``costs``, a table of step costs."""

    def __init__(self, costs: Path | dict[str, Any], num_positions: int, num_slots: int) -> None:
        cost_model = CostModel.from_table(costs, num_positions=num_positions)
        self.controller = AdaptiveController("adaptive", num_positions, num_slots, cost_model)
        self._slots: NDArray[np.int64] = np.zeros(0, np.int64)
        self._plan: RoundPlan | None = None
        self._drafts: Drafts | None = None
        self._trim: Trim | None = None

    def admit(self, slot: int) -> None:
        self.controller.admit(slot)

    def plan(self, slots: NDArray[np.int64], limits: Ints) -> Ints:
        self._slots = slots
        self._plan = self.controller.plan(
            slots, draft_limits=limits.tolist(), is_adaptive=[True] * len(slots)
        )
        return self._plan.draft_lens.numpy()

    def verify_lens(self, feature: Floats) -> Ints:
        plan, num_rows = self._plan, len(feature)
        assert plan is not None
        features = torch.from_numpy(np.clip(feature, -15, 15)[:, :, None])
        confidence = torch_ops.score_features(
            features, plan.coefficients, torch.zeros(1, dtype=torch.int32)
        )
        confidence *= torch.arange(feature.shape[1]) < plan.draft_lens[:, None]
        survival, lens, cu_seqlens = torch_ops.trim_drafts(
            confidence,
            plan.draft_lens,
            torch.ones_like(plan.draft_lens),
            plan.min_verify_lens,
            torch.tensor([plan.draft_budget], dtype=torch.int32),
        )
        tokens = torch.zeros(feature.shape, dtype=torch.int64)
        law = Distribution.one_hot(torch.zeros(num_rows, dtype=torch.int64), 1)
        self._drafts = Drafts(tokens, features, confidence, [law])
        self._trim = Trim(survival, lens, cu_seqlens)
        return lens.numpy()

    def observe(self, accepted: Ints, labelled: Ints, overlap: Floats) -> None:
        assert self._plan is not None and self._drafts is not None and self._trim is not None
        acceptance = Acceptance(
            torch.from_numpy(accepted).long(),
            torch.zeros(len(accepted), dtype=torch.int64),
            torch.from_numpy(overlap),
        )
        outcome = RoundOutcome(self._drafts, self._trim, acceptance, [], [])
        self.controller.observe(self._slots, self._plan, outcome, labelled.tolist())
