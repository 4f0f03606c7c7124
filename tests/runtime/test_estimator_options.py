"""The fit with more than one feature, with labels that are discounted, and from kept coefficients."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtllm_av.plugins.reference import accumulate_statistics, num_statistics
from trtllm_av.runtime.estimator import (
    MAX_INTERCEPT,
    MAX_LOGIT_STEP,
    MAX_SLOPE,
    AcceptanceEstimator,
    cold_coefficients,
)

Floats = NDArray[np.float64]
K = 4


def observe(estimator: AcceptanceEstimator, features: Floats, labels: Floats) -> None:
    """One round of features [R,K,F] and labels [R,K]."""
    statistics = accumulate_statistics(features, labels, estimator.coefficients)
    estimator.observe(statistics, estimator.version)


def planted_rows(
    rng: np.random.Generator, slopes: Floats, intercepts: Floats, num_rows: int
) -> tuple[Floats, Floats]:
    features = rng.normal(1.0, 1.5, (num_rows, intercepts.size, slopes.size))
    chance = 1 / (1 + np.exp(-(features @ slopes + intercepts)))
    return features, (rng.random(chance.shape) < chance).astype(float)


def test_recovers_planted_slopes() -> None:
    """Guards against an F×F system with wrong pivots, order or sign: a slope may be negative."""
    rng = np.random.default_rng(0)
    slopes, intercepts = np.array([0.7, -0.4, 0.25]), np.array([0.8, 0.2, -0.3, -0.9])
    estimator = AcceptanceEstimator(K, num_features=3)
    features, labels = planted_rows(rng, slopes, intercepts, 6000)
    for _ in range(12):
        observe(estimator, features, labels)
        assert estimator.refit()
    np.testing.assert_allclose(estimator.coefficients[:3], slopes, atol=0.05)
    np.testing.assert_allclose(estimator.coefficients[3:], intercepts, atol=0.1)


def test_the_step_solves_the_whole_system() -> None:
    """Guards against an elimination that forgets a coupling: compared with the dense (F+K)² system."""
    rng = np.random.default_rng(1)
    features, labels = planted_rows(rng, np.array([0.6, -0.2]), np.zeros(K), 100_000)
    estimator = AcceptanceEstimator(K, num_features=2)
    before = estimator.coefficients.astype(float)
    design = np.zeros((features.shape[0], K, 2 + K))
    design[:, :, :2] = features
    design[:, range(K), range(2, 2 + K)] = 1.0
    p = 1 / (1 + np.exp(-(design @ before)))
    weights = np.maximum(p * (1 - p), 0.125)
    hessian = np.einsum("rki,rk,rkj->ij", design, weights, design)
    step = np.linalg.solve(hessian, np.einsum("rki,rk->i", design, labels - p))
    observe(estimator, features, labels)
    estimator.refit()
    np.testing.assert_allclose(estimator.coefficients - before, step, atol=2e-3)


def test_features_that_say_the_same_share_the_slope() -> None:
    """Guards against a singular system: with two tokens the top-2 gap is the log-odds."""
    rng = np.random.default_rng(2)
    features, labels = planted_rows(rng, np.array([0.8]), np.zeros(K), 4000)
    twice = np.concatenate([features, features], axis=2)
    estimator = AcceptanceEstimator(K, num_features=2)
    for _ in range(10):
        observe(estimator, twice, labels)
        estimator.refit()
    assert estimator.coefficients[:2].sum() == pytest.approx(0.8, abs=0.05)
    assert np.abs(estimator.coefficients).max() < 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 2**32 - 1), st.floats(0.01, 20.0), st.sampled_from([0.0, 0.9])
)
def test_no_rows_throw_the_fit(num_features: int, seed: int, scale: float, discount: float) -> None:
    """Guards against case 6 in more dimensions: bounds hold, and no logit seen moves by more than 2."""
    rng = np.random.default_rng(seed)
    estimator = AcceptanceEstimator(K, num_features=num_features, discount=discount)
    for _ in range(4):
        rows = int(rng.integers(1, 30))
        features = np.clip(rng.normal(scale, scale, (rows, K, num_features)), -15.0, 15.0)
        labels = np.full((rows, K), float(rng.integers(0, 2)))
        labels[rng.random(labels.shape) < 0.3] = np.nan
        before = estimator.coefficients.astype(float)
        observe(estimator, features, labels)
        if not estimator.refit():
            continue
        after = estimator.coefficients.astype(float)
        assert np.isfinite(after).all()
        assert 0.0 <= after[0] <= MAX_SLOPE
        assert np.abs(after[:num_features]).max() <= MAX_SLOPE
        assert np.abs(after[num_features:]).max() <= MAX_INTERCEPT
        if discount:
            continue  # the step comes from older rows, too
        change = after - before
        for k in range(K):
            seen = features[np.isfinite(labels[:, k]), k]
            if len(seen):
                moved = change[num_features + k] + seen.mean(0) @ change[:num_features]
                assert abs(moved) <= MAX_LOGIT_STEP + 0.5  # weighted means are not plain ones


def test_discounted_labels_go_on_counting() -> None:
    """Guards against a discount that clears, or that counts old gradients again in full."""
    rng = np.random.default_rng(3)
    features, labels = planted_rows(rng, np.array([0.6]), np.full(K, 0.4), 300)
    kept, cleared = AcceptanceEstimator(K, discount=0.5), AcceptanceEstimator(K)
    for estimator in (kept, cleared):
        observe(estimator, features, labels)
        before = estimator.coefficients.astype(float)
        first = estimator._statistics.copy()
        estimator.refit()
    change = kept.coefficients.astype(float) - before
    a, b, c, g0, g1, n = first.T
    expected = np.stack(
        [
            *(a, b, c),
            g0 - a * change[0] - b * change[1:],
            g1 - b * change[0] - c * change[1:],
            n,
        ],
        axis=1,
    )
    np.testing.assert_allclose(kept._statistics, 0.5 * expected, rtol=1e-6, atol=1e-6)
    assert not cleared._statistics.any()
    # Without a new label there is nothing to refit for.
    assert not kept.refit()


def test_discounting_steadies_the_fit() -> None:
    """Guards against an option without effect: with few labels a refit the coefficients vary less."""
    spreads = []
    for discount in (0.0, 0.9):
        rng = np.random.default_rng(4)
        estimator = AcceptanceEstimator(K, discount=discount)
        history = []
        for _ in range(80):
            observe(estimator, *planted_rows(rng, np.array([0.6]), np.zeros(K), 40))
            estimator.refit()
            history.append(estimator.coefficients[1:])
        spreads.append(np.std(history[40:]))
    assert spreads[1] < 0.6 * spreads[0]


def test_late_statistics_of_two_features_are_moved() -> None:
    """Guards against a correction of one slope only: late and in time must give the same fit."""
    rng = np.random.default_rng(5)
    rounds = [planted_rows(rng, np.array([0.6, -0.3]), np.zeros(K), 500) for _ in range(2)]
    late = AcceptanceEstimator(K, num_features=2)
    pending = accumulate_statistics(*rounds[1], late.coefficients)
    observe(late, *rounds[0])
    late.refit()
    moved = late.coefficients.astype(float) - cold_coefficients(K, 2)
    late.observe(pending, 0)
    a00, a01, a11, b0, b1, c, g00, g01, g1, _ = pending.T
    expected = [
        g00 - a00 * moved[0] - a01 * moved[1] - b0 * moved[2:],
        g01 - a01 * moved[0] - a11 * moved[1] - b1 * moved[2:],
        g1 - b0 * moved[0] - b1 * moved[1] - c * moved[2:],
    ]
    np.testing.assert_allclose(late._statistics[:, 6:9].T, expected, rtol=1e-9)


def test_state_of_two_features_survives_json() -> None:
    """Guards against a restart with another number of features that reads slopes as intercepts."""
    rng = np.random.default_rng(6)
    first = AcceptanceEstimator(K, num_features=2, discount=0.5)
    observe(first, *planted_rows(rng, np.array([0.6, 0.1]), np.zeros(K), 50))
    first.refit()
    state = json.loads(json.dumps(first.state_dict()))
    second = AcceptanceEstimator(K, num_features=2, discount=0.5)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    assert not second.refit()  # the labels are old ones
    with pytest.raises(ValueError, match="4 draft positions; this estimator has 4 with 1 features"):
        AcceptanceEstimator(K).load_state_dict(state)


def test_kept_coefficients_start_a_new_version() -> None:
    """Guards against scores under a version that other coefficients had, and against impossible ones."""
    estimator = AcceptanceEstimator(2, num_features=2)
    estimator.restore(np.array([0.9, -3.0, 1.0, -1.0], np.float32))
    assert estimator.version == 1
    for bad in (
        [0.9, 0.0, 1.0],
        [-0.1, 0.0, 1.0, 1.0],
        [0.9, 4.1, 1.0, 1.0],
        [0.9, 0.0, np.nan, 0],
    ):
        with pytest.raises(ValueError, match="impossible coefficients"):
            estimator.restore(np.array(bad, np.float32))
    assert estimator.version == 1


@pytest.mark.parametrize(
    "wrong", [{"num_features": 0}, {"discount": 1.0}, {"discount": -0.1}], ids=str
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    """Guards against a fit that never forgets, or that has no slope."""
    with pytest.raises(ValueError, match="must be"):
        AcceptanceEstimator(2, **wrong)  # type: ignore[arg-type]


def test_the_layout_of_statistics() -> None:
    """Guards against columns in another order than an engine that sums on its own puts them."""
    assert [num_statistics(f) for f in (1, 2, 3)] == [6, 10, 15]
    features = np.array([[[2.0, 3.0]]])
    found = accumulate_statistics(features, np.ones((1, 1)), np.zeros(3))[0]
    w, residual = 0.25, 0.5
    expected = [4 * w, 6 * w, 9 * w, 2 * w, 3 * w, w, 2 * residual, 3 * residual, residual, 1.0]
    np.testing.assert_allclose(found, expected)
