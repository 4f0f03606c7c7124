"""Figures of a confidence: what is published of a trained head must be what drafting shows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.drafter_training.calibration import (
    Judgements,
    area_under_curve,
    calibration_error,
)


def test_area_under_curve_counts_pairs() -> None:
    """Weights, soft labels or ties left out of the ranking."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(0, 6, (40,), generator=generator).double()
    label = torch.rand(40, generator=generator, dtype=torch.float64)
    weight = torch.rand(40, generator=generator, dtype=torch.float64)
    won = (score[:, None] > score).double() + 0.5 * (score[:, None] == score)
    pairs = (weight * label)[:, None] * (weight * (1 - label))
    expected = float((pairs * won).sum() / pairs.sum())
    assert area_under_curve(score, label, weight) == pytest.approx(expected)


def test_calibration_error_sees_opposite_errors() -> None:
    """One bin for all, in which too high and too low cancel; bins of equal count instead of weight."""
    probability = torch.tensor([0.2, 0.2, 0.8, 0.8]).double().repeat_interleave(100)
    label = torch.tensor([0.3, 0.3, 0.7, 0.7]).double().repeat_interleave(100)
    weight = torch.ones(400, dtype=torch.float64)
    assert calibration_error(probability, label, weight) == pytest.approx(0.1, abs=0.02)
    weight[200:] = 1e-9  # hardly ever reached
    label[200:] = 0.0
    assert calibration_error(probability, label, weight) == pytest.approx(0.1, abs=1e-3)


def test_judgements_by_position() -> None:
    """Positions mixed up, or positions that no draft reaches counted as drafts."""
    judgements = Judgements(2)
    assert judgements.report() is None
    logit = torch.tensor([[3.0, -3.0, 0.0]])
    label, weight = logit.sigmoid(), torch.tensor([[1.0, 1.0, 0.0]])
    judgements.add(0, logit, -logit, label, weight)
    judgements.add(1, -logit, logit, label, weight)
    report = judgements.report()
    assert report is not None
    assert report.ece[0] == pytest.approx(0, abs=1e-6) and report.ece[1] > 0.8
    assert report.auc[0] > 0.9 > 0.1 > report.auc[1]
    assert report.auc_top == pytest.approx([report.auc[1], report.auc[0]])
    assert report.not_first["ece"] == pytest.approx(report.ece[1])
    assert report.pooled["auc"] == pytest.approx(0.5)
