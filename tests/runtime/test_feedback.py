"""The buffer between finished rounds and the estimator: what goes in comes out, in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.closed_loop import COST_PROFILE
from trtllm_av.plugins import reference
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import MIN_PROBE_PERIOD, DepthController
from trtllm_av.runtime.estimator import AcceptanceEstimator
from trtllm_av.runtime.feedback import RoundFeedback, accepted_moments

K = 3


def controller() -> DepthController:
    return DepthController(CostModel.from_table(COST_PROFILE, num_positions=K))


def random_round(rng: np.random.Generator, rows: int) -> list[Any]:
    features = rng.normal(2.2, 1.8, (rows, K, 1)).astype(np.float32)
    confidence = rng.random((rows, K)).astype(np.float32)
    drafted = rng.integers(0, K + 1, rows)
    verified = rng.integers(0, drafted + 1)
    accepted = rng.integers(0, verified + 1)
    trainable = rng.integers(0, K + 1, rows)
    overlap = rng.random(rows).astype(np.float32)
    lens = [values.astype(np.int32) for values in (drafted, verified, accepted, trainable)]
    return [features, confidence, *lens, overlap]


def test_a_refit_sees_exactly_the_finished_rounds() -> None:
    """Guards against rounds lost, counted twice or labelled after the refit they belong in front of."""
    rng = np.random.default_rng(0)
    estimator = AcceptanceEstimator(K, refit_interval=13)  # no multiple of the buffer's rounds
    feedback = RoundFeedback(estimator, controller(), 6)
    expected = AcceptanceEstimator(K, refit_interval=13)
    for number in range(40):
        if number % 3:  # rounds without drafts count too
            arrays = random_round(rng, int(rng.integers(1, 7)))
            feedback.add(*map(torch.from_numpy, arrays))
            features, confidence, drafted, verified, accepted, trainable, overlap = arrays
            labels = reference.label_drafts(
                drafted,
                verified,
                accepted,
                trainable,
                overlap,
                num_positions=K,
                confidence=confidence,
            )
            statistics = reference.accumulate_statistics(features, labels, expected.coefficients)
            expected.observe(statistics, expected.version)
        assert feedback.end_round() == expected.tick()
        np.testing.assert_allclose(estimator.coefficients, expected.coefficients, rtol=1e-6)
    assert estimator.num_refits == 3


def test_the_buffer_owns_its_rounds() -> None:
    """Guards against tensors that the engine overwrites in the next round."""
    rng = np.random.default_rng(1)
    results = []
    for overwrite in (False, True):
        estimator = AcceptanceEstimator(K)
        feedback = RoundFeedback(estimator, controller(), 6)
        arrays = random_round(np.random.default_rng(2), 6)
        feedback.add(*map(torch.from_numpy, arrays))
        if overwrite:
            for array in arrays:
                array[:] = rng.integers(0, 2, array.shape)
        feedback.flush()
        estimator.refit()
        results.append(estimator.coefficients)
    np.testing.assert_array_equal(*results)


def test_moments_match_enumeration() -> None:
    """Guards against an interval too narrow (rows summed as if positions were independent) or too wide."""
    confidence = np.array([[0.9, 0.5, 0.4], [0.3, 0.8, 0.6], [0.7, 0.7, 0.7]])
    verified = np.array([3, 2, 0], np.int32)
    mean = variance = 0.0
    for row, count in zip(confidence, verified, strict=True):
        reach = np.concatenate([[1.0], np.cumprod(row[:count]), [0.0]])
        chance = reach[:-1] - reach[1:]
        lens = np.arange(count + 1)
        mean += chance @ lens
        variance += chance @ lens**2 - (chance @ lens) ** 2
    np.testing.assert_allclose(accepted_moments(confidence, verified), [mean, variance], rtol=1e-12)


@pytest.mark.parametrize(("accepted", "is_alarm"), [(2, False), (0, True)])
def test_broken_promises_reach_the_probe_schedule(accepted: int, is_alarm: bool) -> None:
    """Guards against a workload shift that only the next refit notices."""
    probes = controller()
    probes.probe_period = 64
    feedback = RoundFeedback(AcceptanceEstimator(K), probes, 8)
    rows = 8
    lens = torch.full((rows,), 2, dtype=torch.int32)
    confidence = torch.full((rows, K), 0.95)
    features = torch.full((rows, K, 1), 3.0)
    for _ in range(10):
        taken = torch.full((rows,), accepted, dtype=torch.int32)
        taken[0] = 1
        feedback.add(features, confidence, lens, lens, taken, lens, torch.zeros(rows))
        feedback.end_round()
    assert (probes.probe_period == MIN_PROBE_PERIOD) == is_alarm
    assert feedback.actual_accepted == 10 * (7 * accepted + 1)
    assert feedback.expected_accepted == pytest.approx(10 * 8 * (0.95 + 0.95**2), rel=1e-5)


def test_rows_that_must_not_train_are_not_checked_either() -> None:
    """Guards against case 10: constrained rows are rejected for reasons the estimator must not learn."""
    estimator = AcceptanceEstimator(K)
    probes = controller()
    probes.probe_period = 64
    feedback = RoundFeedback(estimator, probes, 8)
    lens = torch.full((8,), K, dtype=torch.int32)
    none = torch.zeros(8, dtype=torch.int32)
    feedback.add(
        torch.ones(8, K, 1), torch.full((8, K), 0.9), lens, lens, none, none, torch.zeros(8)
    )
    feedback.flush()
    assert not estimator.refit()
    assert feedback.expected_accepted == feedback.actual_accepted == 0
    assert probes.probe_period == 64


def test_soft_labels_train_on_the_overlap() -> None:
    """Guards against a label of 1 or 0 where Σ min(p, q) is known, and against one where nothing was judged."""
    overlaps = torch.tensor([[0.7, 0.6, 0.5], [0.4, 0.3, 0.2]])
    lens = [torch.tensor(values, dtype=torch.int32) for values in ([3, 3], [2, 3], [2, 1], [3, 1])]
    features = torch.full((2, K, 1), 2.0)
    estimator = AcceptanceEstimator(K)
    feedback = RoundFeedback(estimator, controller(), 2, has_soft_labels=True)
    known = overlaps.clone()
    known[1, 2] = torch.nan  # behind the rejection
    known[0, 2] = torch.nan  # trimmed: its own label says more
    trimmed = torch.tensor([0.45, torch.nan])
    feedback.add(features, torch.full((2, K), 0.5), *lens, trimmed, known)
    feedback.flush()
    labels = np.array([[0.7, 0.6, 0.45], [0.4, np.nan, np.nan]])  # row 1 stopped at its first token
    expected = reference.accumulate_statistics(features.numpy(), labels, estimator.coefficients)
    np.testing.assert_allclose(estimator._statistics, expected, rtol=1e-6)
    assert estimator.label_counts.tolist() == [2, 1, 1]
