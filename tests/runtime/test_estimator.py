"""The estimator's fit: recovery, guards against poisoned rows, bounds, versions, restart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtllm_av.plugins.reference import accumulate_statistics, score_drafts, score_features
from trtllm_av.runtime.estimator import (
    MAX_INTERCEPT,
    MAX_LOGIT_STEP,
    MAX_SLOPE,
    AcceptanceEstimator,
    cold_coefficients,
)

Floats = NDArray[np.float64]


def sums(features: Floats, labels: Floats, estimator: AcceptanceEstimator) -> Floats:
    return accumulate_statistics(features[:, :, None], labels, estimator.coefficients)


def planted_rows(
    rng: np.random.Generator, slope: float, intercepts: Floats, num_rows: int
) -> tuple[Floats, Floats]:
    """Features N(2.2, 1.8²) and labels drawn from σ(slope·f + intercept)."""
    features = rng.normal(2.2, 1.8, (num_rows, intercepts.size))
    chance = 1 / (1 + np.exp(-(slope * features + intercepts)))
    return features, (rng.random(features.shape) < chance).astype(float)


def test_recovers_planted_slope_and_intercepts() -> None:
    """Guards against a solve that converges somewhere else: wrong sign, wrong pivot, floor bias."""
    rng = np.random.default_rng(0)
    intercepts = np.array([1.3, 0.9, 0.4, 0.0, -0.5, -1.1, -1.6])
    estimator = AcceptanceEstimator(7)
    features, labels = planted_rows(rng, 0.72, intercepts, 20_000 // 7)
    for _ in range(12):
        estimator.observe(sums(features, labels, estimator), estimator.version)
        assert estimator.refit()
    slope, *found = estimator.coefficients
    assert abs(slope - 0.72) <= 0.05
    assert np.abs(found - intercepts).max() <= 0.1


def test_recovers_from_a_saturated_start() -> None:
    """Guards against the overshoot of an unfloored Newton step from p ≈ 1 (β to −66,667)."""
    rng = np.random.default_rng(1)
    estimator = AcceptanceEstimator(2)
    for acceptance in (0.999, 0.3):
        intercepts = np.full(2, np.log(acceptance / (1 - acceptance)) - 1.1)
        for _ in range(12):
            features, labels = planted_rows(rng, 0.5, intercepts, 3200)
            estimator.observe(sums(features, labels, estimator), estimator.version)
            estimator.refit()
            assert np.abs(estimator.coefficients[1:]).max() < 8
    features, labels = planted_rows(rng, 0.5, intercepts, 20_000)
    slope, *levels = estimator.coefficients
    mean = (1 / (1 + np.exp(-(slope * features + levels)))).mean()
    assert abs(mean - labels.mean()) < 0.02


def test_positions_without_labels_rest_bit_for_bit() -> None:
    """Guards against intercepts that drift with the prior, the slope or a division by the prior."""
    rng = np.random.default_rng(2)
    estimator = AcceptanceEstimator(4)
    features, labels = planted_rows(rng, 0.9, np.zeros(4), 500)
    labels[:, 1] = np.nan
    labels[:, 3] = np.nan
    before = estimator.coefficients.copy()
    estimator.observe(sums(features, labels, estimator), 0)
    assert estimator.refit()
    moved = estimator.coefficients != before
    assert moved.tolist() == [True, True, False, True, False]


def test_no_labels_no_refit() -> None:
    """Guards against a version that changes although nothing was learnt (coefficients are re-sent)."""
    estimator = AcceptanceEstimator(3)
    estimator.observe(np.zeros((3, 6)), 0)
    assert not estimator.refit()
    assert estimator.version == estimator.num_refits == 0
    np.testing.assert_array_equal(estimator.coefficients, cold_coefficients(3))


def test_statistics_are_cleared_by_a_refit() -> None:
    """Guards against counting every label again in every later refit."""
    rng = np.random.default_rng(3)
    estimator = AcceptanceEstimator(2)
    estimator.observe(sums(*planted_rows(rng, 0.5, np.ones(2), 100), estimator), 0)
    assert estimator.refit()
    assert not estimator.refit()


@pytest.mark.parametrize("feature", [15.0, -15.0])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_saturated_rows_stay_inside_the_bounds(feature: float, label: float) -> None:
    """Guards against runaway coefficients when saturated drafts are all rejected or all accepted."""
    estimator = AcceptanceEstimator(3)
    for _ in range(300):
        rows = np.full((100, 3), feature)
        estimator.observe(sums(rows, np.full((100, 3), label), estimator), estimator.version)
        estimator.refit()
        assert np.isfinite(estimator.coefficients).all()
        assert 0 <= estimator.coefficients[0] <= MAX_SLOPE
        assert np.abs(estimator.coefficients[1:]).max() <= MAX_INTERCEPT


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_intercepts_stop_at_their_bound(label: float) -> None:
    """Guards against intercepts that creep on for as long as every label is the same."""
    estimator = AcceptanceEstimator(1)
    bound = MAX_INTERCEPT if label else -MAX_INTERCEPT
    estimator.load_state_dict({**estimator.state_dict(), "coefficients": [0.0, bound]})
    rows = np.zeros((100, 1))
    estimator.observe(sums(rows, np.full_like(rows, label), estimator), 0)
    assert estimator.refit()
    assert estimator.coefficients[1] == bound


def test_one_hot_rejected_drafts_move_little_and_come_back() -> None:
    """Guards against case 6: one-hot drafts, all rejected, took the reference's intercept to −66,667."""
    estimator = AcceptanceEstimator(1)
    for num_labels in (1, 100):
        before = estimator.coefficients.copy()
        rows = np.full((num_labels, 1), 15.0)
        estimator.observe(sums(rows, np.zeros_like(rows), estimator), estimator.version)
        estimator.refit()
        change = (estimator.coefficients - before).astype(np.float64)
        assert abs(change[0] * 15.0 + change[1]) <= MAX_LOGIT_STEP + 1e-4
    rng = np.random.default_rng(4)
    for _ in range(12):
        features, labels = planted_rows(rng, 0.6, np.array([0.3]), 20_000)
        estimator.observe(sums(features, labels, estimator), estimator.version)
        estimator.refit()
    np.testing.assert_allclose(estimator.coefficients, [0.6, 0.3], atol=0.1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.floats(-9, 9), st.floats(0, 4), st.floats(0, 5))
def test_a_refit_moves_no_logit_by_more_than_two(
    seed: int, level: float, slope: float, spread: float
) -> None:
    """Guards against a bound that holds for the intercepts alone, or at feature 0 alone."""
    rng = np.random.default_rng(seed)
    estimator = AcceptanceEstimator(3)
    state = estimator.state_dict()
    state["coefficients"] = [slope, level, -level, level / 2]
    estimator.load_state_dict(state)
    features = np.clip(rng.normal(rng.uniform(-4, 8), spread, (64, 3)), -15, 15)
    labels = (rng.random((64, 3)) < rng.random()).astype(float)
    statistics = sums(features, labels, estimator)
    before = estimator.coefficients.astype(np.float64)
    estimator.observe(statistics, 0)
    estimator.refit()
    change = estimator.coefficients.astype(np.float64) - before
    a, b, c = statistics[:, 0], statistics[:, 1], statistics[:, 2]
    mean = b / c
    deviation = np.sqrt(np.maximum(a / c - mean**2, 0))
    for seen in (mean - 2 * deviation, mean, mean + 2 * deviation):
        assert np.abs(change[0] * seen + change[1:]).max() <= MAX_LOGIT_STEP * (1 + 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_statistics_that_are_not_finite_are_refused_and_counted(bad: float) -> None:
    """Guards against one poisoned sum that turns every later confidence into NaN."""
    estimator = AcceptanceEstimator(2)
    statistics = np.ones((2, 6))
    statistics[1, 4] = bad
    estimator.observe(statistics, 0)
    assert estimator.num_rejected == 1
    assert not estimator.refit()


def test_rows_that_cannot_be_scored_do_not_move_the_fit() -> None:
    """Guards against NaN and all −inf logits that reach the fit as a feature of 0 with a label."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(6, 2, 16)).astype(np.float32)
    labels = rng.integers(0, 2, (6, 2)).astype(np.float64)
    results = []
    for with_bad_rows in (False, True):
        estimator = AcceptanceEstimator(2)
        rows = logits.copy()
        rows_labels = labels.copy()
        if with_bad_rows:
            bad = np.full((2, 2, 16), -np.inf, np.float32)
            bad[1, :, 3] = np.nan
            rows = np.concatenate([rows, bad])
            # What label_drafts leaves for a confidence of 0.
            rows_labels = np.concatenate([labels, np.full((2, 2), np.nan)])
        features, confidence = score_drafts(
            rows, np.ones(len(rows)), estimator.coefficients, [0], vocab_size=16
        )
        assert np.isfinite(features).all()
        assert (confidence[6:] == 0).all()
        estimator.observe(accumulate_statistics(features, rows_labels, estimator.coefficients), 0)
        estimator.refit()
        results.append(estimator.coefficients)
    np.testing.assert_array_equal(*results)


def test_late_statistics_are_moved_to_the_present_coefficients() -> None:
    """Guards against a gradient counted twice: the late half of a round pushes as if nothing was fitted."""
    rng = np.random.default_rng(6)
    features, labels = planted_rows(rng, 0.5, np.array([1.0, 0.5]), 4000)
    estimator = AcceptanceEstimator(2)
    late = sums(features, labels, estimator)
    estimator.observe(late, 0)
    assert estimator.refit()
    after_first = estimator.coefficients.astype(np.float64)
    step = after_first - cold_coefficients(2)
    estimator.observe(late, 0)  # the same evidence again, at the old version
    estimator.refit()
    # A quadratic model is at its optimum after the first step (but for damping): little is left to do.
    assert np.abs(estimator.coefficients - after_first).max() < 0.05 * np.abs(step).max()


def test_unknown_versions() -> None:
    """Guards against statistics that belong to coefficients nobody has any more, or not yet."""
    rng = np.random.default_rng(7)
    estimator = AcceptanceEstimator(1)
    statistics = sums(*planted_rows(rng, 0.5, np.zeros(1), 100), estimator)
    for _ in range(9):
        estimator.observe(statistics, estimator.version)
        estimator.refit()
    estimator.observe(statistics, 0)
    assert estimator.num_outdated == 1
    assert not estimator.refit()
    with pytest.raises(ValueError, match="version 10"):
        estimator.observe(statistics, 10)
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        estimator.observe(np.zeros((2, 6)), estimator.version)


def test_tick_refits_every_interval() -> None:
    """Guards against an off-by-one that refits one round early and misses its labels."""
    rng = np.random.default_rng(8)
    estimator = AcceptanceEstimator(1, refit_interval=3)
    refits = []
    for _ in range(7):
        estimator.observe(
            sums(*planted_rows(rng, 0.5, np.zeros(1), 10), estimator), estimator.version
        )
        is_due = estimator.is_refit_due
        refits.append(estimator.tick())
        assert is_due == refits[-1]
    assert refits == [False, False, True, False, False, True, False]
    assert estimator.version == estimator.num_refits == 2


def test_state_survives_json() -> None:
    """Guards against a restart that forgets labels, or lets an impossible state in."""
    rng = np.random.default_rng(9)
    first, second = AcceptanceEstimator(2), AcceptanceEstimator(2)
    first.observe(sums(*planted_rows(rng, 0.5, np.ones(2), 100), first), 0)
    first.refit()
    first.tick()
    first.observe(sums(*planted_rows(rng, 0.5, np.ones(2), 100), first), 1)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    first.refit(), second.refit()
    np.testing.assert_array_equal(first.coefficients, second.coefficients)
    with pytest.raises(ValueError, match="2 draft positions"):
        AcceptanceEstimator(3).load_state_dict(state)
    for bad in ([float("nan"), 0.0, 0.0], [-0.1, 0.0, 0.0], [0.5, 0.0, 99.0]):
        with pytest.raises(ValueError, match="impossible"):
            second.load_state_dict({**state, "coefficients": bad})


def test_a_slope_at_its_bound_does_not_drag_the_others() -> None:
    """Guards against two features that say nearly the same: one slope stops at 0, and the other goes on
    compensating for it, refit after refit, up to its own bound."""
    rng = np.random.default_rng(0)
    estimator = AcceptanceEstimator(2, num_features=2)
    losses = []
    for _ in range(80):
        f = rng.normal(-0.3, 1.5, (300, 2)).astype(np.float32)
        features = np.stack([f, np.logaddexp(0, f)], -1)
        chance = 1 / (1 + np.exp(-(0.9 * features[..., 1] - 0.2 * f - 0.4)))
        labels = (rng.random(f.shape) < chance).astype(np.float32)
        p = score_features(features, estimator.coefficients, [0], dtype=np.float64)
        best = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance)).mean()
        losses.append(-(chance * np.log(p) + (1 - chance) * np.log(1 - p)).mean() - best)
        statistics = accumulate_statistics(features, labels, estimator.coefficients)
        estimator.observe(statistics, estimator.version)
        estimator.refit()
    assert max(losses[10:]) < 0.05
    assert np.mean(losses[10:]) < 0.01
