"""How good predictions were: calibration error, AUC and log-loss, with intervals over requests.

The calibration error has 15 bins of equal mass: Σ_b n_b/n · |mean prediction − mean label|. Intervals are
95 % bootstrap intervals over whole requests, because drafts of one answer are not independent; noise
makes a bootstrapped calibration error larger on average, and intervals are moved back by that much.

Invariants: ties in a prediction count half in the AUC; a bin never splits by label; equal seeds give
equal intervals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 15
_REPLICAS = 200
_AUC_BINS = 128
_SMALLEST = 1e-6  # float32 holds 1 − this

Floats = NDArray[np.floating[Any]]
Float64 = NDArray[np.float64]
Ints = NDArray[np.int64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of n labelled drafts; ``*_low`` and ``*_high`` bound the 95 % interval."""

    n: int
    auc: float
    auc_low: float
    auc_high: float
    log_loss: float
    log_loss_low: float
    log_loss_high: float
    ece: float
    ece_low: float
    ece_high: float

    def to_dict(self) -> dict[str, float]:
        return {
            name: value if name == "n" else round(value, 5) for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Ranking:
    """Predictions [N] in rising order: ``order``; ``first`` [N], the rank of the first of equal ones."""

    order: Ints
    first: Ints

    @classmethod
    def of(cls, chance: Floats) -> Ranking:
        order = np.argsort(chance, kind="stable")
        ordered = chance[order]
        starts = np.append(True, ordered[1:] > ordered[:-1])
        return cls(order, np.flatnonzero(starts)[np.cumsum(starts) - 1])

    def bins(self, num_bins: int) -> Ints:
        """[N] int64: the bin of equal mass of each prediction; equal predictions share a bin."""
        where = np.empty_like(self.order)
        where[self.order] = self.first * num_bins // self.order.size
        return where


def calibration_error(chance: Floats, label: Floats, num_bins: int = BINS) -> float:
    """The expected calibration error of ``chance`` [N] for ``label`` [N]."""
    gaps = np.bincount(Ranking.of(chance).bins(num_bins), chance - label, num_bins)
    return float(np.abs(gaps).sum() / chance.size)


def auc(chance: Floats, label: Floats) -> float:
    """The chance that an accepted draft was predicted above a rejected one; NaN if one kind is missing."""
    return _auc(Ranking.of(chance), label)


def _auc(ranking: Ranking, label: Floats) -> float:
    edges = np.append(np.unique(ranking.first), label.size)
    positive = np.add.reduceat(label[ranking.order], edges[:-1])
    return _auc_of_counts(positive[None], (np.diff(edges) - positive)[None])[0]


def _auc_of_counts(positive: Float64, negative: Float64) -> list[float]:
    """AUC of each row of counts [B, bins], bins in rising order of the prediction."""
    below = np.cumsum(negative, axis=1) - negative / 2
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    with np.errstate(invalid="ignore"):
        values: list[float] = ((positive * below).sum(axis=1) / pairs).tolist()
    return values


def log_losses(chance: Floats, label: Floats) -> Float64:
    """[N], −log of the probability given to what happened."""
    p = np.clip(chance, _SMALLEST, 1 - _SMALLEST)
    return np.asarray(-(label * np.log(p) + (1 - label) * np.log(1 - p)), np.float64)


def score_predictions(chance: Floats, label: Floats, request: Ints, *, seed: int = 0) -> Score:
    """Score predictions [N] against labels [N]; ``request`` [N] says which belong together."""
    _, group = np.unique(request, return_inverse=True)
    num_groups = int(group.max()) + 1
    losses = log_losses(chance, label)
    ranking = Ranking.of(chance)
    where = ranking.bins(BINS)
    gaps = _sums(group * BINS + where, chance - label, num_groups, BINS)
    fine = ranking.bins(_AUC_BINS)
    cell = group * _AUC_BINS + fine
    positive = _sums(cell, label, num_groups, _AUC_BINS)
    count = _sums(cell, np.ones(label.size), num_groups, _AUC_BINS)
    loss = np.bincount(group, losses, num_groups)
    size = np.bincount(group, minlength=num_groups).astype(np.float64)

    rng = np.random.default_rng(seed)
    weights = rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), _REPLICAS).astype(
        np.float64
    )
    sizes = weights @ size
    errors = np.abs(weights @ gaps).sum(axis=1) / sizes
    areas = np.array(_auc_of_counts(weights @ positive, weights @ (count - positive)))
    means = (weights @ loss) / sizes
    error, area = float(np.abs(gaps.sum(axis=0)).sum() / label.size), _auc(ranking, label)
    coarse = _auc_of_counts(positive.sum(0)[None], (count - positive).sum(0)[None])[0]
    mean_loss = float(losses.mean())
    return Score(
        int(label.size),
        area,
        *_interval(areas - coarse + area),
        mean_loss,
        *_interval(means),
        error,
        *_interval(errors - errors.mean() + error),
    )


def _sums(cell: Ints, values: Float64, num_groups: int, num_bins: int) -> Float64:
    """[groups, bins]"""
    sums = np.bincount(cell, values, num_groups * num_bins).astype(np.float64)
    return sums.reshape(num_groups, num_bins)


def _interval(values: Float64) -> Interval:
    low, high = (
        np.nanquantile(values, [0.025, 0.975]) if np.isfinite(values).any() else (np.nan,) * 2
    )
    return float(max(low, 0.0)), float(high)
