"""Aimed exploration: verify a position that got few labels, in place of drafts that hardly survive.

A position that is drafted and always trimmed gets no labels, keeps a confidence that is too low, and so stays
trimmed. Here some rows get a floor down to such a position while the budget stays: what the trim leaves out
for it are the admitted slots of lowest survival.

Invariants: the position comes from label counts of earlier rounds and the rows go round robin, never by
survival; the expected tokens given up, by survivals of earlier rounds, stay below ``share`` of all expected
ones; the budget never grows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.depth import Decision

#: In the window, so one a round: a refit that is due every 100 rounds trusts them.
ENOUGH_LABELS = 50.0
_KEPT = 0.98  # of a label's weight after each round: a window of fifty rounds
_MOST_LABELS = 2 * ENOUGH_LABELS  # beyond them a position would count as well known for too long
_SAVED_ROUNDS = 16.0  # of unused allowance, so that small batches can explore at all

Float64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]


class Exploration:
    """Adds floors to decisions.

    ``num_rounds`` counts decisions that got any, ``explored_by_position`` [K] the floors that end at each
    position, ``cost_tokens`` adds up the expected tokens given up for them.
    """

    def __init__(self, num_positions: int, share: float) -> None:
        self.num_rounds = 0
        self.explored_by_position = [0] * num_positions
        self.cost_tokens = 0.0
        self._share = share
        self._allowance = 0.0
        self._next_row = 0
        # A new engine starves of nothing yet: positions get time to be labelled in the usual way.
        self._labels: Float64 = np.full(num_positions, _MOST_LABELS)
        self._seen: Float64 = np.zeros(num_positions)

    def aim(self, decision: Decision, survival: Floats, label_counts: Float64) -> Decision:
        """``decision`` with floors for exploration, if there is a starved position and allowance left.

        ``survival`` [R,K] is what the decision was made from, ``label_counts`` [K] the labels of each
        position since the start.
        """
        self._labels *= _KEPT
        self._labels += label_counts - self._seen
        np.minimum(self._labels, _MOST_LABELS, out=self._labels)
        self._seen = label_counts.copy()
        income = self._share * decision.expected_tokens
        self._allowance = min(self._allowance + income, _SAVED_ROUNDS * income)
        if decision.is_probe or decision.is_uniform or self._allowance <= 0.0:
            return decision
        starved = np.flatnonzero(self._labels[: decision.depth] < ENOUGH_LABELS)
        if not starved.size:
            return decision
        length = int(starved[-1]) + 1
        before = _Expectation(decision, survival)
        rows = self._candidates(decision, length)
        if not rows.size:
            return decision
        floors, cost = before.with_floors(rows[:1], length)
        if floors is None or cost > self._allowance:
            return decision
        taken = 1
        more = min(int(self._allowance / cost) if cost > 0.0 else rows.size, rows.size)
        if more > 1:
            several, total = before.with_floors(rows[:more], length)
            if several is not None and total <= self._allowance:
                floors, cost, taken = several, total, more
        self._next_row = int(rows[taken - 1]) + 1
        self._allowance -= cost
        self.num_rounds += 1
        self.explored_by_position[length - 1] += taken
        self.cost_tokens += cost
        return decision._replace(
            min_verify_lens=floors,
            expected_tokens=decision.expected_tokens - cost,
            explored_rows=taken,
        )

    def _candidates(self, decision: Decision, length: int) -> NDArray[np.int64]:
        """Rows that draft ``length`` tokens and have no such floor, in turn."""
        floors = decision.min_verify_lens
        rows = np.flatnonzero((decision.draft_lens >= length) & (floors < length))
        return np.roll(rows, -int(np.searchsorted(rows, self._next_row)))


class _Expectation:
    """Expected accepted drafts of a decision under other floors, the budget kept."""

    def __init__(self, decision: Decision, survival: Floats) -> None:
        self._decision = decision
        self._positions = np.arange(survival.shape[1], dtype=np.int32)
        is_drafted = self._positions < decision.draft_lens[:, None]
        self._survival = np.where(is_drafted, np.fmax(survival, 0.0), 0.0)
        self._accepted = self._expected(decision.min_verify_lens)

    def with_floors(
        self, rows: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.int32] | None, float]:
        """Floors [R] with ``length`` for ``rows``, and the tokens given up; None beyond the budget."""
        floors = self._decision.min_verify_lens.copy()
        floors[rows] = length
        if int(floors.sum()) > self._decision.budget:
            return None, 0.0
        return floors, max(self._accepted - self._expected(floors), 0.0)

    def _expected(self, floors: NDArray[np.int32]) -> float:
        is_floored = self._positions < floors[:, None]
        free = self._decision.budget - int(floors.sum())
        others = np.where(is_floored, 0.0, self._survival).ravel()
        best = (
            np.partition(others, others.size - free)[others.size - free :] if free else others[:0]
        )
        return float(self._survival.sum(where=is_floored, dtype=np.float64) + best.sum())
