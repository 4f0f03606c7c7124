"""The decision of a round: how deep to draft (d), how many drafts to verify (B), and when to probe.

A round tries depth 0 (plain decoding), the present d and one neighbour, each at its best budget. The
neighbours take turns, nearest first, so that every depth is tried within K rounds and a staircase cannot
hold d at a local best; a block drafter has 0 and K only. The first round tries all.

Probes keep depths that are not drafted from starving of labels. Round 1 and then every P-th round drafts
d + 1 tokens (a block drafter K) and verifies the whole draft of one row. P starts at 8 and doubles up to
64; it falls back to 8 when accepted tokens leave the 95 % interval of the expected.

Invariants: everything read here comes from earlier rounds; the probe row goes round robin among adaptive
rows, never by survival; a budget is no less than Σ floors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_av.runtime.budget import BudgetChoice, Floats, Int32, find_budgets, lens_at_depth
from trtllm_av.runtime.cost_model import CostModel

MIN_PROBE_PERIOD = 8
MAX_PROBE_PERIOD = 64
_NORMAL_95 = 1.96
#: Standard error of a forecast relative to itself that no draw explains: the confidences of good fits are
#: off by .006 to .026 (docs/estimator.md). Over many rows it is all that the interval is made of.
_FORECAST_ERROR = 0.03
_ROUNDING = 1e-6


class Decision(NamedTuple):
    """What a round is to do, fixed before its first draw.

    ``depth`` binds adaptive rows. ``draft_lens`` and ``min_verify_lens`` [R] int32 are what each row
    drafts and what of it is verified in any case; ``budget`` counts the latter. ``expected_tokens`` and
    ``cost_ms`` are of the whole round. ``probe_row`` is −1 unless ``is_probe``. ``is_uniform``: all drafts
    are verified, because trimming them would gain too little. ``explored_rows`` have a floor for the sake of
    labels.
    """

    depth: int
    budget: int
    draft_lens: Int32
    min_verify_lens: Int32
    expected_tokens: float
    cost_ms: float
    is_probe: bool
    probe_row: int
    is_uniform: bool = False
    explored_rows: int = 0


class DepthController:
    """Keeps d and the probe schedule between rounds.

    ``num_probes`` and ``probe_ms`` report how many rounds were probes, and their modelled cost.
    ``min_gain`` is the share by which the best budget has to beat the best depth at which everything is
    verified; below it the round takes the latter. Both are forecasts from earlier rounds.
    """

    def __init__(
        self, cost_model: CostModel, *, min_gain: float = 0.0, dtype: DTypeLike = np.float32
    ) -> None:
        self.num_probes = 0
        self.probe_ms = 0.0
        self.probe_period = MIN_PROBE_PERIOD
        self._cost_model = cost_model
        self._min_gain = min_gain
        self._dtype = dtype
        self._depth: int | None = None
        self._turn = 0
        self._rounds_to_probe = 1
        self._next_probe_row = 0

    def decide(
        self,
        survival: Floats,
        draft_limits: Int32,
        floors: Int32,
        base_tokens: int,
        *,
        sampling_rows: int,
    ) -> Decision:
        """Decide the next round; the arguments are those of ``find_budgets``."""

        def find(floors: Int32, depths: Sequence[int]) -> list[BudgetChoice]:
            return find_budgets(
                survival,
                draft_limits,
                floors,
                base_tokens,
                self._cost_model,
                depths,
                sampling_rows=sampling_rows,
                dtype=self._dtype,
            )

        is_adaptive = floors < draft_limits
        deepest = int(np.maximum.reduce(draft_limits, initial=0, where=is_adaptive))
        self._rounds_to_probe -= 1
        is_probe = deepest > 0 and self._rounds_to_probe <= 0
        probe_row = -1
        is_uniform = False
        if not is_probe or self._depth is None:
            depths = self._depths_to_try(deepest)
            depth, choice, is_uniform = self._take_best(depths, find(floors, depths), deepest)
        if is_probe:
            is_uniform = False
            depth = self._probe_depth(deepest)
            probe_row = self._take_probe_row(is_adaptive)
            floors = floors.copy()
            floors[probe_row] = min(depth, int(draft_limits[probe_row]))
            (choice,) = find(floors, (depth,))
            self._count_probe(choice.cost_ms)
        draft_lens = lens_at_depth(draft_limits, floors, depth)
        return Decision(
            depth=depth,
            budget=int(np.add.reduce(draft_lens)) if is_uniform else choice.budget,
            draft_lens=draft_lens,
            min_verify_lens=draft_lens if is_uniform else floors,
            expected_tokens=choice.uniform_tokens if is_uniform else choice.expected_tokens,
            cost_ms=choice.uniform_ms if is_uniform else choice.cost_ms,
            is_probe=is_probe,
            probe_row=probe_row,
            is_uniform=is_uniform,
        )

    def observe(self, expected_accepted: float, variance: float, actual_accepted: float) -> None:
        """Compare the accepted drafts of finished rounds with what their own confidences promised.

        ``variance`` is that of the accepted drafts if every confidence is right. Outside of the 95 %
        interval the fit no longer describes the workload: probe often again.
        """
        deviation = abs(actual_accepted - expected_accepted)
        error = math.hypot(math.sqrt(max(variance, 0.0)), _FORECAST_ERROR * expected_accepted)
        if not deviation <= _NORMAL_95 * error + _ROUNDING:  # nor is NaN a promise that was kept
            self.probe_period = MIN_PROBE_PERIOD
            self._rounds_to_probe = min(self._rounds_to_probe, MIN_PROBE_PERIOD)

    def _take_best(
        self, depths: Sequence[int], choices: Sequence[BudgetChoice], deepest: int
    ) -> tuple[int, BudgetChoice, bool]:
        """The best of ``depths``, and True if everything is to be verified there; d moves there."""
        # On equal rates the first one, the present depth, stays.
        best = max(range(len(depths)), key=lambda index: choices[index].tokens_per_ms)
        is_uniform = False
        if self._min_gain > 0.0:
            plain = max(
                range(len(depths)),
                key=lambda index: choices[index].uniform_tokens / choices[index].uniform_ms,
            )
            rate = choices[plain].uniform_tokens / choices[plain].uniform_ms
            is_uniform = choices[best].tokens_per_ms < (1.0 + self._min_gain) * rate
            best = plain if is_uniform else best
        if deepest > 0 and (self._depth is None or best > 0):
            self._depth = depths[best]
            self._turn = 0
        return depths[best], choices[best], is_uniform

    def _depths_to_try(self, deepest: int) -> Sequence[int]:
        """The present depth first; ``deepest`` 0 leaves no other."""
        if deepest == 0:
            return (0,)
        if self._depth is None:
            return (0, deepest) if self._cost_model.is_block else range(deepest + 1)
        present = min(self._depth, deepest)
        depths = [present]
        if present > 0:
            depths.append(0)
        neighbours = _neighbours(present, deepest, self._cost_model.is_block)
        if neighbours:
            depths.append(neighbours[self._turn % len(neighbours)])
            self._turn += 1
        return depths

    def _probe_depth(self, deepest: int) -> int:
        return deepest if self._cost_model.is_block else min((self._depth or 0) + 1, deepest)

    def _take_probe_row(self, is_adaptive: NDArray[np.bool_]) -> int:
        rows = np.flatnonzero(is_adaptive)
        index = int(np.searchsorted(rows, self._next_probe_row)) % rows.size
        row = int(rows[index])
        self._next_probe_row = row + 1
        return row

    def _count_probe(self, cost_ms: float) -> None:
        self.num_probes += 1
        self.probe_ms += cost_ms
        self._rounds_to_probe = self.probe_period
        self.probe_period = min(2 * self.probe_period, MAX_PROBE_PERIOD)


@lru_cache(maxsize=1024)
def _neighbours(depth: int, deepest: int, is_block: bool) -> tuple[int, ...]:
    """The depths above 0 other than ``depth``, in the order they are tried: d−1, d+1, d−2, …"""
    others = (deepest,) if is_block else range(1, deepest + 1)
    return tuple(sorted((at for at in others if at != depth), key=lambda at: (abs(at - depth), at)))
