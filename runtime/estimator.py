"""The acceptance estimator: p_i = σ(ω·f_i + β_i), fitted online from per-position sums.

One shared slope ω, one intercept β_i per draft position. Each refit is one Newton step on the
log-likelihood (iteratively reweighted least squares); the Hessian is an arrowhead, since intercepts meet
only through the slope, so the solve is O(K). The curvature weights in the statistics are floored at
.125, half of the bound of 1/4 on σ' (Böhning and Lindsay, 1988): the fixed point stays, and a saturated
start cannot throw the step far away.

Invariants: statistics that are not finite never reach the fit; an intercept without labels keeps its
value bit for bit; ω stays in [0, 4] and every β in [−10, 10]; no refit moves a logit by more than 2
over the features seen (the rule is at ``_bounded_step``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

COLD_SLOPE = 0.5  # median over five public model pairs
COLD_INTERCEPT = -0.2
MAX_SLOPE = 4.0
MAX_INTERCEPT = 10.0
MAX_LOGIT_STEP = 2.0

_SPREAD = 2.0  # standard deviations around the mean feature that count as seen
_PRIOR = 1e-3
_DAMPING_LABELS = 50.0
_KEPT_VERSIONS = 8  # coefficient sets that late statistics may still refer to

Float64 = NDArray[np.float64]


def cold_coefficients(num_positions: int) -> NDArray[np.float32]:
    """[1+K] f32: the slope and the intercepts before the first refit."""
    coefficients = np.full(1 + num_positions, COLD_INTERCEPT, np.float32)
    coefficients[0] = COLD_SLOPE
    return coefficients


def _bounded_step(statistics: Float64, coefficients: Float64) -> Float64:
    """The damped and bounded Newton step [1+K] f64, for ``statistics`` [K,6] at ``coefficients`` [1+K].

    The features seen at position k are m_k ± 2·s_k, where m_k = b_k/c_k and s_k is their
    curvature-weighted standard deviation. The slope is limited first, to |Δω|·(|m_k| + 2·s_k) ≤ 2 at
    every position, which also bounds those whose intercept rests. Each intercept is then solved for the
    slope that is taken, and cut to |Δω·m_k + Δβ_k| + |Δω|·2·s_k ≤ 2.
    """
    a, b, c, g0, g1, n = statistics.T
    c = c + _PRIOR  # so that a position without labels has mean, spread and step exactly 0
    mean = b / c
    spread = _SPREAD * np.sqrt(np.maximum(a / c - mean * mean, 0.0))

    total = float(n.sum())
    numerator = float(g0.sum()) - float((mean * g1).sum())
    slope_step = numerator / (float(a.sum()) + _PRIOR - float((b * mean).sum()))
    slope_step *= total / (total + _DAMPING_LABELS)
    limit = MAX_LOGIT_STEP / float(np.max(np.abs(mean) + spread, initial=1e-6))
    slope_step = min(max(slope_step, -limit), limit)
    slope = min(max(float(coefficients[0]) + slope_step, 0.0), MAX_SLOPE)
    slope_step = slope - float(coefficients[0])

    level_step = (g1 - b * slope_step) / c * (n / (n + _DAMPING_LABELS))
    room = MAX_LOGIT_STEP - abs(slope_step) * spread
    level_step = np.clip(level_step + slope_step * mean, -room, room) - slope_step * mean
    # Cutting β to its bounds shrinks Δβ towards 0, which keeps the logit step within its limit.
    level = np.clip(coefficients[1:] + level_step, -MAX_INTERCEPT, MAX_INTERCEPT)
    return np.concatenate(([slope], level)) - coefficients


class AcceptanceEstimator:
    """Holds the coefficients, collects statistics and refits every ``refit_interval`` rounds.

    ``coefficients`` [1+K] f32 (slope, then intercepts) is replaced, never written to; ``version`` counts
    the replacements. ``num_rejected`` counts statistics that were not finite,
    ``num_outdated`` those whose coefficients are too old to be corrected for.
    """

    def __init__(self, num_positions: int, *, refit_interval: int = 100) -> None:
        if num_positions < 1 or refit_interval < 1:
            raise ValueError(
                f"num_positions={num_positions}, refit_interval={refit_interval}: both must be ≥ 1"
            )
        self.num_positions = num_positions
        self.refit_interval = refit_interval
        self.coefficients = cold_coefficients(num_positions)
        self.version = 0
        self.num_refits = 0
        self.num_rejected = 0
        self.num_outdated = 0
        self._rounds = 0
        self._statistics: Float64 = np.zeros((num_positions, 6))
        self._history: dict[int, Float64] = {0: self.coefficients.astype(np.float64)}

    def observe(self, statistics: Float64, version: int) -> None:
        """Add ``statistics`` [K,6] f64 (a, b, c, g0, g1, n per position) taken at ``version``.

        Those of an older version are moved to the current coefficients first: g ← g − HΔ, Δ the change
        since. Raises ValueError for a wrong shape or a version that does not exist yet.
        """
        if statistics.shape != self._statistics.shape:
            raise ValueError(
                f"statistics of shape {statistics.shape}; expected {self._statistics.shape}"
            )
        if version > self.version:
            raise ValueError(f"statistics of version {version}, but the newest is {self.version}")
        # The total is finite only if no term is NaN or infinite: one cheap pass.
        if not math.isfinite(np.add.reduce(statistics, axis=None)):
            self.num_rejected += 1
            logger.warning("rejected statistics that are not finite (%d so far)", self.num_rejected)
            return
        if version != self.version:
            base = self._history.get(version)
            if base is None:
                self.num_outdated += 1
                logger.warning("dropped statistics of version %d (now %d)", version, self.version)
                return
            change = self._history[self.version] - base
            a, b, c = statistics[:, 0], statistics[:, 1], statistics[:, 2]
            statistics = statistics.copy()
            statistics[:, 3] -= a * change[0] + b * change[1:]
            statistics[:, 4] -= b * change[0] + c * change[1:]
        self._statistics += statistics

    @property
    def is_refit_due(self) -> bool:
        """True if the next ``tick`` refits."""
        return self._rounds + 1 >= self.refit_interval

    def tick(self) -> bool:
        """Count a round; refit after every ``refit_interval`` of them. True if the coefficients changed."""
        if not self.is_refit_due:
            self._rounds += 1
            return False
        self._rounds = 0
        return self.refit()

    def refit(self) -> bool:
        """Take one step from the collected statistics and clear them; False without any label."""
        if not self._statistics[:, 5].any():
            return False
        before = self._history[self.version]
        after = (before + _bounded_step(self._statistics, before)).astype(np.float32)
        self._statistics = np.zeros_like(self._statistics)
        self._publish(after, self.version + 1)
        self.num_refits += 1
        return True

    def _publish(self, coefficients: NDArray[np.float32], version: int) -> None:
        # Rounded to f32 before it is kept, so that Δ refers to what the scores were computed with.
        self.coefficients = coefficients
        self.version = version
        self._history[version] = coefficients.astype(np.float64)
        self._history.pop(version - _KEPT_VERSIONS, None)

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs, as JSON values; statistics in flight are not part of it."""
        return {
            "coefficients": [float(value) for value in self.coefficients],
            "version": self.version,
            "num_refits": self.num_refits,
            "num_rejected": self.num_rejected,
            "num_outdated": self.num_outdated,
            "rounds": self._rounds,
            "statistics": self._statistics.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``; ValueError if it is of another K, not finite or out of bounds."""
        coefficients = np.asarray(state["coefficients"], np.float32)
        statistics = np.asarray(state["statistics"], np.float64)
        if (
            coefficients.shape != self.coefficients.shape
            or statistics.shape != self._statistics.shape
        ):
            raise ValueError(
                f"state of {coefficients.size - 1} draft positions; this estimator has"
                f" {self.num_positions}"
            )
        is_inside = 0.0 <= coefficients[0] <= MAX_SLOPE and bool(
            (np.abs(coefficients[1:]) <= MAX_INTERCEPT).all()
        )
        if not is_inside or not np.isfinite(statistics).all():
            raise ValueError(f"state holds impossible coefficients {coefficients.tolist()}")
        self._statistics = statistics
        self._history = {}
        self._publish(coefficients, int(state["version"]))
        self.num_refits = int(state["num_refits"])
        self.num_rejected = int(state["num_rejected"])
        self.num_outdated = int(state["num_outdated"])
        self._rounds = int(state["rounds"])
