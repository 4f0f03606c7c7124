"""Each request's own acceptance in earlier rounds, a feature that no draft of the present round can move.

Invariants: what a round reads was fixed when the round before ended; a slot that another request takes
over starts at 0; only drafts that were judged count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_DECAY = 0.9  # weight of a request's counts after a round of its own: ten rounds are remembered

Ints = NDArray[np.integer[Any]]


class RecentAcceptance:
    """Decayed counts of accepted and rejected drafts per slot."""

    def __init__(self, num_slots: int) -> None:
        # Accepted and rejected.
        self._counts = np.zeros((2, num_slots))

    def admit(self, slot: int) -> None:
        """A new request takes ``slot``: forget the one before."""
        self._counts[:, slot] = 0.0

    def update(self, slots: Ints, verify_lens: Ints, accepted_lens: Ints) -> None:
        """Take over a finished round of the requests in ``slots`` [R]; lengths [R]."""
        judged = slots[verify_lens > 0]
        self._counts[:, judged] *= _DECAY
        self._counts[0, slots] += accepted_lens
        self._counts[1, slots] += accepted_lens < verify_lens

    def feature(self, slots: Ints) -> NDArray[np.float32]:
        """[R] f32: log-odds of acceptance, with one draft of each kind added; 0 for a new request."""
        accepted, rejected = self._counts[:, slots]
        return np.asarray(np.log((accepted + 1.0) / (rejected + 1.0)), np.float32)
