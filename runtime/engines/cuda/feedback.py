"""What a device round teaches, read one round late.

The device sums statistics over all live rows of a round; the host learns afterwards which of them must not
count and takes their part out again: what lies behind a stop, and rounds of requests that had ended.

Invariants: nothing behind a stop trains; the round after an end is neither trained nor counted; statistics
carry the version of the coefficients that they were computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.acceptance import Acceptance
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.feedback import accepted_moments
from trtllm_av.runtime.step import Drafts, RoundOutcome, RoundPlan, Trim

_CHECKED_ROUNDS = 10  # rounds whose forecasts are checked together


class LateFeedback:
    """Feeds ``controller`` from the results of ``CudaExecutor.read``."""

    def __init__(self, controller: AdaptiveController) -> None:
        self._controller = controller
        self._num_rounds = 0
        self._expected = self._variance = 0.0
        self._actual = 0

    def observe(
        self,
        slots: NDArray[np.int64],
        plan: RoundPlan,
        results: dict[str, Any],
        trainable_lens: NDArray[np.int32],
        is_counted: NDArray[np.bool_],
    ) -> RoundOutcome:
        """Learn from a round of R rows; the outcome of the rows that count, without laws.

        ``trainable_lens`` [R]: positions that may train; K where nothing ended. ``is_counted`` [R]: False
        for requests that had ended before the round.
        """
        controller = self._controller
        if controller.feedback is not None and results["lens"][0].any():
            self._teach(slots, plan, results, trainable_lens, is_counted)
        outcome = _outcome(results, is_counted)
        # Without laws only the round is counted, and a refit made where one is due.
        controller.observe(slots[is_counted], plan, outcome, trainable_lens[is_counted].tolist())
        return outcome

    def _teach(
        self,
        slots: NDArray[np.int64],
        plan: RoundPlan,
        results: dict[str, Any],
        trainable_lens: NDArray[np.int32],
        is_counted: NDArray[np.bool_],
    ) -> None:
        controller = self._controller
        assert controller.feedback is not None and controller.depth is not None
        confidence = results["confidence"]
        draft_lens, verify_lens, accepted_lens, _ = results["lens"]
        labels = _labels(results, np.arange(len(slots)), trainable_lens)
        controller.feedback.calibration.add(confidence, labels.numpy())
        statistics = results["statistics"] - _untrained(plan, results, trainable_lens)
        controller.estimator.observe(statistics, plan.version)
        controller.history.update(slots[is_counted], confidence[is_counted], draft_lens[is_counted])
        is_checked = is_counted & (trainable_lens > 0)
        expected, variance = accepted_moments(confidence, verify_lens * is_checked)
        actual = int(accepted_lens @ is_checked)
        controller.feedback.expected_accepted += expected
        controller.feedback.actual_accepted += actual
        self._expected += expected
        self._variance += variance
        self._actual += actual
        self._num_rounds += 1
        if self._num_rounds == _CHECKED_ROUNDS:
            controller.depth.observe(self._expected, self._variance, self._actual)
            self._num_rounds = 0
            self._expected = self._variance = 0.0
            self._actual = 0


def _labels(
    results: dict[str, Any], rows: NDArray[np.int64], trainable_lens: NDArray[np.int32]
) -> Tensor:
    """[N,K] labels of ``rows`` [N], with ``trainable_lens`` [N] positions each."""
    lens = torch.from_numpy(np.ascontiguousarray(results["lens"][:3, rows]))
    return torch_ops.label_drafts(
        lens[0],
        lens[1],
        lens[2],
        torch.from_numpy(trainable_lens),
        torch.from_numpy(results["overlap"][rows]),
        num_positions=results["confidence"].shape[1],
        confidence=torch.from_numpy(results["confidence"][rows]),
    )


def _untrained(
    plan: RoundPlan, results: dict[str, Any], trainable_lens: NDArray[np.int32]
) -> NDArray[np.float64]:
    """[K,6] what the positions at or behind ``trainable_lens`` [R] added to the round's statistics."""
    width = results["confidence"].shape[1]
    rows = np.flatnonzero((trainable_lens < width) & (results["lens"][3] > 0))
    if rows.size == 0:
        return np.zeros_like(results["statistics"])
    labels = _labels(results, rows, np.full(rows.size, width, np.int32))
    is_trained = np.arange(width) < trainable_lens[rows, None]
    labels.masked_fill_(torch.from_numpy(is_trained), torch.nan)
    features = torch.from_numpy(results["features"][rows])
    part: NDArray[np.float64] = torch_ops.accumulate_statistics(
        features, labels, plan.coefficients
    ).numpy()
    return part


def _outcome(results: dict[str, Any], is_counted: NDArray[np.bool_]) -> RoundOutcome:
    """The lengths of the rows that count, as the host's round reports them."""
    lens = torch.from_numpy(results["lens"][:, is_counted])
    confidence = torch.from_numpy(results["confidence"][is_counted])
    nothing = torch.empty(0)
    return RoundOutcome(
        Drafts(nothing, nothing, confidence, []),
        Trim(nothing, lens[1], nothing),
        Acceptance(lens[2], nothing, nothing),
        [],
        [],
    )
