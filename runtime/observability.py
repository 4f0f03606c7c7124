"""What one engine did and how well it forecast it: totals, the last rounds, refits, calibration.

A round costs a copy of its lengths; totals are made when somebody asks for them, or when the log is
full. ``listener`` is told of the same batches, so that a recording costs a round nothing more.

Invariants: every decode round is totalled once; figures of a report start where the one before ended;
nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.calibration import CalibrationBins
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.round_log import RoundBatch, RoundLog
from trtllm_av.runtime.step import RoundOutcome, RoundPlan


class Refit(NamedTuple):
    """``coefficients`` [F+K] f32, version ``version``, that hold from the end of round ``round`` on."""

    round: int
    version: int
    coefficients: NDArray[np.float32]


Listener = Callable[[RoundBatch, list[Refit]], None]


class EngineObserver:
    """Watches the rounds of one engine of at most ``max_rows`` requests.

    ``listener``, if set, is called with finished rounds and with the refits among them. ``num_rounds``
    counts all decode rounds of the engine.
    """

    listener: Listener | None = None

    def __init__(self, controller: AdaptiveController, max_rows: int) -> None:
        self._controller = controller
        self._log = RoundLog(controller.num_positions, max_rows, controller.cost_model)
        self.num_rounds = 0
        self._refits: list[Refit] = []
        self._begin()

    def count(self, plan: RoundPlan, outcome: RoundOutcome, seconds: float, emitted: int) -> None:
        """Keep a decode round that took ``seconds`` (0: not timed) and committed ``emitted`` tokens."""
        decision, estimator = self._controller.last_decision, self._controller.estimator
        self._log.add(
            plan.draft_lens,
            outcome.trim.verify_lens,
            outcome.acceptance.accepted_lens,
            budget=plan.draft_budget,
            decided_budget=0 if decision is None else decision.budget,
            emitted=emitted,
            seconds=seconds,
            is_probe=plan.is_probe,
            explored=plan.explored_rows,
            version=plan.version,
        )
        self.num_rounds += 1
        if estimator.version != plan.version:
            self._refits.append(Refit(self.num_rounds, estimator.version, estimator.coefficients))
        if self._log.is_full:
            self._settle()

    def totals(self) -> RoundReport:
        """The report, complete up to the last round; the object goes on counting."""
        self._settle()
        self._controller.add_to(self.report)
        estimator, report = self._controller.estimator, self.report
        calibration = self._calibration().since(self._calibration_before)
        report.calibration = calibration.diagram()
        report.calibration_error = calibration.error()
        controller, exploration = self._controller, self._controller.exploration
        report.uniform_rounds = controller.num_uniform_rounds - self._uniform_before
        if exploration is not None:
            report.explored_tokens = exploration.cost_tokens - self._explored_before
        report.refits = estimator.num_refits - self._refits_before
        report.coefficient_version = estimator.version
        return report

    def start_report(self) -> None:
        """Let the present report be and begin another; what is learnt so far belongs to the old one."""
        self.totals()
        self._begin()

    def _begin(self) -> None:
        controller, exploration = self._controller, self._controller.exploration
        self.report = RoundReport(controller.num_positions)
        self._refits_before = controller.estimator.num_refits
        self._uniform_before = controller.num_uniform_rounds
        self._explored_before = 0.0 if exploration is None else exploration.cost_tokens
        self._calibration_before = self._calibration().sums.copy()

    def _calibration(self) -> CalibrationBins:
        feedback = self._controller.feedback
        return CalibrationBins() if feedback is None else feedback.calibration

    def _settle(self) -> None:
        batch, refits = self._log.take(), self._refits
        self._refits = []
        self.report.add_rounds(batch)
        if self.listener is not None:
            self.listener(batch, refits)
