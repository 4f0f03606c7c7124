"""Counters of what an engine did, as one plain object.

Invariants: a draft counts as drafted when it was drawn within its row's draft length, as verified when
the target judged it, as accepted when the target kept it (before any stop truncation); nothing is
counted twice and nothing that an engine skips goes uncounted (``fallbacks`` names it).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundReport:
    """Totals since the last reset.

    ``row_rounds`` counts rows over decode rounds; ``*_by_position`` have one entry per draft position;
    ``judged_by_position[i]`` counts drafts of position i whose predecessors were all accepted, so that
    ``accepted / judged`` is the conditional acceptance. ``expected_accepted`` is what the confidences
    promised and ``checked_accepted`` what came of it, over rows that train. ``decided_budget`` adds up the
    budgets decided (in av_mode shadow nothing follows them), ``probe_ms`` the modelled cost of probes;
    ``untrained_rows`` counts rows that drafted and were left out of the fit.
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
    decided_budget: int = 0
    untrained_rows: int = 0
    expected_accepted: float = 0.0
    checked_accepted: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    depth_sum: int = 0
    depth_min: int | None = None
    depth_max: int | None = None
    budget_min: int | None = None
    budget_max: int | None = None
    drafted_by_position: list[int] = field(default_factory=list)
    verified_by_position: list[int] = field(default_factory=list)
    judged_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in ("drafted", "verified", "judged", "accepted"):
            counts = getattr(self, f"{name}_by_position")
            counts.extend([0] * (self.num_positions - len(counts)))

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
    def acceptance_by_position(self) -> list[float | None]:
        """Conditional acceptance: accepted over judged, None where nothing was judged."""
        pairs = zip(self.accepted_by_position, self.judged_by_position, strict=True)
        return [accepted / judged if judged else None for accepted, judged in pairs]

    def count_round(
        self,
        *,
        draft_lens: list[int],
        verify_lens: list[int],
        accepted_lens: list[int],
        budget: int,
        is_probe: bool,
    ) -> None:
        """Add one decode round of the given rows."""
        depth = max(draft_lens, default=0)
        self.rounds += 1
        self.row_rounds += len(draft_lens)
        self.probes += is_probe
        self.depth_sum += depth
        self.depth_min = depth if self.depth_min is None else min(self.depth_min, depth)
        self.depth_max = depth if self.depth_max is None else max(self.depth_max, depth)
        self.budget_min = budget if self.budget_min is None else min(self.budget_min, budget)
        self.budget_max = budget if self.budget_max is None else max(self.budget_max, budget)
        for drafted, verified, accepted in zip(draft_lens, verify_lens, accepted_lens, strict=True):
            self.drafted += drafted
            self.verified += verified
            self.accepted += accepted
            for position in range(drafted):
                self.drafted_by_position[position] += 1
            for position in range(verified):
                self.verified_by_position[position] += 1
            for position in range(min(accepted + 1, verified)):
                self.judged_by_position[position] += 1
            for position in range(accepted):
                self.accepted_by_position[position] += 1

    def to_dict(self) -> dict[str, object]:
        """All fields and derived figures, JSON-able."""
        data = dataclasses.asdict(self)
        data["fallbacks"] = dict(self.fallbacks)  # asdict makes a Counter of pairs of a Counter
        for name in ("trimmed", "mean_verify_len", "mean_depth", "acceptance_by_position"):
            data[name] = getattr(self, name)
        return data
