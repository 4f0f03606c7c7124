"""Recorded requests served again: a few at a time, in rounds, with what each round taught.

A recording's rounds depend on no other request, so they may be served in any company: ``LANES`` requests
at once, the product's usual batch, each taking its next recorded round in every round. Refits then
come as often, in labels, as they do when served.

Invariants: a row is one round of one request, in the order of serving; what a rule may read of a row
(``features``) was known before the row's drafts; labels and overlaps of position i stand at column i.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recording.rows import TRIMMED, DraftRows
from trtllm_av.runtime.adaptive_options import FEATURE_BOUND, TEMPERATURE_FLOOR
from trtllm_av.runtime.confidence import COLD_FEATURE
from trtllm_av.runtime.recent_acceptance import RecentAcceptance

LANES = 8

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
#: Columns of a recording that are laid out as [M, K].
_COLUMNS = {
    "raw_log_odds": "feature",
    "top2_gap": "gap",
    "entropy": "entropy",
    "log_probability": "log_probability",
    "head_logit": "head_logit",
}


@dataclass(frozen=True, slots=True)
class Stream:
    """M rows of K positions.

    ``features`` maps names to [M, K] f32, unclamped: ``raw_log_odds`` at the request's own temperature,
    ``log_odds`` at the temperature that the product scores with, ``tail`` −log(1 − q_max) there, and more;
    ``labels`` [M, K]: 1, 0, the soft label at a first trimmed position, NaN elsewhere; ``is_judged`` [M, K]:
    the target judged this draft; ``overlaps`` [M, K]: Σ min(p, q) where there is a label; ``round`` [M] of
    serving, rising; ``request``, ``data_set`` [M]. ``by_scale`` [M, K, S]: the feature at other
    temperatures, where that was recorded.
    """

    features: Mapping[str, Floats]
    labels: Floats
    overlaps: Floats
    is_judged: NDArray[np.bool_]
    round: Ints
    request: Ints
    data_set: Ints
    by_scale: Floats

    @property
    def num_positions(self) -> int:
        return int(self.labels.shape[1])


def serve(rows: DraftRows, *, order: Sequence[int] | None = None, lanes: int = LANES) -> Stream:
    """Serve the requests of ``rows`` (``order``: their numbers; default: as recorded)."""
    num_positions = int(rows.meta["num_positions"])
    starts = np.flatnonzero(
        np.append(True, (np.diff(rows.request) != 0) | (np.diff(rows.round) != 0))
    )
    row_of = np.repeat(np.arange(starts.size), np.diff(np.append(starts, len(rows))))
    owner = rows.request[starts]
    first = np.flatnonzero(np.append(True, np.diff(owner) != 0))
    counts = np.diff(np.append(first, owner.size))
    numbers = owner[first].tolist()
    length_of = dict(zip(numbers, counts.tolist(), strict=True))
    begins = _schedule([length_of[n] for n in (order or numbers)], lanes)
    begin_of = dict(zip(order or numbers, begins, strict=True))
    own = np.arange(owner.size) - np.repeat(first, counts)
    is_served = np.isin(owner, list(begin_of))
    when = np.array([begin_of.get(n, 0) for n in owner.tolist()]) + own
    sequence = np.argsort(when + np.where(is_served, 0, 1 << 40), kind="stable")
    sequence = sequence[: int(is_served.sum())]

    def lay_out(values: NDArray[Any], missing: float) -> Floats:
        table = np.full((starts.size, num_positions, *values.shape[1:]), missing, np.float32)
        table[row_of, rows.position] = values
        return np.asarray(table[sequence], np.float32)

    label = lay_out(rows.label, np.nan)
    overlaps = lay_out(rows.overlap, np.nan)
    features = {name: lay_out(getattr(rows, column), 0.0) for name, column in _COLUMNS.items()}
    by_scale = lay_out(rows.feature_by_scale, 0.0)
    features["log_odds"] = features["raw_log_odds"]
    if 0.0 < rows.meta["temperature"] < TEMPERATURE_FLOOR:
        features["log_odds"] = by_scale[:, :, rows.meta["scales"].index(TEMPERATURE_FLOOR)]
    # 0 at the typical log-odds, as the log-odds' own share is there what the intercepts start from.
    features["tail"] = np.logaddexp(0, features["log_odds"]) - np.float32(
        np.logaddexp(0, COLD_FEATURE)
    )
    is_judged = np.isfinite(label) & (label != TRIMMED)
    request = owner[sequence].astype(np.int64)
    recent = _recent_acceptance(request, own[sequence], label)
    features["recent_acceptance"] = np.repeat(recent[:, None], num_positions, 1)
    return Stream(
        features,
        np.where(label == TRIMMED, overlaps, label).astype(np.float32),
        overlaps,
        is_judged,
        when[sequence],
        request,
        rows.data_set[starts][sequence].astype(np.int64),
        by_scale,
    )


def join(streams: Sequence[Stream]) -> Stream:
    """``streams`` of one drafter, one after another, as one engine would serve them."""
    rounds, requests, at, number = [], [], 0, 0
    for one in streams:
        rounds.append(one.round + at)
        requests.append(one.request + number)
        at, number = int(rounds[-1].max()) + 1, int(requests[-1].max()) + 1
    names = streams[0].features
    return Stream(
        {name: np.concatenate([one.features[name] for one in streams]) for name in names},
        np.concatenate([one.labels for one in streams]),
        np.concatenate([one.overlaps for one in streams]),
        np.concatenate([one.is_judged for one in streams]),
        np.concatenate(rounds),
        np.concatenate(requests),
        np.concatenate([one.data_set for one in streams]),
        np.zeros((sum(map(len, rounds)), streams[0].num_positions, 0), np.float32),
    )


def clamp(values: Floats, bound: float = FEATURE_BOUND) -> Floats:
    return np.clip(values, -bound, bound)


def _schedule(lengths: Sequence[int], lanes: int) -> list[int]:
    """First round of each request: it takes the lane that gets free first."""
    free = [0] * lanes
    begins = []
    for length in lengths:
        begin = heapq.heappop(free)
        begins.append(begin)
        heapq.heappush(free, begin + length)
    return begins


def _recent_acceptance(request: Ints, own: Ints, label: Floats) -> Floats:
    """[M]: the product's feature, from the rounds of the same request before."""
    feature = np.zeros(request.size, np.float32)
    keeper = RecentAcceptance(int(request.max()) + 1)
    judged = (np.isfinite(label) & (label != TRIMMED)).sum(axis=1)
    accepted = (label == 1).sum(axis=1)
    order = np.argsort(own, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(own[order])) + 1):
        feature[rows] = keeper.feature(request[rows])
        keeper.update(request[rows], judged[rows], accepted[rows])
    return feature
