"""The acceptance of a request so far, as a feature."""

from __future__ import annotations

import math

import numpy as np

from trtllm_av.runtime.recent_acceptance import RecentAcceptance


def test_counts_only_what_was_judged() -> None:
    """Guards against trimmed drafts, or drafts behind a rejection, that count as rejected."""
    recent = RecentAcceptance(3)
    slots = np.array([2, 0])
    assert recent.feature(slots).tolist() == [0.0, 0.0]
    recent.update(slots, np.array([3, 2]), np.array([1, 2]))
    np.testing.assert_allclose(
        recent.feature(slots), [math.log(2.0 / 2.0), math.log(3.0 / 1.0)], rtol=1e-6
    )
    recent.update(slots, np.array([0, 1]), np.array([0, 0]))  # nothing verified of the first
    np.testing.assert_allclose(
        recent.feature(slots), [0.0, math.log((1.8 + 1.0) / (1.0 + 1.0))], rtol=1e-6
    )


def test_a_new_request_does_not_inherit() -> None:
    """Guards against the acceptance of whoever had the slot before."""
    recent = RecentAcceptance(2)
    recent.update(np.array([0, 1]), np.array([4, 4]), np.array([4, 4]))
    recent.admit(1)
    first, second = recent.feature(np.array([0, 1]))
    assert first > 1.0
    assert second == 0.0
