"""The acceptance estimator: p_i = σ(Σ_j ω_j·f_ij + β_i), fitted online from per-position sums.

F shared slopes ω (one, unless more features are asked for), one intercept β_i per draft position. Each
refit is one Newton step on the log-likelihood (iteratively reweighted least squares); the Hessian is an
arrowhead, since intercepts meet only through the slopes, so the solve is O(K) and one F×F system. The
curvature weights in the statistics are floored at .125, half of the bound of 1/4 on σ' (Böhning and
Lindsay, 1988): the fixed point stays, and a saturated start cannot throw the step far away.

Invariants: statistics that are not finite never reach the fit; an intercept without labels keeps its
value bit for bit; the first slope stays in [0, 4], others in [−4, 4], and every β in [−10, 10]; no refit
moves a logit by more than 2 over the features seen (the rule is at ``_bounded_step``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.plugins.reference import num_statistics

logger = logging.getLogger(__name__)

COLD_SLOPE = 0.5  # median over five public model pairs
COLD_INTERCEPT = -0.2
MAX_SLOPE = 4.0
MAX_INTERCEPT = 10.0
MAX_LOGIT_STEP = 2.0

_SPREAD = 2.0  # standard deviations around the mean feature that count as seen
_PRIOR = 1e-3
_DAMPING_LABELS = 50.0
_FIRST_INTERVALS = (10, 20, 30, 40)  # rounds before each of the first refits
_KEPT_VERSIONS = 8  # coefficient sets that late statistics may still refer to

Float64 = NDArray[np.float64]


def cold_coefficients(
    num_positions: int,
    num_features: int = 1,
    *,
    slope: float = COLD_SLOPE,
    intercept: float = COLD_INTERCEPT,
) -> NDArray[np.float32]:
    """[F+K] f32 before the first refit: the first slope, 0 for the others, then the intercepts."""
    coefficients = np.full(num_features + num_positions, intercept, np.float32)
    coefficients[0] = slope
    coefficients[1:num_features] = 0.0
    return coefficients


class _Sums:
    """Named views of ``statistics`` [K, n(F)]: ``a[i][j]``, ``b[i]``, ``g0[i]``, ``c``, ``g1``, ``n``, each [K]."""

    def __init__(self, statistics: Float64, num_features: int) -> None:
        columns = list(statistics.T)
        slots = range(num_features)
        upper = {(i, j): columns.pop(0) for i in slots for j in slots if i <= j}
        self.a = [[upper[min(i, j), max(i, j)] for j in slots] for i in slots]
        self.b = [columns.pop(0) for _ in slots]
        self.c = columns.pop(0)
        self.g0 = [columns.pop(0) for _ in slots]
        self.g1, self.n = columns

    def move(self, change: Float64) -> None:
        """g ← g − HΔ in place, Δ [F+K] the change of the coefficients."""
        num_features = len(self.b)
        level = change[num_features:]
        for i, g0 in enumerate(self.g0):
            g0 -= sum((self.a[i][j] * change[j] for j in range(num_features)), self.b[i] * level)
        self.g1 -= sum((self.b[j] * change[j] for j in range(num_features)), self.c * level)


def _bounded_step(statistics: Float64, coefficients: Float64, num_features: int = 1) -> Float64:
    """The damped and bounded Newton step [F+K] f64, for ``statistics`` [K,n(F)] at ``coefficients`` [F+K].

    Along a direction u of the slopes the features seen at position k are u·m_k ± 2·s_k(u), where
    m_k = b_k/c_k and s_k is their curvature-weighted standard deviation. The slopes are limited first, to
    |Δω|·(|u·m_k| + 2·s_k) ≤ 2 at every position, which also bounds those whose intercept rests. Each
    intercept is then solved for the slopes that are taken, and cut to |Δω·m_k + Δβ_k| + |Δω|·2·s_k ≤ 2.
    """
    sums, slots = _Sums(statistics, num_features), range(num_features)
    c = sums.c + _PRIOR  # so that a position without labels has mean, spread and step exactly 0
    mean = [b / c for b in sums.b]

    def spread(u: Float64) -> Float64:
        """[K]: 2·s_k(u)."""
        variance = sum(
            u[i] * (sums.a[i][j] / c - mean[i] * mean[j]) * u[j] for i in slots for j in slots
        )
        return np.asarray(_SPREAD * np.sqrt(np.maximum(variance, 0.0)), np.float64)

    slope_step = _shared_step(sums, mean, coefficients[:num_features])
    size, direction = _polar(slope_step)
    reach = np.abs(_dot(direction, mean)) + spread(direction)
    size = min(size, MAX_LOGIT_STEP / float(np.max(reach, initial=1e-6)))
    # Clipped again for rounding only: shortening a step from within the bounds to within them leaves none.
    low, high = _slope_bounds(num_features)
    slopes = np.clip(coefficients[:num_features] + size * direction, low, high)
    slope_step = slopes - coefficients[:num_features]
    size, direction = _polar(slope_step)

    level_step = (sums.g1 - _dot(slope_step, sums.b)) / c * (sums.n / (sums.n + _DAMPING_LABELS))
    room = MAX_LOGIT_STEP - size * spread(direction)
    shift = _dot(slope_step, mean)
    level_step = np.clip(level_step + shift, -room, room) - shift
    # Cutting β to its bounds shrinks Δβ towards 0, which keeps the logit step within its limit.
    level = np.clip(coefficients[num_features:] + level_step, -MAX_INTERCEPT, MAX_INTERCEPT)
    return np.asarray(np.concatenate((slopes, level)) - coefficients, np.float64)


def _slope_bounds(num_features: int) -> tuple[Float64, Float64]:
    """Least and greatest slopes, [F] each."""
    low, high = np.full(num_features, -MAX_SLOPE), np.full(num_features, MAX_SLOPE)
    low[0] = 0.0
    return low, high


def _shared_step(sums: _Sums, mean: list[Float64], slopes: Float64) -> Float64:
    """[F] f64: the damped step from ``slopes`` that stays within their bounds, the intercepts eliminated.

    A slope that would leave its bounds stops there, and the others are solved again with it held. Cutting
    each on its own would let a slope go on compensating, refit after refit, for one that cannot move.
    """
    slots = range(len(mean))
    gradient = np.array([float(sums.g0[i].sum()) - float((mean[i] * sums.g1).sum()) for i in slots])
    matrix = np.array(
        [
            [
                float(sums.a[i][j].sum()) + _PRIOR * (i == j) - float((sums.b[j] * mean[i]).sum())
                for j in slots
            ]
            for i in slots
        ]
    )
    total = float(sums.n.sum())
    damping = total / (total + _DAMPING_LABELS)
    low, high = _slope_bounds(len(mean))
    step, is_free = np.zeros(len(mean)), np.ones(len(mean), np.bool_)
    # Features may say the same: the prior on the diagonal is far above rounding.
    while is_free.any():
        rest = (damping * gradient - matrix @ np.where(is_free, 0.0, step))[is_free]
        step[is_free] = np.linalg.solve(matrix[np.ix_(is_free, is_free)], rest)
        inside = np.clip(slopes + step, low, high) - slopes
        leaves = is_free & ((slopes + step < low) | (slopes + step > high))
        if not leaves.any():
            break
        step[leaves] = inside[leaves]
        is_free &= ~leaves
    return step


def _polar(vector: Float64) -> tuple[float, Float64]:
    """Length and direction; the direction of 0 is 0."""
    size = math.hypot(*vector)
    return size, vector / size if size else vector


def _dot(weights: Float64, rows: list[Float64]) -> Float64:
    """[K]: Σ weights[i]·rows[i]."""
    total = weights[0] * rows[0]
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        total = total + weight * row
    return np.asarray(total, np.float64)


class AcceptanceEstimator:
    """Holds the coefficients, collects statistics and refits every ``refit_interval`` rounds.

    The first refits come at rounds 10, 30, 60 and 100.

    ``coefficients`` [F+K] f32 (slopes, then intercepts) is replaced, never written to; ``version`` counts
    the replacements. ``num_rejected`` counts statistics that were not finite,
    ``num_outdated`` those whose coefficients are too old to be corrected for. ``discount`` is the weight
    that labels keep at a refit: 0 forgets them, 1 would never forget. ``cold`` [F+K] replaces the usual start.
    ``label_counts`` [K] f64 counts the labels of each position since the start; it is replaced, never
    written to.
    """

    def __init__(
        self,
        num_positions: int,
        *,
        refit_interval: int = 100,
        num_features: int = 1,
        discount: float = 0.0,
        cold: NDArray[np.float32] | None = None,
    ) -> None:
        if num_positions < 1 or refit_interval < 1 or num_features < 1:
            raise ValueError(
                f"num_positions={num_positions}, refit_interval={refit_interval}, "
                f"num_features={num_features}: all must be ≥ 1"
            )
        if not 0.0 <= discount < 1.0:
            raise ValueError(f"discount={discount} must be in [0, 1)")
        self.num_positions = num_positions
        self.num_features = num_features
        self.refit_interval = refit_interval
        self.discount = discount
        self.coefficients = cold_coefficients(num_positions, num_features) if cold is None else cold
        self.version = 0
        self.num_refits = 0
        self.num_rejected = 0
        self.num_outdated = 0
        self._rounds = 0
        self._has_new_labels = False
        self.label_counts: Float64 = np.zeros(num_positions)
        self._statistics: Float64 = np.zeros((num_positions, num_statistics(num_features)))
        self._history: dict[int, Float64] = {0: self.coefficients.astype(np.float64)}

    def observe(self, statistics: Float64, version: int) -> None:
        """Add ``statistics`` [K,n(F)] f64 (a, b, c, g0, g1, n per position) taken at ``version``.

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
            statistics = statistics.copy()
            _Sums(statistics, self.num_features).move(self._history[self.version] - base)
        self._statistics += statistics
        self.label_counts = self.label_counts + statistics[:, -1]
        self._has_new_labels = self._has_new_labels or bool(statistics[:, -1].any())

    @property
    def is_refit_due(self) -> bool:
        """True if the next ``tick`` refits."""
        interval = self.refit_interval
        if self.num_refits < len(_FIRST_INTERVALS):  # a cold start is far from most pairs of models
            interval = min(interval, _FIRST_INTERVALS[self.num_refits])
        return self._rounds + 1 >= interval

    def tick(self) -> bool:
        """Count a round and refit where one is due. True if the coefficients changed."""
        if not self.is_refit_due:
            self._rounds += 1
            return False
        self._rounds = 0
        return self.refit()

    def refit(self) -> bool:
        """Take one step from the collected statistics, then discount them; False without a new label."""
        if not self._has_new_labels:
            return False
        before = self._history[self.version]
        step = _bounded_step(self._statistics, before, self.num_features)
        after = (before + step).astype(np.float32)
        self._publish(after, self.version + 1)
        self._forget(self._history[self.version] - before)
        self.num_refits += 1
        return True

    def _forget(self, change: Float64) -> None:
        """Clear the statistics, or keep γ of them: g ← γ(g − HΔ), H ← γH."""
        self._has_new_labels = False
        if not self.discount:
            self._statistics = np.zeros_like(self._statistics)
            return
        _Sums(self._statistics, self.num_features).move(change)
        self._statistics *= self.discount

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
            "has_new_labels": self._has_new_labels,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``; ValueError if it is of another K or F, not finite or out of bounds."""
        coefficients = np.asarray(state["coefficients"], np.float32)
        statistics = np.asarray(state["statistics"], np.float64)
        if statistics.shape != self._statistics.shape:
            raise ValueError(
                f"state of {len(statistics)} draft positions; this estimator has {self.num_positions} "
                f"with {self.num_features} features"
            )
        self.check(coefficients)
        if not np.isfinite(statistics).all():
            raise ValueError("state holds statistics that are not finite")
        self._statistics = statistics
        self._has_new_labels = bool(state["has_new_labels"])
        self._history = {}
        self._publish(coefficients, int(state["version"]))
        self.num_refits = int(state["num_refits"])
        self.num_rejected = int(state["num_rejected"])
        self.num_outdated = int(state["num_outdated"])
        self._rounds = int(state["rounds"])

    def check(self, coefficients: NDArray[np.float32]) -> None:
        """ValueError unless ``coefficients`` [F+K] are such as a refit could have left."""
        slopes = coefficients[: self.num_features]
        intercepts = coefficients[self.num_features :]
        if (
            coefficients.shape != self.coefficients.shape
            or not (np.abs(slopes) <= MAX_SLOPE).all()
            or slopes[0] < 0.0
            or not (np.abs(intercepts) <= MAX_INTERCEPT).all()
        ):
            raise ValueError(f"impossible coefficients {coefficients.tolist()}")

    def restore(self, coefficients: NDArray[np.float32]) -> None:
        """Start from ``coefficients`` [F+K] of an earlier run; ValueError if they are impossible."""
        self.check(coefficients)
        self._publish(coefficients, self.version + 1)
