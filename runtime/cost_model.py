"""What a step costs: verify by tokens, draft by requests and depth, in ms.

Captured sizes make a staircase: up to the graph limit a step of T tokens pads to the next captured size
and costs what that costs. Above the limit steps run unpadded: interpolation between the points above it,
and behind the last one its slope goes on.

Invariants: no cost falls with more tokens, requests or depth (running maximum over what was measured);
``bucket`` and ``verify_ms`` describe the same staircase.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.cost_table import CostTable, ProfileKey

Float64 = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


class _Curve:
    """A rising piecewise linear curve; constant before its first point, the last slope behind its last."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._sizes = np.array([size for size, _ in points], np.float64)
        self._costs = np.maximum.accumulate(np.array([cost for _, cost in points], np.float64))
        self._slope = 0.0
        if len(points) > 1:
            rise, run = self._costs[-1] - self._costs[-2], self._sizes[-1] - self._sizes[-2]
            self._slope = float(rise / run)

    def at(self, sizes: Ints) -> Float64:
        beyond = np.maximum(sizes - self._sizes[-1], 0.0) * self._slope
        return np.asarray(np.interp(sizes, self._sizes, self._costs) + beyond, np.float64)


class CostModel:
    """The costs of one engine and one drafter.

    ``num_positions`` is the depth of a full draft. A table by requests alone is for that depth: a block
    drafter pays it at every depth above 0, an autoregressive one in proportion to the depth.
    """

    def __init__(self, table: CostTable, *, num_positions: int, is_block: bool = False) -> None:
        if num_positions < 1:
            raise ValueError(f"num_positions={num_positions} must be ≥ 1")
        self.num_positions = num_positions
        self.is_block = is_block
        rising = np.maximum.accumulate([ms for _, ms in table.verify])
        verify = [(tokens, float(ms)) for (tokens, _), ms in zip(table.verify, rising, strict=True)]
        self._captured = [tokens for tokens, _ in verify if tokens <= table.graph_limit_tokens]
        self._captured_array = np.array(self._captured, np.int64)
        self._captured_ms = np.array([ms for _, ms in verify[: len(self._captured)]])
        # With fewer than two points above the limit the slope comes from the last two of the table.
        above = verify[len(self._captured) :]
        self._above = _Curve(above if len(above) > 1 else verify[-2:])
        self._first_above = above[0][1] if above else 0.0
        self._draft_curves = _draft_curves(table, num_positions)
        self._draft_cache: dict[tuple[int, int], float] = {}
        self._dense: Float64 = np.empty(0)

    @classmethod
    def from_table(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        num_positions: int,
        is_block: bool = False,
        key: ProfileKey | None = None,
    ) -> CostModel:
        """Read a JSON file or object in the format of ``cost_table``; CostTableError if it is unusable."""
        return cls(CostTable.load(source, key), num_positions=num_positions, is_block=is_block)

    def bucket(self, tokens: int) -> int:
        """The size that a step of ``tokens`` runs at: the next captured one, itself above them."""
        index = bisect_left(self._captured, tokens)
        return self._captured[index] if index < len(self._captured) else tokens

    def verify_ms(self, tokens: Ints) -> Float64:
        """Cost of verifying ``tokens`` [N] (non-draft tokens and drafts together), [N] f64 in ms."""
        costs = np.maximum(self._above.at(tokens), self._first_above)
        if self._captured:
            index = np.searchsorted(self._captured_array, tokens)
            is_captured = index < self._captured_array.size
            costs[is_captured] = self._captured_ms[index[is_captured]]
        return costs

    def verify_row(self, first: int, last: int) -> Float64:
        """The costs of ``first`` … ``last`` tokens, a view [last−first+1] not to be written to."""
        if last >= self._dense.size:
            self._dense = self.verify_ms(np.arange(max(last + 1, 2 * self._dense.size)))
        return self._dense[first : last + 1]

    def draft_ms(self, requests: int, depth: int) -> float:
        """Cost of drafting ``depth`` tokens for each of ``requests`` rows, in ms.

        A block drafter drafts all positions at any depth above 0. Depth 0 costs what keeping the
        drafter's cache up to date was measured to cost, else nothing.
        """
        if depth and self.is_block:
            depth = self.num_positions
        cost = self._draft_cache.get((requests, depth))
        if cost is None:
            cost = self._interpolate_draft(requests, depth)
            self._draft_cache[requests, depth] = cost
        return cost

    def _interpolate_draft(self, requests: int, depth: int) -> float:
        if requests == 0:
            return 0.0
        sizes = np.array([requests])
        by_depth = [(at, float(curve.at(sizes)[0])) for at, curve in self._draft_curves]
        deepest = by_depth[-1][0]
        # Beyond the deepest in proportion: a slope could fall with more requests.
        cost = float(_Curve(by_depth).at(np.array([min(depth, deepest)]))[0])
        return cost * max(depth / deepest, 1.0)


def _draft_curves(table: CostTable, num_positions: int) -> list[tuple[int, _Curve]]:
    """(depth, cost over requests) in ascending depth, from depth 0 on."""
    by_depth: dict[int, list[tuple[int, float]]] = {}
    for requests, depth, ms in table.draft:
        by_depth.setdefault(num_positions if depth is None else depth, []).append((requests, ms))
    by_depth.setdefault(0, [(1, 0.0)])
    return [(depth, _Curve(by_depth[depth])) for depth in sorted(by_depth)]
