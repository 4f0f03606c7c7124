"""Labelled drafts as columns, and their file.

A row is a draft that the target judged (label 0 or 1), or the first trimmed one behind accepted drafts
(label ``TRIMMED``), of which only ``overlap`` is known. Rows are sorted by request, round, position.

Invariants: a draft behind a rejection, behind the first trimmed one or behind a stop has no row; every
number of a row but its label and overlap existed before the draft was drawn, except
``log_probability``, which is the drawn token's and exists to show what must not be used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.errors import UsageError

#: Label of a draft that was not verified.
TRIMMED = 2
_FORMAT = 1

Column = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """N drafts of one run.

    ``data_set`` uint8 [N], an index into ``meta["data_sets"]``; ``request``, ``round`` int32: numbers of the
    run; ``position`` int8, 0-based; ``feature`` f16, log-odds of the drafter's top token at the scoring
    temperature, before top-k and top-p, clamped to ±40; ``gap`` f16, top log-odds between the two likeliest
    tokens; ``entropy`` f16 in nats; ``log_probability`` f16, log q of the drawn token; ``overlap`` f16,
    Σ min(p, q); ``label`` uint8. ``head_logit`` f16 is NaN without a confidence head;
    ``feature_by_scale`` f16 [N, S]: the feature at ``meta["scales"]`` as temperature (S = 0: not recorded).
    """

    data_set: Column
    request: Column
    round: Column
    position: Column
    feature: Column
    gap: Column
    entropy: Column
    log_probability: Column
    overlap: Column
    label: Column
    head_logit: Column
    feature_by_scale: Column
    meta: dict[str, Any]

    def __len__(self) -> int:
        return int(self.label.size)

    def select(self, rows: Column) -> DraftRows:
        """The rows at ``rows`` (a bool mask or indices)."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def save(self, path: Path) -> None:
        """Write a compressed .npz."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        meta = np.array(json.dumps({"format": _FORMAT, **self.meta}))
        np.savez_compressed(path, meta=meta, **columns)

    @classmethod
    def load(cls, path: Path) -> DraftRows:
        """Read what ``save`` wrote; UsageError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as file:
                meta = json.loads(str(file["meta"]))
                columns = {name: file[name] for name in COLUMNS}
        except (OSError, KeyError, ValueError) as error:
            raise UsageError(
                f"{str(path)!r} is no recording of drafts ({error}); write one with "
                "benchmarks/record_drafts.py"
            ) from None
        if meta.pop("format", None) != _FORMAT:
            raise UsageError(f"{str(path)!r} has another format than {_FORMAT}; record it again")
        return cls(meta=meta, **columns)


COLUMNS = tuple(field.name for field in fields(DraftRows) if field.name != "meta")


@dataclass(slots=True)
class RoundRecord:
    """One round of R rows: ``numbers`` f16 [R, K, C] in the order of ``NUMBERS`` (then the scales), and the
    lengths [R] of what was drafted, verified, accepted, and may be labelled (0 for idle slots);
    ``request`` [R]: who held the slot."""

    request: Column
    numbers: Column
    draft_lens: Column
    verify_lens: Column
    accepted_lens: Column
    labelled_lens: Column


NUMBERS = ("feature", "gap", "entropy", "log_probability", "overlap", "head_logit")


def collect_rows(
    rounds: Sequence[RoundRecord], data_set_of: Sequence[int], meta: dict[str, Any]
) -> DraftRows:
    """The labelled drafts of ``rounds``, in the order of time; ``data_set_of[request]`` is an index."""
    num_positions = rounds[0].numbers.shape[1]
    request = np.stack([one.request for one in rounds])
    drafted, verified, accepted, labelled = (
        np.stack([getattr(one, f"{name}_lens") for one in rounds])[..., None]
        for name in ("draft", "verify", "accepted", "labelled")
    )
    position = np.arange(num_positions)
    is_reached = (position <= accepted) & (position < np.minimum(drafted, labelled))
    is_judged = is_reached & (position < verified)
    is_trimmed = is_reached & (position == verified)
    label = np.where(is_judged, position < accepted, TRIMMED).astype(np.uint8)
    time, slot, where = np.nonzero(is_judged | is_trimmed)
    order = np.lexsort((where, time, request[time, slot]))
    time, slot, where = time[order], slot[order], where[order]
    numbers = np.stack([one.numbers for one in rounds])[time, slot, where]
    who = request[time, slot].astype(np.int32)
    columns = {name: numbers[:, index] for index, name in enumerate(NUMBERS)}
    return DraftRows(
        data_set=np.asarray(data_set_of, np.uint8)[who],
        request=who,
        round=time.astype(np.int32),
        position=where.astype(np.int8),
        label=label[time, slot, where],
        feature_by_scale=numbers[:, len(NUMBERS) :],
        meta=meta,
        **columns,
    )
