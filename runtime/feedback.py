"""What finished rounds teach: statistics for the estimator, kept promises for the probe schedule.

On the CPU an operator costs a fixed time far above its arithmetic on [R, K] numbers, so ten rounds are
copied first and then labelled, summed and checked together.

Invariants: a refit sees every finished round; all rounds in the buffer were scored with the estimator's
present coefficients; rows that must not train (``trainable_lens`` 0) are not checked either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.calibration import CalibrationBins
from trtllm_av.runtime.depth import DepthController
from trtllm_av.runtime.estimator import AcceptanceEstimator

ROUNDS_AT_ONCE = 10  # divides the refit interval of 100, so that no flush is cut short


def accepted_moments(
    confidence: NDArray[np.floating[Any]], verify_lens: NDArray[np.int32]
) -> tuple[float, float]:
    """Expectation and variance of the drafts accepted over all rows, given ``confidence`` [R,K].

    A row that verifies ``verify_lens`` [R] drafts with survivals S_1 ≥ S_2 ≥ … accepts A of them, with
    E[A] = Σ S_i and E[A²] = Σ (2i−1) S_i; rows are independent.
    """
    positions = np.arange(confidence.shape[1], dtype=np.int32)[:, None]
    # Position-major [K,R]: products and sums run over whole rows of it.
    survival = confidence.T.copy()
    for i in range(1, len(survival)):
        survival[i] *= survival[i - 1]
    survival *= positions < verify_lens
    means = survival.sum(axis=0)
    squares = (2 * positions[:, 0] + 1) @ survival.sum(axis=1)
    return float(means.sum()), float(squares - means @ means)


def soften(labels: NDArray[np.floating[Any]], overlaps: NDArray[np.floating[Any]]) -> None:
    """Put ``overlaps`` [R,K] in the place of ``labels`` [R,K] wherever both are known."""
    np.copyto(labels, overlaps, where=~np.isnan(labels) & ~np.isnan(overlaps))


class RoundFeedback:
    """Collects rounds of at most ``max_requests`` rows for ``estimator`` and ``controller``.

    ``expected_accepted`` and ``actual_accepted`` add up over all checked rounds; ``calibration`` compares
    confidences with labels. ``dtype`` is that of features, confidence and overlap. ``has_soft_labels``: judged
    positions are labelled Σ min(p, q), the chance that a draft is accepted there, instead of what became of
    the draft.
    """

    def __init__(
        self,
        estimator: AcceptanceEstimator,
        controller: DepthController,
        max_requests: int,
        *,
        dtype: DTypeLike = np.float32,
        has_soft_labels: bool = False,
    ) -> None:
        self.expected_accepted = 0.0
        self.actual_accepted = 0
        self.calibration = CalibrationBins()
        self._estimator = estimator
        self._controller = controller
        self._num_rounds = 0
        self._num_rows = 0
        capacity = ROUNDS_AT_ONCE * max_requests
        # NumPy, not torch: copying a slice costs a fraction of a torch call.
        self._features = np.empty(
            (capacity, estimator.num_positions, estimator.num_features), dtype
        )
        self._confidence = np.empty((capacity, estimator.num_positions), dtype)
        self._overlap = np.empty(capacity, dtype)
        self._overlaps = (
            np.empty((capacity, estimator.num_positions), dtype) if has_soft_labels else None
        )
        # draft_lens, verify_lens, accepted_lens, trainable_lens
        self._lens = np.empty((4, capacity), np.int32)

    def add(
        self,
        features: Tensor,
        confidence: Tensor,
        draft_lens: Tensor,
        verify_lens: Tensor,
        accepted_lens: Tensor,
        trainable_lens: Tensor,
        overlap: Tensor,
        overlaps: Tensor | None = None,
    ) -> None:
        """Copy a finished round of R rows; the arguments are those of ``label_drafts``.

        ``features`` [R,K,F] and ``confidence`` [R,K] as scored, the lengths [R] int32, ``overlap`` [R];
        ``overlaps`` [R,K] at judged positions, needed for soft labels.
        """
        first, last = self._num_rows, self._num_rows + overlap.numel()
        self._features[first:last] = features.numpy()
        self._confidence[first:last] = confidence.numpy()
        self._overlap[first:last] = overlap.numpy()
        if self._overlaps is not None:
            assert overlaps is not None
            self._overlaps[first:last] = overlaps.numpy()
        lens = self._lens[:, first:last]
        lens[0] = draft_lens.numpy()
        lens[1] = verify_lens.numpy()
        lens[2] = accepted_lens.numpy()
        lens[3] = trainable_lens.numpy()
        self._num_rows = last

    def end_round(self) -> bool:
        """Count a round, drafted or not; True if the coefficients changed."""
        self._num_rounds += 1
        if self._num_rounds == ROUNDS_AT_ONCE or self._estimator.is_refit_due:
            self.flush()
        return self._estimator.tick()

    def flush(self) -> None:
        """Hand over what is in the buffer."""
        rows = self._num_rows
        self._num_rounds = self._num_rows = 0
        if rows == 0:
            return
        confidence = self._confidence[:rows]
        _, verify_lens, accepted_lens, trainable_lens = self._lens[:, :rows]
        lens = torch.from_numpy(self._lens)
        labels = torch_ops.label_drafts(
            lens[0, :rows],
            lens[1, :rows],
            lens[2, :rows],
            lens[3, :rows],
            torch.from_numpy(self._overlap[:rows]),
            num_positions=self._estimator.num_positions,
            confidence=torch.from_numpy(confidence),
        )
        self.check(confidence, labels.numpy(), verify_lens, accepted_lens, trainable_lens > 0)
        if self._overlaps is not None:
            soften(labels.numpy(), self._overlaps[:rows])
        statistics = torch_ops.accumulate_statistics(
            torch.from_numpy(self._features[:rows]),
            labels,
            torch.from_numpy(self._estimator.coefficients),
        )
        self._estimator.observe(statistics.numpy(), self._estimator.version)

    def check(
        self,
        confidence: NDArray[np.floating[Any]],
        labels: NDArray[np.floating[Any]],
        verify_lens: NDArray[np.int32],
        accepted_lens: NDArray[np.int32],
        is_checked: NDArray[np.bool_],
    ) -> None:
        """Compare what ``confidence`` [N,K] promised with what came of it, over rows of several rounds.

        ``labels`` [N,K] as of ``label_drafts``; ``verify_lens`` and ``accepted_lens`` [N] int32;
        ``is_checked`` [N], False for rows whose draft may end before it is judged.
        """
        self.calibration.add(confidence, labels)
        expected, variance = accepted_moments(confidence, verify_lens * is_checked)
        actual = int(accepted_lens @ is_checked)
        self.expected_accepted += expected
        self.actual_accepted += actual
        self._controller.observe(expected, variance, actual)
