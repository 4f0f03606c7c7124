"""What a device round teaches, read one round late.

The device sums statistics over all live rows of a round; the host learns afterwards which of them must not
count and takes their part out again: what lies behind a stop, and rounds of requests that had ended. What is
only reported or checked waits for ten rounds, because each call costs a fixed time far above its arithmetic.

Invariants: nothing behind a stop trains; the round after an end is neither trained nor counted; statistics
carry the version of the coefficients that they were computed with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.acceptance import Acceptance
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.feedback import ROUNDS_AT_ONCE
from trtllm_av.runtime.step import Drafts, RoundOutcome, RoundPlan, Trim


class _Finished(NamedTuple):
    """What a round leaves to be checked: ``confidence`` [R,K], ``lens`` [3,R] (drafted, verified, accepted),
    ``overlap`` [R], ``trainable_lens`` [R] and ``is_checked`` [R], False for rows that teach nothing."""

    confidence: NDArray[np.float32]
    lens: NDArray[np.int32]
    overlap: NDArray[np.float32]
    trainable_lens: NDArray[np.int32]
    is_checked: NDArray[np.bool_]


class LateFeedback:
    """Feeds ``controller`` from the results of ``CudaExecutor.read``."""

    def __init__(self, controller: AdaptiveController) -> None:
        self._controller = controller
        self._finished: list[_Finished] = []

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
        confidence, lens = results["confidence"], results["lens"]
        statistics = results["statistics"] - _untrained(plan, results, trainable_lens)
        controller.estimator.observe(statistics, plan.version)
        controller.history.update(slots[is_counted], confidence[is_counted], lens[0, is_counted])
        is_checked = is_counted & (trainable_lens > 0)
        self._finished.append(
            _Finished(confidence, lens[:3], results["overlap"], trainable_lens, is_checked)
        )
        if len(self._finished) == ROUNDS_AT_ONCE:
            self._check()

    def _check(self) -> None:
        """Compare what confidences promised with what came of it, over the rounds that wait for it."""
        feedback = self._controller.feedback
        assert feedback is not None
        rounds, self._finished = self._finished, []
        confidence = np.concatenate([one.confidence for one in rounds])
        lens = np.concatenate([one.lens for one in rounds], axis=1)
        is_checked = np.concatenate([one.is_checked for one in rounds])
        labels = _labels(
            confidence,
            lens,
            np.concatenate([one.overlap for one in rounds]),
            np.concatenate([one.trainable_lens for one in rounds]),
        )
        feedback.check(confidence, labels.numpy(), lens[1], lens[2], is_checked)


def _labels(
    confidence: NDArray[np.float32],
    lens: NDArray[np.int32],
    overlap: NDArray[np.float32],
    trainable_lens: NDArray[np.int32],
) -> Tensor:
    """[N,K] labels of N rows: ``confidence`` [N,K], ``lens`` [3,N], ``overlap`` and ``trainable_lens`` [N]."""
    drafted, verified, accepted = torch.from_numpy(np.ascontiguousarray(lens))
    return torch_ops.label_drafts(
        drafted,
        verified,
        accepted,
        torch.from_numpy(trainable_lens),
        torch.from_numpy(overlap),
        num_positions=confidence.shape[1],
        confidence=torch.from_numpy(confidence),
    )


def _untrained(
    plan: RoundPlan, results: dict[str, Any], trainable_lens: NDArray[np.int32]
) -> NDArray[np.float64]:
    """[K,6] what the positions at or behind ``trainable_lens`` [R] added to the round's statistics."""
    width = results["confidence"].shape[1]
    rows = np.flatnonzero((trainable_lens < width) & (results["lens"][3] > 0))
    if rows.size == 0:
        return np.zeros_like(results["statistics"])
    labels = _labels(
        results["confidence"][rows],
        results["lens"][:3, rows],
        results["overlap"][rows],
        np.full(rows.size, width, np.int32),
    )
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
