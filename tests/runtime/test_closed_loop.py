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
