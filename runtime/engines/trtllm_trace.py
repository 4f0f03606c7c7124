"""``av_trace``: what an engine tells of every step and request, and how steps fit together.

A row holds the features of the drafts that this step made, how many of them the next step verifies, and
what became of the drafts of the step before. Rows come with a request's results, one a step.

Invariants: rows of the runtime's buffer that no step wrote are told by their first value and skipped; two
rows belong together only if the later one verified as many drafts as the earlier one left; what does not
fit is counted, never trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRACE = "av_trace"
HEADER = 8
MARKER = 16726.0
ROUND_MODULUS = 1 << 24  # rounds are float32 there: exact below, so they wrap

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One step of one request.

    ``round`` counts the engine's steps, modulo ``ROUND_MODULUS``; ``version`` is that of the control block,
    −1 where all drafts were kept. ``verified_len``, ``num_accepted_tokens`` and ``accepted_path`` are of the
    drafts that this step verified; ``draft_len``, ``kept_len`` and ``features`` [K] f32 of those it made.
    """

    round: int
    version: int
    verified_len: int
    num_accepted_tokens: int
    accepted_path: int
    draft_len: int
    kept_len: int
    features: Float32


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """Drafts of one step with what the next one made of them."""

    features: Float32
    verified_len: int
    num_accepted_tokens: int
    accepted_path: int


def is_later(round: int, than: int) -> bool:
    """True if ``round`` comes after ``than``, wrapped or not."""
    return 0 < (round - than) % ROUND_MODULUS < ROUND_MODULUS // 2


def read_rows(output: Any, num_drafts: int) -> list[TraceRow]:
    """The rows of the tensor ``output`` [..., 8+K] that steps wrote, in its order."""
    values = np.asarray(output, np.float32).reshape(-1, HEADER + num_drafts)
    rows = []
    for value in values[values[:, 0] == MARKER]:
        head = value[:HEADER]
        if not np.isfinite(head).all() or not 0 <= head[1] < ROUND_MODULUS:
            continue
        round, version, verified, accepted, path, made, kept = (int(number) for number in head[1:])
        features = value[HEADER:]
        rows.append(TraceRow(round, version, verified, accepted, path, made, kept, features))
    return rows


class TraceReader:
    """Pairs the rows of every live request. ``num_unpaired`` counts steps whose drafts are not known."""

    def __init__(self, num_drafts: int) -> None:
        self.num_unpaired = 0
        self._num_drafts = num_drafts
        self._last: dict[int, TraceRow] = {}

    @property
    def live(self) -> dict[int, TraceRow]:
        """The last row of every request that has one and has not ended."""
        return self._last

    def read(
        self, request_id: int, output: Any, *, is_final: bool
    ) -> tuple[list[TraceRow], list[VerifiedDrafts]]:
        """Rows of ``output`` that were not read before, and the drafts whose fate they tell.

        ``output`` None is a result without a trace.
        """
        new: list[TraceRow] = []
        verified: list[VerifiedDrafts] = []
        for row in () if output is None else read_rows(output, self._num_drafts):
            before = self._last.get(request_id)
            if before is not None and not is_later(row.round, before.round):
                continue  # a result may hold all steps of the request again
            if before is not None and before.kept_len == row.verified_len:
                verified.append(
                    VerifiedDrafts(
                        before.features,
                        row.verified_len,
                        row.num_accepted_tokens,
                        row.accepted_path,
                    )
                )
            elif before is not None:
                self.num_unpaired += 1
            new.append(row)
            self._last[request_id] = row
        if is_final:
            self._last.pop(request_id, None)
        return new, verified
