"""How far confidences are from what came of the drafts, from sums that never grow.

The expected calibration error (Guo et al., 2017) over bins of equal mass: Σ_b n_b/n · |mean confidence −
mean label|. Labels arrive in rounds, so they are summed in fine bins of equal width, and these are joined
to bins of about equal mass when somebody asks.

Invariants: adding costs the same whatever was added before; an unlabelled draft (NaN) counts nowhere; no
draft is split between bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 15
_FINE = 512
_BELOW = np.float32(_FINE - 0.01)  # puts confidence 1 into the last bin

Floats = NDArray[np.floating[Any]]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """``count`` labelled drafts with about the same confidence."""

    confidence: float
    acceptance: float
    count: int


class CalibrationBins:
    """Sums per fine bin: ``sums`` [3, 512] f64 are counts, confidences and labels."""

    def __init__(self, sums: Float64 | None = None) -> None:
        self.sums: Float64 = np.zeros((3, _FINE)) if sums is None else sums

    def add(self, confidence: Floats, labels: Floats) -> None:
        """Count drafts: ``confidence`` and ``labels`` of one shape, NaN where a draft has none."""
        y = labels.ravel()
        known = (y == y).nonzero()[0]  # NaN differs from itself
        p, y = confidence.ravel().take(known), y.take(known)
        fine = (p * _BELOW).astype(np.int64)
        self.sums[0] += np.bincount(fine, minlength=_FINE)
        self.sums[1] += np.bincount(fine, p, _FINE)
        self.sums[2] += np.bincount(fine, y, _FINE)

    def since(self, earlier: Float64) -> CalibrationBins:
        """What was added after ``sums`` had been ``earlier``."""
        return CalibrationBins(self.sums - earlier)

    @property
    def num_labels(self) -> int:
        return int(self.sums[0].sum())

    def diagram(self, num_bins: int = NUM_BINS) -> list[CalibrationBin]:
        """At most ``num_bins`` bins of about equal mass, in rising confidence."""
        counts = self.sums[0]
        total = counts.sum()
        if total == 0:
            return []
        # A fine bin belongs where its middle draft stands.
        middle = (np.cumsum(counts) - counts / 2) / total
        group = np.minimum((middle * num_bins).astype(np.int64), num_bins - 1)
        n, p, y = (np.bincount(group, row, num_bins) for row in self.sums)
        return [
            CalibrationBin(float(p[i] / n[i]), float(y[i] / n[i]), int(n[i]))
            for i in np.flatnonzero(n)
        ]

    def error(self, num_bins: int = NUM_BINS) -> float | None:
        """The expected calibration error; None without labels."""
        bins = self.diagram(num_bins)
        if not bins:
            return None
        gaps = sum(one.count * abs(one.confidence - one.acceptance) for one in bins)
        return gaps / sum(one.count for one in bins)
