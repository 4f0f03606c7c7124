"""Aimed exploration: whom it picks, what it may cost, and that it never asks for more budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtllm_av.runtime.depth import Decision
from trtllm_av.runtime.exploration import Exploration

R, K = 4, 3


def decision(budget: int = 6, *, depth: int = K, tokens: float = 12.0, **others: Any) -> Decision:
    lens = np.full(R, depth, np.int32)
    flags = {"is_probe": False, "probe_row": -1, **others}
    return Decision(depth, budget, lens, np.zeros(R, np.int32), tokens, 1.0, **flags)


def survival() -> np.ndarray:
    """Position 0 and 1 are admitted everywhere but for the worst row, position 2 nowhere."""
    confidence = np.array([[0.9, 0.8, 0.1], [0.9, 0.7, 0.1], [0.9, 0.6, 0.1], [0.9, 0.3, 0.1]])
    return np.cumprod(confidence, axis=1)


def counts(rounds: int, *labels: float) -> np.ndarray:
    return rounds * np.array(labels)


def run(exploration: Exploration, rounds: int, *labels: float, **options: Any) -> list[Decision]:
    """Decisions of ``rounds`` rounds that bring ``labels`` [K] each."""
    return [
        exploration.aim(decision(**options), survival(), counts(n + 1, *labels))
        for n in range(rounds)
    ]


def test_a_starved_position_gets_a_floor_within_the_budget() -> None:
    """Guards against exploration that grows the budget, or verifies no position that lacks labels."""
    exploration = Exploration(K, 0.01)
    taken = [d for d in run(exploration, 400, 4.0, 4.0, 0.0) if d.explored_rows]
    assert taken
    assert exploration.num_rounds == len(taken)
    assert exploration.explored_by_position == [0, 0, len(taken)]
    for found in taken:
        assert found.budget == 6
        assert sorted(found.min_verify_lens.tolist()) == [0, 0, 0, 3]
        assert found.expected_tokens < 12.0


def test_rows_take_turns_whatever_their_survival() -> None:
    """Guards against case 18: a row picked by its survival is a choice by the drafts themselves."""
    taken = [d for d in run(Exploration(K, 0.01), 800, 4.0, 4.0, 0.0) if d.explored_rows]
    rows = [int(d.min_verify_lens.argmax()) for d in taken]
    assert rows[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_cost_stays_below_its_share() -> None:
    """Guards against labels that cost more tokens than the fit can ever win back."""
    exploration = Exploration(K, 0.01)
    for n in range(600):
        exploration.aim(decision(), survival(), counts(n + 1, 4.0, 4.0, 0.0))
        assert exploration.cost_tokens <= 0.01 * 12.0 * (n + 1)
    assert exploration.cost_tokens > 0.5 * 0.01 * 12.0 * 600
    # A share that one row's floor exceeds, whatever was saved, buys nothing.
    assert not any(d.explored_rows for d in run(Exploration(K, 1e-4), 300, 4.0, 4.0, 0.0))


def test_the_cost_is_what_the_displaced_slots_would_have_brought() -> None:
    """Guards against a cost that counts rows' own admitted slots, or forgets what the floor itself brings."""
    exploration = Exploration(K, 1.0)
    while exploration.num_rounds == 0:
        found = exploration.aim(decision(), survival(), np.zeros(K))
    assert found.explored_rows == 1  # of the budget of 6, two rows' floors of 3 would take all
    # Row 0 keeps its three slots; the best three of the others stay; (2, 1) of .54 is what goes.
    table = survival()
    before = table[:, 0].sum() + table[0, 1] + table[1, 1]
    after = table[0].sum() + table[1:, 0].sum()
    assert exploration.cost_tokens == pytest.approx(before - after)
    assert found.expected_tokens == pytest.approx(12.0 - (before - after))


def test_a_position_with_enough_labels_is_left_alone() -> None:
    """Guards against exploration that never ends."""
    exploration = Exploration(K, 0.01)
    assert not any(d.explored_rows for d in run(exploration, 400, 4.0, 4.0, 1.1))
    run(exploration, 400, 4.0, 4.0, 90.0)
    # A position that was very well known and starves now is noticed soon.
    starving = [
        exploration.aim(decision(), survival(), counts(400, 4.0, 4.0, 90.0)) for _ in range(60)
    ]
    assert any(d.explored_rows for d in starving)


@pytest.mark.parametrize("flag", ["is_probe", "is_uniform"])
def test_rounds_that_verify_rows_in_full_anyway_do_not_explore(flag: str) -> None:
    """Guards against a probe whose floor is lost, and a uniform round that leaves its path."""
    exploration = Exploration(K, 0.01)
    assert not any(d.explored_rows for d in run(exploration, 300, 4.0, 4.0, 0.0, **{flag: True}))
    assert exploration.cost_tokens == 0.0


def test_what_is_not_drafted_is_not_explored() -> None:
    """Guards against floors beyond the depth of the round, and against depth 0."""
    for depth, budget in ((0, 0), (2, 6)):
        exploration = Exploration(K, 0.01)
        for n in range(300):
            found = exploration.aim(
                decision(budget, depth=depth), survival(), counts(n + 1, 4.0, 4.0, 0.0)
            )
            assert not found.explored_rows
    # What is drafted is, although a deeper position starves as well.
    taken = [d for d in run(Exploration(K, 0.01), 300, 4.0, 0.0, 0.0, depth=2) if d.explored_rows]
    assert {int(d.min_verify_lens.max()) for d in taken} == {2}


def test_a_budget_too_small_for_the_position_is_not_exceeded() -> None:
    """Guards against a budget below the sum of the floors, which the trim may not see."""
    exploration = Exploration(K, 0.01)
    for n in range(300):
        found = exploration.aim(decision(2), survival(), counts(n + 1, 4.0, 4.0, 0.0))
        assert found.min_verify_lens.sum() <= 2
    assert exploration.num_rounds == 0
