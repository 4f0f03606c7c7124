"""The adaptive part between rounds: plan the next one from earlier ones, learn from the one that ran.

Invariants: ``plan`` reads rounds ≤ n−1 only — stale survival, coefficients, costs — and the live
confidences of round n reach it through ``observe`` of that round at the earliest; rows whose law is
constrained never train; in ``shadow`` and ``fixed`` a row's drafts depend on no other row, so that a seed
repeats its tokens; in the modes ``fixed`` and ``off`` nothing is estimated.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.coefficient_store import CoefficientStore
from trtllm_av.runtime.confidence import SurvivalHistory
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import Decision, DepthController
from trtllm_av.runtime.early_stop import stop_survival
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.estimator import AcceptanceEstimator, cold_coefficients
from trtllm_av.runtime.exploration import Exploration
from trtllm_av.runtime.feedback import RoundFeedback
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.params import AvMode
from trtllm_av.runtime.recent_acceptance import RecentAcceptance
from trtllm_av.runtime.step import RoundOutcome, RoundPlan


class AdaptiveController:
    """Decides depth, budget and floors of every round, and owns what they are decided from.

    ``cost_model`` is needed by the modes ``adaptive`` and ``shadow``. ``last_decision`` is None in the
    others and before the first round. ``dtype`` is the float type of survivals. ``num_uniform_rounds``
    counts adaptive rounds that verified all they drafted because trimming would have gained too little.
    ``store`` keeps coefficients over restarts; ``is_restored`` says whether it had some.
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
        options: AdaptiveOptions | None = None,
        store: CoefficientStore | None = None,
    ) -> None:
        if mode in ("adaptive", "shadow") and cost_model is None:
            raise UsageError(
                f"av_mode={mode!r} needs step costs; profile the engine or give a table"
            )
        self.mode = mode
        self.num_positions = num_positions
        self.cost_model = cost_model
        self.options = options = options or AdaptiveOptions()
        positions = max(num_positions, 1)
        self.estimator = AcceptanceEstimator(
            positions,
            refit_interval=refit_interval,
            num_features=options.num_features,
            discount=options.discount,
            cold=_cold_start(options, positions),
        )
        self.history = SurvivalHistory(num_slots, positions, dtype=dtype)
        self.recent = RecentAcceptance(num_slots) if options.uses_recent_acceptance else None
        self.depth: DepthController | None = None
        self.feedback: RoundFeedback | None = None
        self.exploration: Exploration | None = None
        if cost_model is not None:
            self.depth = DepthController(cost_model, min_gain=options.min_gain, dtype=dtype)
            self.feedback = RoundFeedback(
                self.estimator,
                self.depth,
                num_slots,
                dtype=dtype,
                has_soft_labels=options.soft_labels,
            )
            if options.exploration:
                self.exploration = Exploration(positions, options.exploration)
        self.num_uniform_rounds = 0
        self.last_decision: Decision | None = None
        self._reported: dict[str, float] = {}
        self._store = store
        self.is_restored = self._restore()
        self.history.set_coefficients(self.estimator.coefficients)
        if store is not None:
            # What is not written yet is, when nobody uses this any more or the process ends.
            weakref.finalize(self, store.flush)

    def _restore(self) -> bool:
        """Take over the coefficients of an earlier run; False without any that fit."""
        coefficients = None if self._store is None else self._store.load()
        if self._store is None or coefficients is None:
            return False
        try:
            self.estimator.restore(coefficients)
        except ValueError as error:
            self._store.ignore(error)
            return False
        return True

    @property
    def is_adaptive(self) -> bool:
        """True if a row's verified length depends on other rows: random keys then need request numbers."""
        return self.mode == "adaptive"

    def admit(self, slot: int) -> None:
        """A new request takes ``slot``."""
        self.history.admit(slot)
        if self.recent is not None:
            self.recent.admit(slot)

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
            return self._plan(slots, np.zeros_like(limits), np.zeros_like(limits), 0)
        if self.mode == "fixed" or not np.count_nonzero(limits):
            return self._plan(slots, limits, limits, int(limits.sum()))
        assert self.depth is not None
        floors = np.zeros(limits.size, np.int32)
        if not all(is_adaptive):
            floors = limits * np.invert(is_adaptive)
        survival = self.history.forecast(slots)
        decision = self.depth.decide(
            survival, limits, floors, base_tokens=len(slots), sampling_rows=len(slots)
        )
        if self.exploration is not None and self.mode == "adaptive":
            decision = self.exploration.aim(decision, survival, self.estimator.label_counts)
        self.last_decision = decision
        if self.mode == "shadow":
            return self._plan(slots, limits, limits, int(limits.sum()))
        self.num_uniform_rounds += decision.is_uniform
        plan = self._plan(
            slots,
            decision.draft_lens,
            decision.min_verify_lens,
            decision.budget,
            is_probe=decision.is_probe,
        )
        plan.is_uniform = decision.is_uniform
        plan.explored_rows = decision.explored_rows
        if self.options.early_stop:
            assert self.cost_model is not None
            plan.early_stop_survival = stop_survival(
                self.cost_model,
                int(np.count_nonzero(decision.draft_lens)),
                decision.depth,
                decision.expected_tokens / decision.cost_ms,
            )
        return plan

    def _plan(
        self,
        slots: NDArray[np.int64],
        draft_lens: NDArray[np.int32],
        min_verify_lens: NDArray[np.int32],
        budget: int,
        *,
        is_probe: bool = False,
    ) -> RoundPlan:
        recent = self.recent
        return RoundPlan(
            draft_lens=torch.from_numpy(draft_lens),
            min_verify_lens=torch.from_numpy(min_verify_lens),
            draft_budget=budget,
            coefficients=torch.from_numpy(self.estimator.coefficients),
            version=self.estimator.version,
            is_probe=is_probe,
            is_scored=self.feedback is not None,
            recent_acceptance=None if recent is None else torch.from_numpy(recent.feature(slots)),
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
        if self.recent is not None:
            self.recent.update(slots, trim.verify_lens.numpy(), acceptance.accepted_lens.numpy())
        if drafts.laws:
            scored_lens = plan.draft_lens if drafts.scored_lens is None else drafts.scored_lens
            self.feedback.add(
                drafts.features,
                drafts.confidence,
                plan.draft_lens,
                trim.verify_lens,
                acceptance.accepted_lens,
                torch.from_numpy(np.array(trainable_lens, np.int32)),
                acceptance.overlap,
                acceptance.overlaps,
            )
            self.history.update(slots, drafts.confidence.numpy(), scored_lens.numpy())
        if self.feedback.end_round():
            self.history.set_coefficients(self.estimator.coefficients)
            if self._store is not None:
                self._store.save(self.estimator.coefficients)

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


def _cold_start(options: AdaptiveOptions, num_positions: int) -> NDArray[np.float32]:
    """[F+K] f32 before the first refit; a head's logit is taken as it is until labels say otherwise."""
    if options.source == "recalibrated":
        return cold_coefficients(num_positions, options.num_features, slope=1.0, intercept=0.0)
    return cold_coefficients(num_positions, options.num_features)
