"""The last rounds of an engine as plain numbers, copied while it runs and added up when somebody asks.

Invariants: adding a round copies and does no arithmetic on rows; ``take`` hands every round
out once; a full log is the owner's to take, no round is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.runtime.cost_model import CostModel

_CAPACITY = 256
# Columns of the numbers kept per round.
_NUM_COLUMNS = 8
_ROWS, _BUDGET, _DECIDED, _EMITTED, _SECONDS, _PROBE, _EXPLORED, _VERSION = range(_NUM_COLUMNS)

Ints = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """N finished rounds, an entry each, of an engine with K draft positions.

    ``live``: rows that decoded; ``depth``: drafts of the longest row; ``budget``: drafts that were to be
    verified; ``decided_budget``: what the controller decided (0 where nothing adapts); ``drafted``,
    ``verified``, ``accepted``, ``emitted``: tokens; ``verify_lens`` [N, K+1]: rows by verified length;
    ``explored``: rows verified deeper for the sake of labels; ``measured_ms``: wall-clock time;
    ``predicted_ms``: what the cost model says of the round that ran, NaN without one; ``version`` of the
    coefficients. ``by_position`` [4, K]: drafts drafted, verified, judged and accepted at each position, all
    rounds together.
    """

    live: Ints
    depth: Ints
    budget: Ints
    decided_budget: Ints
    drafted: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints
    explored: Ints
    version: Ints
    is_probe: NDArray[np.bool_]
    measured_ms: Float64
    predicted_ms: Float64
    verify_lens: Ints
    by_position: Ints

    def __len__(self) -> int:
        return int(self.live.size)


class RoundLog:
    """A buffer of ``capacity`` rounds of at most ``max_rows`` rows and ``num_positions`` drafts a row."""

    def __init__(
        self,
        num_positions: int,
        max_rows: int,
        cost_model: CostModel | None,
        *,
        capacity: int = _CAPACITY,
    ) -> None:
        self._num_positions, self._cost_model = num_positions, cost_model
        self._lens = np.zeros((capacity, 3, max_rows), np.int8)
        self._numbers: list[tuple[float, ...]] = []

    @property
    def is_full(self) -> bool:
        return len(self._numbers) == len(self._lens)

    def add(
        self,
        draft_lens: Tensor,
        verify_lens: Tensor,
        accepted_lens: Tensor,
        *,
        budget: int,
        decided_budget: int,
        emitted: int,
        seconds: float,
        is_probe: bool,
        explored: int,
        version: int,
    ) -> None:
        """Keep a round; the lengths are [R] on the host."""
        rows, lens = draft_lens.numel(), self._lens[len(self._numbers)]
        lens[0, :rows] = draft_lens.numpy()
        lens[1, :rows] = verify_lens.numpy()
        lens[2, :rows] = accepted_lens.numpy()
        self._numbers.append(
            (rows, budget, decided_budget, emitted, seconds, is_probe, explored, version)
        )

    def take(self) -> RoundBatch:
        """The rounds since the last call, in order."""
        count = len(self._numbers)
        numbers = np.array(self._numbers, np.float64).reshape(count, _NUM_COLUMNS).T
        self._numbers.clear()
        live = numbers[_ROWS].astype(np.int64)
        is_row = np.arange(self._lens.shape[2]) < live[:, None]
        draft, verify, accept = (
            np.where(is_row, self._lens[:count, part], 0).astype(np.int64) for part in range(3)
        )
        depth = draft.max(axis=1, initial=0)
        verified = verify.sum(axis=1)
        lengths = range(self._num_positions + 1)
        return RoundBatch(
            live=live,
            depth=depth,
            budget=numbers[_BUDGET].astype(np.int64),
            decided_budget=numbers[_DECIDED].astype(np.int64),
            drafted=draft.sum(axis=1),
            verified=verified,
            accepted=accept.sum(axis=1),
            emitted=numbers[_EMITTED].astype(np.int64),
            explored=numbers[_EXPLORED].astype(np.int64),
            version=numbers[_VERSION].astype(np.int64),
            is_probe=numbers[_PROBE] > 0,
            measured_ms=1e3 * numbers[_SECONDS],
            predicted_ms=self._predict(live, depth, verified),
            verify_lens=np.stack([((verify == n) & is_row).sum(axis=1) for n in lengths], 1),
            by_position=np.array(
                [
                    [int((lens > position).sum()) for position in range(self._num_positions)]
                    for lens in (draft, verify, np.minimum(accept + 1, verify), accept)
                ],
                np.int64,
            ).reshape(4, self._num_positions),
        )

    def _predict(self, live: Ints, depth: Ints, verified: Ints) -> Float64:
        """[N] modelled cost in ms of rounds of these sizes."""
        cost_model = self._cost_model
        if cost_model is None or not live.size:
            return np.full(live.size, np.nan)
        pairs = zip(live.tolist(), depth.tolist(), strict=True)
        draft_ms = np.array([cost_model.draft_ms(rows, deepest) for rows, deepest in pairs])
        return np.asarray(cost_model.verify_ms(live + verified) + draft_ms, np.float64)
