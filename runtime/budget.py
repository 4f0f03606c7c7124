"""The draft budget of a round at given depths: the B that maximises expected tokens per millisecond.

E(B) = sampling rows + Σ survival of the floored slots + Σ of the best B − Σ floors other survivals;
C(B) = verify_ms(base tokens + B) + draft_ms. Every B is looked at: under a staircase the first descent
is often not the best, since later tokens of a bucket pay back its step.

Invariants: survival comes from earlier rounds; Σ floors ≤ B ≤ Σ draft_lens; on equal E/C the largest B
of the same bucket wins, since its padding is paid for anyway; the order of requests does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_av.runtime.cost_model import CostModel

Floats = NDArray[np.floating[Any]]
Int32 = NDArray[np.int32]


class BudgetChoice(NamedTuple):
    """``budget`` drafts to verify, floors included; the tokens expected from the round, and its ms.

    ``uniform_tokens`` and ``uniform_ms`` are those of a round that verifies all it drafts.
    """

    budget: int
    expected_tokens: float
    cost_ms: float
    uniform_tokens: float
    uniform_ms: float

    @property
    def tokens_per_ms(self) -> float:
        return self.expected_tokens / self.cost_ms


def lens_at_depth(draft_limits: Int32, floors: Int32, depth: int | Int32) -> Int32:
    """Drafts of each row, int32 [R] (or [D, R] for ``depth`` [D, 1]); no row is bound below its floor."""
    lens: Int32 = np.maximum(floors, np.asarray(depth, np.int32))
    return np.minimum(lens, draft_limits, out=lens)


def find_budgets(
    survival: Floats,
    draft_limits: Int32,
    floors: Int32,
    base_tokens: int,
    cost_model: CostModel,
    depths: Sequence[int],
    *,
    sampling_rows: int,
    dtype: DTypeLike = np.float32,
) -> list[BudgetChoice]:
    """The best budget at each of ``depths``, the most that a row drafts beyond its floor.

    Args:
        survival: [R, K] from earlier rounds; NaN counts as 0.
        draft_limits: [R] int32, the most each row may draft; 0 for rows that never do.
        floors: [R] int32, at most ``draft_limits``: drafts that are verified in any case. They are
            drafted at any depth, and the drafter's cost is that of the deepest row.
        base_tokens: tokens of the verify pass that are no drafts.
        sampling_rows: rows that emit one token even without drafts.
        dtype: the float type that survivals are compared in; sums are f64.
    """
    num_rows = draft_limits.size
    lens = lens_at_depth(draft_limits, floors, np.array(depths, np.int32)[:, None])
    num_valid = np.add.reduce(lens, axis=1).tolist()
    num_floored = int(np.add.reduce(floors))
    num_free = max(num_valid) - num_floored
    deepest = np.maximum.reduce(lens, axis=1, initial=0).tolist()
    num_drafters = int(np.count_nonzero(draft_limits))

    # All depths at once, position-major [D, P, R]: at these sizes a call costs more than its arithmetic.
    # What a depth does not draft counts as survival 0: it sorts behind all else and adds nothing.
    num_positions = max(deepest)
    positions = np.arange(num_positions, dtype=np.int32)[:, None]
    by_position = survival.T[:num_positions]
    slots = np.zeros((len(depths), num_positions, num_rows), dtype)
    np.copyto(slots, by_position, where=positions < lens[:, None, :])
    np.fmax(slots, 0, out=slots)  # NaN becomes 0
    least_tokens = float(sampling_rows)
    if num_floored:
        is_floored = positions < floors
        least_tokens += float(np.sum(slots[0], where=is_floored, dtype=np.float64))
        np.copyto(slots, 0, where=is_floored)
    ranked = slots.reshape(len(depths), num_positions * num_rows)
    ranked.sort(axis=1)

    expected = np.empty((len(depths), num_free + 1))
    expected[:, 0] = least_tokens
    expected[:, 1:] = ranked[:, ranked.shape[1] - num_free :][:, ::-1]
    np.add.accumulate(expected, axis=1, out=expected)
    draft_ms = [
        # At depth 0 only floored rows draft; without any, all caches of the drafter are kept up to date.
        cost_model.draft_ms(
            num_drafters if depth or not num_floored else int(np.count_nonzero(floors)), longest
        )
        for depth, longest in zip(depths, deepest, strict=True)
    ]
    least = base_tokens + num_floored
    verify_ms = cost_model.verify_row(least, least + num_free)
    rate = np.add(verify_ms, np.array(draft_ms)[:, None])
    np.divide(expected, rate, out=rate)

    choices = []
    for index, first_best in enumerate(rate.argmax(axis=1).tolist()):
        full = num_valid[index] - num_floored
        # Within a bucket E/C cannot fall, so its end is as good as the first maximum.
        bucket_end = cost_model.bucket(least + first_best) - base_tokens
        budget = min(bucket_end, num_valid[index])
        tokens = float(expected[index, budget - num_floored])
        cost_ms = float(verify_ms[budget - num_floored]) + draft_ms[index]
        uniform_tokens = float(expected[index, full])
        uniform_ms = float(verify_ms[full]) + draft_ms[index]
        choices.append(BudgetChoice(budget, tokens, cost_ms, uniform_tokens, uniform_ms))
    return choices
