"""Measures a cost table at start-up and keeps it for the next start.

Invariants: only shapes that the scheduler can produce are measured (``tokens`` over min(tokens,
max_requests) requests); a cached table is used only if its key is this engine's and it covers the sizes
asked for; a file is written whole or not at all; a damaged or foreign file is measured again, with a log
message.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trtllm_av.runtime.cost_table import CostTable, ProfileKey
from trtllm_av.runtime.errors import CostTableError

logger = logging.getLogger(__name__)

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class ProfileSizes:
    """What to measure: token counts of the verify pass, request counts and depths of the drafter.

    ``verify_tokens`` up to ``graph_limit_tokens`` are the captured sizes (0: no step is padded).
    """

    max_requests: int
    verify_tokens: tuple[int, ...]
    draft_requests: tuple[int, ...]
    draft_depths: tuple[int, ...]
    graph_limit_tokens: int = 0

    @classmethod
    def without_graphs(
        cls, max_requests: int, num_positions: int, *, is_block: bool
    ) -> ProfileSizes:
        """Sizes for an engine that captures nothing, each 1.3 to 1.5 times the one before.

        An autoregressive drafter is measured at depth 1 and K, a block drafter at K.
        """
        return cls(
            max_requests=max_requests,
            verify_tokens=_ladder(max_requests * (num_positions + 1)),
            draft_requests=_ladder(max_requests),
            draft_depths=(num_positions,) if is_block else tuple(sorted({1, num_positions})),
        )

    def are_covered_by(self, table: CostTable) -> bool:
        """True if ``table`` holds every size and pads alike."""
        drafted = {(requests, depth) for requests, depth, _ in table.draft}
        wanted = {
            (requests, depth) for requests in self.draft_requests for depth in self.draft_depths
        }
        return (
            table.graph_limit_tokens == self.graph_limit_tokens
            and {tokens for tokens, _ in table.verify} >= set(self.verify_tokens)
            and drafted >= wanted
        )


def measure_costs(
    verify: Callable[[int, int], object],
    draft: Callable[[int, int], object],
    sizes: ProfileSizes,
    key: ProfileKey,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time an engine: the fastest of 5 runs at each size, after one that warms it up.

    Whatever else the machine does only adds to a time. The sizes take turns, so that a slow phase of the
    machine falls on all of them: the running maximum of a cost model would carry one size's bad moment
    to all larger ones. ``verify(tokens, requests)`` runs one verify pass of ``tokens`` tokens over
    ``requests`` requests, ``draft(requests, depth)`` drafts ``depth`` tokens for each; both return when
    the work is done. ``clock`` counts seconds.
    Raises CostTableError if the costs cannot steer (flat), also when measured a second time.
    """
    verified = [(tokens, min(tokens, sizes.max_requests)) for tokens in sizes.verify_tokens]
    drafted = list(itertools.product(sizes.draft_requests, sizes.draft_depths))

    def measure() -> CostTable:
        verify_ms = _take_turns(verify, verified, clock)
        draft_ms = _take_turns(draft, drafted, clock)
        return CostTable.load(
            {
                "key": asdict(key),
                "unit": "ms",
                "graph_limit_tokens": sizes.graph_limit_tokens,
                "verify_ms_by_tokens": [
                    [tokens, ms] for (tokens, _), ms in zip(verified, verify_ms, strict=True)
                ],
                "draft_ms_by_requests_and_depth": [
                    [requests, depth, ms]
                    for (requests, depth), ms in zip(drafted, draft_ms, strict=True)
                ],
            }
        )

    try:
        return measure()
    except CostTableError as error:
        logger.warning("measuring step costs a second time: %s", error)
        return measure()


def _take_turns(
    run: Callable[[int, int], object],
    arguments: Sequence[tuple[int, int]],
    clock: Callable[[], float],
) -> list[float]:
    """Least ms of ``run`` at each of ``arguments``, which are timed in turns."""
    times: list[list[float]] = [[] for _ in arguments]
    for turn in range(1 + _REPEATS):
        for index, (first, second) in enumerate(arguments):
            start = clock()
            run(first, second)
            if turn > 0:  # the first turn warms up
                times[index].append(1e3 * (clock() - start))
    return [min(each) for each in times]


def load_or_measure(
    cache_folder: Path,
    verify: Callable[[int, int], object],
    draft: Callable[[int, int], object],
    sizes: ProfileSizes,
    key: ProfileKey,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """The cached table of ``key`` if there is a good one, else a new measurement, which is cached."""
    identity = json.dumps(asdict(key), sort_keys=True)
    path = cache_folder / f"costs-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    if os.path.exists(path):  # False, too, in a folder that may not be looked into
        try:
            table = CostTable.load(path, key)
        except CostTableError as error:
            logger.warning("measuring step costs again: %s", error)
        else:
            if table.key == key and sizes.are_covered_by(table):
                return table
            logger.info("measuring step costs again: %s lacks sizes of this engine", path)
    table = measure_costs(verify, draft, sizes, key, clock=clock)
    try:
        write_whole(path, json.dumps(table.to_json(), indent=1))
    except OSError as error:
        logger.warning("step costs are not cached (%s); they are measured at every start", error)
    return table


def write_whole(path: Path, text: str) -> None:
    """Write ``path`` so that a reader sees the old content or the new, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _ladder(last: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, … up to ``last``, which is always there."""
    steps = {start << shift for shift in range(last.bit_length()) for start in (1, 3)}
    return tuple(sorted({step for step in steps if step < last} | {last}))
