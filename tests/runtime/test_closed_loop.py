"""The adaptive part as a whole, against workloads that shift at once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.closed_loop import ClosedLoop
from trtllm_av.runtime import depth as depth_module

REFIT = 100  # rounds


@pytest.mark.parametrize("is_block", [True, False])
def test_recovers_from_a_shift_and_back(is_block: bool) -> None:
    """Guards against case 6: .9 → .4 → .9 throws the intercepts, B falls to 0 and stays there."""
    loop = ClosedLoop(64, 7, is_block=is_block)
    coefficients = []

    def run(refits: int) -> float:
        rate = 0.0
        for _ in range(refits):
            rate = loop.run(REFIT)
            coefficients.append(loop.estimator.coefficients)
        return rate

    loop.workload.set_acceptance(0.9)
    easy = run(6)
    loop.workload.set_acceptance(0.4)
    hard = run(5)
    plain = 64 / float(loop.cost_model.verify_ms(np.array([64]))[0])
    assert hard >= 0.98 * plain
    loop.workload.set_acceptance(0.9)
    run(3)
    assert np.abs(loop.calibration_error()[:2]).max() <= 0.05
    assert run(1) >= 0.97 * easy

    every = np.array(coefficients)
    assert np.isfinite(every).all()
    assert 0 <= every[:, 0].min() <= every[:, 0].max() <= 1
    assert np.abs(every[:, 1:]).max() <= 3


def test_without_probes_drafting_that_stopped_never_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shows that the test above can fail: B = 0 is absorbing where no probe brings labels."""
    monkeypatch.setattr(depth_module, "MIN_PROBE_PERIOD", 10**9)
    monkeypatch.setattr(depth_module, "MAX_PROBE_PERIOD", 10**9)
    loop = ClosedLoop(64, 7)
    for acceptance in (0.9, 0.4, 0.9):
        loop.workload.set_acceptance(acceptance)
        loop.run(5 * REFIT)
    assert loop.decisions[-1].depth == 0
    assert np.abs(loop.calibration_error()[:2]).max() > 0.2


@pytest.mark.parametrize(("easy", "num_requests"), [(0.9, 32), (0.95, 64)])
def test_full_depth_is_back_within_four_refits(easy: float, num_requests: int) -> None:
    """Guards against a shift that costs throughput for good: easy → .4 → easy, in tokens per ms."""
    loop = ClosedLoop(num_requests, 7)
    loop.workload.set_acceptance(easy)
    loop.run(5 * REFIT)
    before = loop.run(REFIT)
    loop.workload.set_acceptance(0.4)
    loop.run(5 * REFIT)
    assert loop.decisions[-1].depth == 0
    loop.workload.set_acceptance(easy)
    loop.run(3 * REFIT)
    assert loop.run(REFIT) >= 0.95 * before
    usual = [decision for decision in loop.decisions[-20:] if not decision.is_probe]
    assert {decision.depth for decision in usual} == {7}


def starve(loop: ClosedLoop, intercept: float) -> float:
    """Leave positions from 3 on at ``intercept``, as a phase with bad deep drafts would; tokens per ms before."""
    loop.workload.set_acceptance(0.9)
    loop.run(4 * REFIT)
    before = loop.run(REFIT)
    state = loop.estimator.state_dict()
    state["coefficients"][4:] = [intercept] * 4
    loop.estimator.load_state_dict(state)
    loop.history.set_coefficients(loop.estimator.coefficients)
    return before


def test_exploration_recovers_starved_positions_within_two_refits() -> None:
    """Guards against case 9: what is always trimmed gets no labels, and stays trimmed when it would pay."""
    loop = ClosedLoop(32, 7, exploration=0.01)
    before = starve(loop, -2.5)
    assert loop.calibration_error()[3:].max() < -0.5
    loop.run(REFIT)
    after = loop.run(REFIT)
    assert np.abs(loop.calibration_error()).max() <= 0.1
    assert after >= 0.95 * before
    assert loop.exploration is not None
    expected = sum(decision.expected_tokens for decision in loop.decisions)
    assert 0 < loop.exploration.cost_tokens <= 0.01 * expected


def test_exploration_brings_labels_that_nothing_else_brings() -> None:
    """The reference's way (no exploration, no probes, no label of a trimmed slot) stays starved."""
    errors = {}
    for share in (0.0, 0.01):
        loop = ClosedLoop(32, 7, exploration=share, has_trimmed_labels=False)
        loop.controller._rounds_to_probe = 10**9
        starve(loop, -6.0)
        loop.run(4 * REFIT)
        errors[share] = loop.calibration_error()[3:]
    assert errors[0.0].max() < -0.25
    assert errors[0.0][1:].max() < -0.6
    # No refit moves a logit by more than 2, so that 6 logits and more take four of them.
    assert np.abs(errors[0.01]).max() <= 0.1


def test_exploration_costs_little_where_there_is_nothing_to_find() -> None:
    """Guards against exploration that spends its share for good on positions that are rightly trimmed."""
    rates = []
    for share in (0.0, 0.01):
        loop = ClosedLoop(32, 7, exploration=share)
        loop.workload.set_acceptance(0.55)
        loop.run(3 * REFIT)
        rates.append(loop.run(5 * REFIT))
    assert rates[1] >= 0.985 * rates[0]


def test_starved_positions_recover_when_the_load_gets_easier() -> None:
    """Guards against case 9: positions trimmed for a while stay at their last, low intercept."""
    loop = ClosedLoop(32, 7)
    loop.workload.set_acceptance(0.35)
    loop.run(6 * REFIT)
    # As if a hard phase had left the deep positions far too low.
    state = loop.estimator.state_dict()
    state["coefficients"][4:] = [-4.0] * 4
    loop.estimator.load_state_dict(state)
    loop.workload.set_acceptance(0.9)
    loop.run(6 * REFIT)
    assert np.abs(loop.calibration_error()).max() <= 0.05
    assert loop.decisions[-1].budget > 32 * 5


def test_probes_cost_little_when_nothing_is_to_be_found() -> None:
    """Guards against exploration that makes adaptive verification slower than plain decoding."""
    loop = ClosedLoop(64, 7, is_block=False)
    loop.workload.set_acceptance(0.15)
    loop.run(4 * REFIT)
    plain = 64 / float(loop.cost_model.verify_ms(np.array([64]))[0])
    assert loop.run(4 * REFIT) >= 0.98 * plain
