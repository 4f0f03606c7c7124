"""The adaptive part between rounds: plan the next one from earlier ones, learn from the one that ran.

Invariants: ``plan`` reads rounds ≤ n−1 only — stale survival, coefficients, costs — and the live
confidences of round n reach it through ``observe`` of that round at the earliest; rows whose law is
constrained never train; in ``shadow`` and ``fixed`` a row's drafts depend on no other row, so that a seed
repeats its tokens; in the modes ``fixed`` and ``off`` nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from trtllm_av.runtime.confidence import SurvivalHistory
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import Decision, DepthController
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.estimator import AcceptanceEstimator
from trtllm_av.runtime.feedback import RoundFeedback
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.params import AvMode
from trtllm_av.runtime.step import RoundOutcome, RoundPlan


class AdaptiveController:
    """Decides depth, budget and floors of every round, and owns what they are decided from.

    ``cost_model`` is needed by the modes ``adaptive`` and ``shadow``. ``last_decision`` is None in the
    others and before the first round. ``dtype`` is the float type of survivals.
    """

    def __init__(
        self,
        mode: AvMode,
        num_positions: int,
        num_slots: int,
        cost_model: CostModel | None = None,
        *,
        refit_interval: int = 100,
        dtype: DTypeLike = np.float32,
    ) -> None:
        if mode in ("adaptive", "shadow") and cost_model is None:
            raise UsageError(
                f"av_mode={mode!r} needs step costs; profile the engine or give a table"
            )
        self.mode = mode
        self.num_positions = num_positions
        self.cost_model = cost_model
        self.estimator = AcceptanceEstimator(max(num_positions, 1), refit_interval=refit_interval)
        self.history = SurvivalHistory(num_slots, max(num_positions, 1), dtype=dtype)
        self.depth: DepthController | None = None
        self.feedback: RoundFeedback | None = None
        if cost_model is not None:
            self.depth = DepthController(cost_model, dtype=dtype)
            self.feedback = RoundFeedback(self.estimator, self.depth, num_slots, dtype=dtype)
        self.last_decision: Decision | None = None
        self._reported: dict[str, float] = {}

    @property
    def is_adaptive(self) -> bool:
        """True if a row's verified length depends on other rows: random keys then need request numbers."""
        return self.mode == "adaptive"

    def admit(self, slot: int) -> None:
        """A new request takes ``slot``."""
        self.history.admit(slot)

    def plan(
        self, slots: NDArray[np.int64], *, draft_limits: Sequence[int], is_adaptive: Sequence[bool]
    ) -> RoundPlan:
        """Fix the next round for the rows in ``slots`` [R].

        ``draft_limits``: the most each row may draft; ``is_adaptive``: False for rows whose whole draft
        is to be verified.
        """
        limits = np.array(draft_limits, np.int32)
        self.last_decision = None
        if self.mode == "off":
            return self._plan(np.zeros_like(limits), np.zeros_like(limits), 0)
        if self.mode == "fixed" or not limits.any():
            return self._plan(limits, limits, int(limits.sum()))
        assert self.depth is not None
        floors = np.zeros_like(limits) if all(is_adaptive) else limits * np.invert(is_adaptive)
        decision = self.depth.decide(
            self.history.survival(slots),
            limits,
            floors,
            base_tokens=len(slots),
            sampling_rows=len(slots),
        )
        self.last_decision = decision
        if self.mode == "shadow":
            return self._plan(limits, limits, int(limits.sum()))
        return self._plan(
            decision.draft_lens,
            decision.min_verify_lens,
            decision.budget,
            is_probe=decision.is_probe,
        )

    def _plan(
        self,
        draft_lens: NDArray[np.int32],
        min_verify_lens: NDArray[np.int32],
        budget: int,
        *,
        is_probe: bool = False,
    ) -> RoundPlan:
        return RoundPlan(
            draft_lens=torch.from_numpy(draft_lens),
            min_verify_lens=torch.from_numpy(min_verify_lens),
            draft_budget=budget,
            coefficients=torch.from_numpy(self.estimator.coefficients),
            version=self.estimator.version,
            is_probe=is_probe,
            is_scored=self.feedback is not None,
        )

    def observe(
        self,
        slots: NDArray[np.int64],
        plan: RoundPlan,
        outcome: RoundOutcome,
        trainable_lens: Sequence[int],
    ) -> None:
        """Learn from a finished round. ``trainable_lens``: positions of each row that may train."""
        if self.feedback is None:
            return
        drafts, trim, acceptance = outcome.drafts, outcome.trim, outcome.acceptance
        if drafts.laws:
            self.feedback.add(
                drafts.features,
                drafts.confidence,
                plan.draft_lens,
                trim.verify_lens,
                acceptance.accepted_lens,
                torch.from_numpy(np.array(trainable_lens, np.int32)),
                acceptance.overlap,
            )
            self.history.update(slots, drafts.confidence.numpy(), plan.draft_lens.numpy())
        if self.feedback.end_round():
            self.history.set_coefficients(self.estimator.coefficients)

    def add_to(self, report: RoundReport) -> None:
        """Add to ``report`` what was learnt and left out since the last call; forecasts come in tens of rounds."""
        if self.depth is None or self.feedback is None:
            return
        figures: dict[str, float] = {
            "expected_accepted": self.feedback.expected_accepted,
            "checked_accepted": self.feedback.actual_accepted,
            "probe_ms": self.depth.probe_ms,
            "rejected statistics": self.estimator.num_rejected,
            "outdated statistics": self.estimator.num_outdated,
        }
        new = {name: value - self._reported.get(name, 0) for name, value in figures.items()}
        self._reported = figures
        report.expected_accepted += new["expected_accepted"]
        report.checked_accepted += int(new["checked_accepted"])
        report.probe_ms += new["probe_ms"]
        for name in ("rejected statistics", "outdated statistics"):
            if new[name]:
                report.fallbacks[name] += int(new[name])
        report.coefficients = [float(c) for c in self.estimator.coefficients]
