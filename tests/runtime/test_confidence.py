"""Stale survival per slot: what a new request gets, what a shallow round leaves, what never gets in."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_av.runtime.confidence import HORIZON, SurvivalHistory
from trtllm_av.runtime.estimator import cold_coefficients

K = 3


def update(
    history: SurvivalHistory, rows: list[list[float]], lens: list[int], first: int = 0
) -> None:
    slots = np.arange(first, first + len(rows))
    history.update(slots, np.array(rows, np.float32), np.array(lens, np.int32))


def test_before_any_data_the_cold_start_is_used() -> None:
    """Guards against a first budget of everything (confidence 1) or of nothing (confidence 0)."""
    history = SurvivalHistory(2, K)
    p = 1 / (1 + np.exp(-(0.5 * 2.2 - 0.2)))
    np.testing.assert_allclose(history.survival(np.array([1])), [[p, p**2, p**3]], rtol=1e-6)
    coefficients = cold_coefficients(K)
    coefficients[1:] = [0.0, 1.0, 2.0]
    history.set_coefficients(coefficients)
    p = 1 / (1 + np.exp(-(0.5 * 2.2 + coefficients[1:])))
    np.testing.assert_allclose(history.survival(np.array([1]))[0], np.cumprod(p), rtol=1e-6)


def test_the_last_round_of_each_slot_is_what_counts() -> None:
    """Guards against rows mixed up between slots and batch positions."""
    history = SurvivalHistory(4, K)
    update(history, [[0.5, 0.5, 0.5], [0.9, 0.8, 0.7]], [3, 3], first=2)
    update(history, [[0.2, 0.4, 0.6]], [3], first=2)
    survival = history.survival(np.array([3, 2]))
    np.testing.assert_allclose(survival, [[0.9, 0.72, 0.504], [0.2, 0.08, 0.048]], rtol=1e-6)


def test_few_rows_are_forecast_from_the_mean_and_many_from_their_own() -> None:
    """Guards against a batch of one row that follows each round's noise away from its best depth."""
    history = SurvivalHistory(64, 1)
    update(history, [[0.2], [0.8]] * 32, [1] * 64)
    one = history.forecast(np.array([0]))
    np.testing.assert_allclose(one, [[0.2 / 3 + 0.5 * 2 / 3]], rtol=1e-6)
    many = history.forecast(np.arange(64))
    np.testing.assert_allclose(many[:2, 0], [0.2 + 0.3 * 2 / 66, 0.8 - 0.3 * 2 / 66], rtol=1e-6)
    assert history.forecast(np.empty(0, np.int64)).shape == (0, 1)
    np.testing.assert_allclose(history.survival(np.array([0])), [[0.2]], rtol=1e-6)


def test_a_new_request_starts_from_the_mean_survival() -> None:
    """Guards against churn that biases B: a reused slot that keeps the survival of the request before."""
    history = SurvivalHistory(3, K)
    update(history, [[0.9, 0.9, 0.9], [0.1, 0.5, 0.5]], [3, 3])
    history.admit(1)
    mean = [(0.9 + 0.1) / 2, (0.81 + 0.05) / 2, (0.729 + 0.025) / 2]
    np.testing.assert_allclose(history.survival(np.array([1]))[0], mean, rtol=1e-6)
    np.testing.assert_allclose(history.survival(np.array([0]))[0], [0.9, 0.81, 0.729], rtol=1e-6)
    update(history, [[0.3, 0.3, 0.3]], [3], first=1)
    np.testing.assert_allclose(history.survival(np.array([1]))[0], [0.3, 0.09, 0.027], rtol=1e-6)


def test_positions_that_were_not_drafted_continue_by_their_mean() -> None:
    """Guards against depth that can never grow again: survival 0 behind the last round's depth."""
    history = SurvivalHistory(2, K)
    update(history, [[0.8, 0.6, 0.4], [0.8, 0.2, 0.4]], [3, 3])
    update(history, [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]], [1, 0])
    first_mean = 0.8  # the means before the second round fill it
    expected = [[0.5, 0.5 * 0.4, 0.5 * 0.4 * 0.4], [first_mean, 0.8 * 0.4, 0.8 * 0.4 * 0.4]]
    np.testing.assert_allclose(history.survival(np.array([0, 1])), expected, rtol=1e-6)
    # A new request: two survivals 0.8 and one 0.5 at position 1; the others rest on two rows.
    history.admit(0)
    mean = history.survival(np.array([0]))[0]
    np.testing.assert_allclose(mean[0], (0.8 + 0.8 + 0.5) / 3, rtol=1e-6)
    np.testing.assert_allclose(mean[1], (0.48 + 0.16) / 2, rtol=1e-6)


def test_a_position_without_data_continues_the_mean_survival() -> None:
    """Guards against a cold product that ignores what the positions before it have shown."""
    history = SurvivalHistory(2, K)
    update(history, [[0.2, 0.0, 0.0]], [1])
    cold = 1 / (1 + np.exp(-(0.5 * 2.2 - 0.2)))
    np.testing.assert_allclose(
        history.survival(np.array([1]))[0], [0.2, 0.2 * cold, 0.2 * cold**2], rtol=1e-6
    )


def test_mean_survival_falls_along_the_draft() -> None:
    """Guards against a deep mean of easier rounds above a shallow one of today: no prefix would pay."""
    history = SurvivalHistory(2, K)
    update(history, [[0.9, 0.9, 0.9]], [3])
    update(history, [[0.1, 0.0, 0.0]], [1])
    update(history, [[0.1, 0.0, 0.0]], [1])
    mean = history.survival(np.array([1]))[0]
    assert mean[0] == mean[1] == mean[2] == pytest.approx((0.9 + 0.1 + 0.1) / 3)


def test_unscorable_rows_count_as_zero_and_poison_nothing() -> None:
    """Guards against a NaN confidence that makes every mean, and so every new request, NaN."""
    history = SurvivalHistory(3, K)
    update(history, [[np.nan, 0.5, 0.5], [0.5, np.nan, 0.5]], [3, 3])
    survival = history.survival(np.arange(3))
    assert np.isfinite(survival).all()
    np.testing.assert_allclose(survival[:2], [[0, 0, 0], [0.5, 0, 0]])
    # Values behind a row's draft are not confidences at all.
    update(history, [[0.5, np.nan, np.inf]], [1], first=2)
    assert np.isfinite(history.survival(np.array([2]))).all()


def test_old_rounds_fade() -> None:
    """Guards against means over all time that hold new requests at a workload long gone."""
    history = SurvivalHistory(9, K)
    rows = int(HORIZON) // 8
    for _ in range(100):
        update(history, [[0.9] * K] * 8, [K] * 8)
    for _ in range(rows):
        update(history, [[0.1] * K] * 8, [K] * 8)
    assert 0.1 < history.survival(np.array([8]))[0, 0] < 0.45


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_survival_has_the_type_asked_for_and_is_a_copy(dtype: type) -> None:
    """Guards against an enumeration in f32, and against a caller that edits the history."""
    history = SurvivalHistory(2, K, dtype=dtype)
    update(history, [[0.5] * K], [K])
    survival = history.survival(np.array([0]))
    assert survival.dtype == dtype
    survival[:] = 7
    assert history.survival(np.array([0])).max() == 0.5


def test_an_empty_batch_is_a_round_too() -> None:
    """Guards against a crash in the round in which the batch drains to zero."""
    history = SurvivalHistory(2, K)
    none = np.array([], np.int64)
    history.update(none, np.zeros((0, K), np.float32), none)
    assert history.survival(none).shape == (0, K)
