"""Streaming calibration bins: the error is that of the drafts themselves, whenever they came."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from trtllm_av.runtime.calibration import CalibrationBins


def drafts(count: int, shift: float, seed: int = 0) -> tuple[NDArray[np.float32], ...]:
    """Confidences, and labels whose chance is higher by ``shift``."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(3.0, 2.0, count).astype(np.float32)
    chance = np.clip(confidence + shift, 0, 1)
    return confidence, (rng.random(count) < chance).astype(np.float32)


def exact_error(confidence: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    parts = np.array_split(np.argsort(confidence, kind="stable"), 15)
    gaps = [abs(float(confidence[part].mean() - labels[part].mean())) * part.size for part in parts]
    return sum(gaps) / confidence.size


@pytest.mark.parametrize("shift", [0.0, 0.07, -0.2])
def test_error_is_that_of_sorted_drafts(shift: float) -> None:
    """Guards against bins that lose drafts, or mix a bin's confidences with another's labels."""
    confidence, labels = drafts(40_000, shift)
    bins = CalibrationBins()
    for part in np.array_split(np.arange(confidence.size), 100):
        bins.add(confidence[part], labels[part])
    assert bins.num_labels == confidence.size
    assert bins.error() == pytest.approx(exact_error(confidence, labels), abs=2e-3)


def test_bins_hold_equal_mass_and_rise() -> None:
    """Guards against bins of equal width, most of which would be empty or noise."""
    confidence, labels = drafts(15_000, 0.0)
    bins = CalibrationBins()
    bins.add(confidence, labels)
    diagram = bins.diagram()
    assert len(diagram) == 15
    assert all(abs(one.count - 1000) < 150 for one in diagram)
    assert all(a.confidence < b.confidence for a, b in pairwise(diagram))


def test_unlabelled_drafts_count_nowhere() -> None:
    """Guards against trimmed drafts that count as rejected."""
    bins = CalibrationBins()
    bins.add(np.full((2, 3), 0.5, np.float32), np.full((2, 3), np.nan, np.float32))
    assert (bins.num_labels, bins.error(), bins.diagram()) == (0, None, [])
    bins.add(np.array([[1.0, 0.25]], np.float32), np.array([[1.0, np.nan]], np.float32))
    assert bins.num_labels == 1
    assert bins.error() == 0.0


def test_difference_starts_a_new_account() -> None:
    """Guards against a report that goes on showing the labels of the one before."""
    bins = CalibrationBins()
    bins.add(*drafts(5000, 0.3))
    before = bins.sums.copy()
    bins.add(*drafts(5000, 0.0, seed=1))
    error = bins.since(before).error()
    assert bins.since(before).num_labels == 5000
    assert error is not None and error < 0.03 < (bins.error() or 0.0)
