"""Counters of what an engine did, as one plain object.

Invariants: a draft counts as drafted when it was drawn within its row's draft length, as verified when
the target judged it, as accepted when the target kept it (before any stop truncation); nothing is
counted twice and nothing that an engine skips goes uncounted (``fallbacks`` names it).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from trtllm_av.runtime.calibration import CalibrationBin
from trtllm_av.runtime.round_log import RoundBatch


@dataclass(slots=True)
class RoundReport:
    """Totals since the last reset.

    ``row_rounds`` counts rows over decode rounds; ``*_by_position`` have one entry per draft position,
    ``rounds_by_depth`` and ``rows_by_verify_len`` one per length from 0 to K; ``judged_by_position[i]``
    counts drafts of position i whose predecessors were all accepted, so that ``accepted / judged`` is the
    conditional acceptance. ``expected_accepted`` is what the confidences promised and ``checked_accepted``
    what came of it, over rows that train; ``calibration`` compares the two in bins of equal mass, and
    ``calibration_error`` is their mean distance. ``decided_budget`` adds up the budgets decided (in av_mode
    shadow nothing follows them), ``probe_ms`` the modelled cost of probes. ``predicted_ms``,
    ``measured_ms`` and ``cost_error_ms`` (Σ |predicted − measured|) cover the rounds that a cost model
    describes and that were timed. ``uniform_rounds`` verified all they drafted because trimming would have
    gained too little. ``explored_rows`` were verified deeper for the sake of labels, at ``explored_tokens`` expected
    tokens given up. ``untrained_rows`` counts rows that drafted and were left out of the fit; ``refits``
    changed the ``coefficients``, whose number is ``coefficient_version``.
    """

    num_positions: int
    rounds: int = 0
    row_rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    probes: int = 0
    probe_ms: float = 0.0
    uniform_rounds: int = 0
    explored_rows: int = 0
    explored_tokens: float = 0.0
    budget_sum: int = 0
    decided_budget: int = 0
    untrained_rows: int = 0
    expected_accepted: float = 0.0
    checked_accepted: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    cost_error_ms: float = 0.0
    depth_sum: int = 0
    depth_min: int | None = None
    depth_max: int | None = None
    budget_min: int | None = None
    budget_max: int | None = None
    drafted_by_position: list[int] = field(default_factory=list)
    verified_by_position: list[int] = field(default_factory=list)
    judged_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    rounds_by_depth: list[int] = field(default_factory=list)
    rows_by_verify_len: list[int] = field(default_factory=list)
    calibration: list[CalibrationBin] = field(default_factory=list)
    calibration_error: float | None = None
    refits: int = 0
    coefficient_version: int = 0
    coefficients: list[float] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in ("drafted", "verified", "judged", "accepted"):
            counts = getattr(self, f"{name}_by_position")
            counts.extend([0] * (self.num_positions - len(counts)))
        for counts in (self.rounds_by_depth, self.rows_by_verify_len):
            counts.extend([0] * (self.num_positions + 1 - len(counts)))

    @property
    def trimmed(self) -> int:
        """Drafts that were drawn and not verified."""
        return self.drafted - self.verified

    @property
    def mean_verify_len(self) -> float:
        """Verified drafts per row and round."""
        return self.verified / self.row_rounds if self.row_rounds else 0.0

    @property
    def mean_depth(self) -> float:
        """Drafted positions per round (the longest row's)."""
        return self.depth_sum / self.rounds if self.rounds else 0.0

    @property
    def mean_budget(self) -> float:
        """Drafts to verify per round."""
        return self.budget_sum / self.rounds if self.rounds else 0.0

    @property
    def cost_error(self) -> float | None:
        """Mean distance of modelled from measured round times, as a share of the measured time."""
        return self.cost_error_ms / self.measured_ms if self.measured_ms else None

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Conditional acceptance: accepted over judged, None where nothing was judged."""
        pairs = zip(self.accepted_by_position, self.judged_by_position, strict=True)
        return [accepted / judged if judged else None for accepted, judged in pairs]

    def add_rounds(self, batch: RoundBatch) -> None:
        """Add decode rounds."""
        if not len(batch):
            return
        self.rounds += len(batch)
        self.row_rounds += int(batch.live.sum())
        self.probes += int(batch.is_probe.sum())
        self.emitted += int(batch.emitted.sum())
        self.drafted += int(batch.drafted.sum())
        self.verified += int(batch.verified.sum())
        self.accepted += int(batch.accepted.sum())
        self.explored_rows += int(batch.explored.sum())
        self.budget_sum += int(batch.budget.sum())
        self.decided_budget += int(batch.decided_budget.sum())
        self.decode_seconds += float(batch.measured_ms.sum()) / 1e3
        is_modelled = np.isfinite(batch.predicted_ms) & (batch.measured_ms > 0)
        predicted, measured = batch.predicted_ms[is_modelled], batch.measured_ms[is_modelled]
        self.predicted_ms += float(predicted.sum())
        self.measured_ms += float(measured.sum())
        self.cost_error_ms += float(np.abs(predicted - measured).sum())
        self.depth_sum += int(batch.depth.sum())
        self.depth_min = _least(self.depth_min, int(batch.depth.min()))
        self.depth_max = max(self.depth_max or 0, int(batch.depth.max()))
        self.budget_min = _least(self.budget_min, int(batch.budget.min()))
        self.budget_max = max(self.budget_max or 0, int(batch.budget.max()))
        names = ("drafted", "verified", "judged", "accepted")
        for name, counts in zip(names, batch.by_position, strict=True):
            _add(getattr(self, f"{name}_by_position"), counts.tolist())
        depths = np.bincount(batch.depth, minlength=self.num_positions + 1)
        _add(self.rounds_by_depth, depths.tolist())
        _add(self.rows_by_verify_len, batch.verify_lens.sum(axis=0).tolist())

    def to_dict(self) -> dict[str, object]:
        """All fields and derived figures, JSON-able."""
        data = dataclasses.asdict(self)
        data["fallbacks"] = dict(self.fallbacks)  # asdict makes a Counter of pairs of a Counter
        for name in (
            "trimmed", "mean_verify_len", "mean_depth", "mean_budget", "cost_error",
            "acceptance_by_position",
        ):  # fmt: skip
            data[name] = getattr(self, name)
        return data


def _least(known: int | None, value: int) -> int:
    return value if known is None else min(known, value)


def _add(totals: list[int], counts: list[int]) -> None:
    totals[:] = [total + count for total, count in zip(totals, counts, strict=True)]
