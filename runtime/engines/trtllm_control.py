"""Writing control blocks: one in this process, or one for each rank of a job, so that all ranks agree.

A block names the newest round that went into it and is used in later rounds only. With one block that round
is past, and the next step uses it. With several, the round lies ahead of all ranks, so that each of them
changes over in the same step; until it has passed everywhere nothing else is written.

Invariants: all ranks get the same bytes for the same round; a write that has to wait is dropped, never
queued, since newer numbers will follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trtllm_av.plugins.control_block import Progress

#: Rounds between the foremost rank and the one in which a write counts: writing takes less.
RANK_MARGIN = 4


class Block(Protocol):
    """What is used of ``ControlBlock``."""

    def write(
        self, *, budget: int, coefficients: Sequence[float], floor: int = 1, round: int
    ) -> int:
        """Trim from the first round after ``round`` on."""

    def verify_all(self, *, round: int) -> int:
        """Verify everything from the first round after ``round`` on."""

    def progress(self) -> Progress:
        """The last round that was trimmed."""


class ControlWriter:
    """Writes ``blocks``, one for each rank."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            raise ValueError("a job has at least one control block")
        self._blocks = tuple(blocks)
        self._pending: int | None = None

    @property
    def newest_round(self) -> int:
        """The last round that the foremost rank trimmed."""
        return max(block.progress().round for block in self._blocks)

    def write(self, *, budget: int, coefficients: Sequence[float], floor: int, round: int) -> bool:
        """Trim to ``budget``; ``round`` is the newest that the numbers come from. False if it has to wait."""
        at = self._next_round(round)
        if at is None:
            return False
        for block in self._blocks:
            block.write(budget=budget, coefficients=coefficients, floor=floor, round=at)
        return True

    def verify_all(self, *, round: int) -> bool:
        """Verify every draft; False if it has to wait."""
        at = self._next_round(round)
        if at is None:
            return False
        for block in self._blocks:
            block.verify_all(round=at)
        return True

    def _next_round(self, round: int) -> int | None:
        if len(self._blocks) == 1:
            return round
        progress = [block.progress().round for block in self._blocks]
        if self._pending is not None and min(progress) <= self._pending:
            return None
        self._pending = max(*progress, round) + RANK_MARGIN
        return self._pending
