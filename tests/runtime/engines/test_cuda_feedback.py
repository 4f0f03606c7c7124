"""What device rounds teach when ten of them are checked together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.engines.cuda_support import NUM_SLOTS, K, controller
from trtllm_av.plugins import reference
from trtllm_av.runtime.engines.cuda.feedback import LateFeedback
from trtllm_av.runtime.feedback import accepted_moments
from trtllm_av.runtime.step import RoundPlan

ROUNDS = 10


def results_of(generator: np.random.Generator, num_rows: int) -> dict[str, Any]:
    """A round's results: lengths drafted ≥ verified ≥ accepted, and what is emitted."""
    drafted = generator.integers(1, K + 1, num_rows)
    verified = generator.integers(0, drafted + 1)
    accepted = generator.integers(0, verified + 1)
    is_overlap = (accepted == verified) & (verified < drafted)
    return {
        "statistics": np.zeros((K, 6)),
        "lens": np.stack([drafted, verified, accepted, accepted + 1]).astype(np.int32),
        "confidence": generator.random((num_rows, K), np.float32),
        "features": np.zeros((num_rows, K, 1), np.float32),
        "overlap": np.where(is_overlap, generator.random(num_rows), np.nan).astype(np.float32),
    }


def test_ten_rounds_are_checked_as_they_would_be_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against: a round's lengths beside another one's confidences, and rows that count although ended."""
    generator = np.random.default_rng(0)
    learner = controller("adaptive")
    assert learner.depth is not None and learner.feedback is not None
    checks: list[tuple[float, float, float]] = []
    monkeypatch.setattr(learner.depth, "observe", lambda *sums: checks.append(sums))
    late = LateFeedback(learner)
    nothing = torch.zeros(0, dtype=torch.int32)
    plan = RoundPlan(nothing, nothing, 0, torch.zeros(1 + K), learner.estimator.version)
    expected, num_labels, label_sum = np.zeros((2, 3)), 0, 0.0
    for n in range(2 * ROUNDS):
        assert len(checks) == n // ROUNDS
        num_rows = 1 + n % NUM_SLOTS
        results = results_of(generator, num_rows)
        is_counted = generator.random(num_rows) < 0.8
        trainable = np.where(is_counted, generator.integers(0, K + 1, num_rows), 0).astype(np.int32)
        late.observe(np.arange(num_rows), plan, results, trainable, is_counted)
        drafted, verified, accepted, _ = results["lens"]
        is_checked = trainable > 0
        moments = accepted_moments(results["confidence"], verified * is_checked)
        expected[n // ROUNDS] += (*moments, accepted @ is_checked)
        labels = reference.label_drafts(
            drafted, verified, accepted, trainable, results["overlap"], num_positions=K
        )
        num_labels += int(np.isfinite(labels).sum())
        label_sum += float(np.nansum(labels))
    assert checks == [pytest.approx(tuple(sums), rel=1e-6) for sums in expected]
    assert learner.feedback.actual_accepted == expected[:, 2].sum() > 0
    assert learner.feedback.expected_accepted == pytest.approx(expected[:, 0].sum(), rel=1e-6)
    assert learner.feedback.calibration.num_labels == num_labels > 0
    assert learner.feedback.calibration.sums[2].sum() == pytest.approx(label_sum, rel=1e-6)
