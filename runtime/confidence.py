"""What the host knows about every live request's drafts: survival as the rounds before left it.

Invariants: ``survival`` reads earlier rounds only, never the round being decided; a slot that another
request takes over starts from the running means of the batch; NaN never enters a mean. The budget is
decided from these stale values, which keeps it lossless.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_av.runtime.estimator import cold_coefficients

COLD_FEATURE = 2.2  # typical log-odds of the top draft token, until a position was scored
PRIOR_ROWS = 2.0  # rows that the running mean counts as, beside those of a forecast
HORIZON = 64.0  # rows that a running mean remembers: the last round at R = 64
_COLD_WEIGHT = 1e-9  # of the cold start in a running mean: nothing, once there is a row

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
Float64 = NDArray[np.float64]


class SurvivalHistory:
    """Survival per slot and position, as of the last round each slot took part in.

    A position that this round did not draft gets S_(i−1) times its running mean confidence; a new request
    the running mean survival; a position without data σ(ω·2.2 + β_i).
    """

    def __init__(
        self, num_slots: int, num_positions: int, *, dtype: DTypeLike = np.float32
    ) -> None:
        # Position-major [K, slots]: products and sums then run over whole rows.
        self._survival: Floats = np.zeros((num_positions, num_slots), dtype)
        self._is_new = np.ones(num_slots, np.bool_)
        self._positions = np.arange(num_positions, dtype=np.int32)[:, None]
        # Per position: rows that drafted it, the sum of their confidence, that of their survival.
        self._sums: Float64 = np.zeros((3, num_positions))
        self.set_coefficients(cold_coefficients(num_positions))

    def set_coefficients(self, coefficients: NDArray[np.float32]) -> None:
        """Take the estimator's ``coefficients`` [F+K], for positions that were never drafted.

        Features beside the first count as 0 there.
        """
        intercepts = coefficients[coefficients.size - len(self._survival) :]
        log_odds = coefficients[0] * COLD_FEATURE + intercepts.astype(np.float64)
        self._cold_confidence: Float64 = 1.0 / (1.0 + np.exp(-log_odds))
        self._mean_confidence: Float64 | None = None

    def admit(self, slot: int) -> None:
        """A new request takes ``slot``: forget the one before."""
        self._is_new[slot] = True

    def update(self, slots: Ints, confidence: Floats, drafted_lens: Ints) -> None:
        """Take over a finished round: ``confidence`` [R,K], valid up to ``drafted_lens`` [R]."""
        is_drafted = self._positions < drafted_lens
        terms = np.empty((3, *is_drafted.shape), self._survival.dtype)
        terms[0] = is_drafted
        terms[1] = self.mean_confidence()[:, None]
        np.copyto(terms[1], confidence.T, where=is_drafted)
        np.fmax(terms[1], 0, out=terms[1])  # NaN becomes 0
        # Whole rows at once; ufunc.accumulate goes down the columns one by one.
        survival = terms[2]
        survival[0] = terms[1, 0]
        for before, own, at in zip(survival, terms[1, 1:], survival[1:], strict=False):
            np.multiply(before, own, out=at)
        self._survival[:, slots] = survival
        self._is_new[slots] = False
        terms[1:] *= is_drafted
        self._sums += np.add.reduce(terms, axis=2, dtype=np.float64)
        self._sums *= HORIZON / np.maximum(self._sums[0], HORIZON)
        self._mean_confidence = None

    def survival(self, slots: Ints) -> Floats:
        """[R,K] survival of the requests in ``slots`` [R], from rounds before this one."""
        return self._own_survival(slots, self.mean_survival()).T

    def forecast(self, slots: Ints) -> Floats:
        """[R,K] survival to plan with: each row's own, drawn towards the running mean where rows are few.

        One round's survival is a noisy forecast of the next one's. Over many rows the noise averages out and
        their spread is what a budget needs; a batch of one row would follow it from depth to depth.
        """
        mean = self.mean_survival()
        own = self._own_survival(slots, mean)
        pull = mean[:, None] - own
        pull *= PRIOR_ROWS / (slots.size + PRIOR_ROWS)
        own += pull.astype(own.dtype)
        return own.T

    def _own_survival(self, slots: Ints, mean: Float64) -> Floats:
        """[K,R], a copy; ``mean`` [K] for new requests."""
        survival = self._survival.take(slots, axis=1)
        is_new = self._is_new[slots]
        if np.count_nonzero(is_new):  # far cheaper than any()
            survival[:, is_new] = mean[:, None]
        return survival

    def mean_confidence(self) -> Float64:
        """[K] running mean of the confidences, not to be written to; the cold start where there are none."""
        # A round asks twice: for its forecast, and when it has run.
        if self._mean_confidence is None:
            counts, confidence, _ = self._sums
            cold = _COLD_WEIGHT * self._cold_confidence
            self._mean_confidence = (confidence + cold) / (counts + _COLD_WEIGHT)
        return self._mean_confidence

    def mean_survival(self) -> Float64:
        """[K] running mean of the survival; S_(i−1) × mean confidence where there is none."""
        counts, _, survival = self._sums
        # Positions are averaged over different rounds, so a deeper mean may come out higher.
        if np.count_nonzero(counts) == counts.size:
            falling: Float64 = np.divide(survival, counts)
            np.minimum.accumulate(falling, out=falling)
            return np.minimum(falling, 1.0, out=falling)
        means = self.mean_confidence().tolist()
        before = 1.0
        for i, (count, total) in enumerate(zip(counts.tolist(), survival.tolist(), strict=True)):
            means[i] = before = min(before, total / count) if count > 0 else before * means[i]
        return np.array(means)
