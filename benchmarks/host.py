"""Time of the host's share of a round, on one core: no model, the operations in isolation.

``budget``: B at one depth. ``decide``: depth and budget together (0, d and one neighbour). ``trim``: the
operator. ``observe``: labels, statistics, estimator and the check of the promised acceptance. ``count``: the
counters of a round. ``round``: all that adaptive verification adds to a round — plan, trim, ``observe`` of
the product's own controller, and the counters.

``python -m benchmarks.host [--json]`` prints a row per op, R and K in µs of this thread's processor time, so
that other work on the machine does not count as ours: the least of several medians. A sample is the mean
of ten calls in a row, so that what happens once in ten rounds (labels and statistics) has its share.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.acceptance import Acceptance
from trtllm_av.runtime.budget import find_budgets
from trtllm_av.runtime.confidence import SurvivalHistory
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import Decision, DepthController
from trtllm_av.runtime.estimator import AcceptanceEstimator
from trtllm_av.runtime.feedback import RoundFeedback
from trtllm_av.runtime.observability import EngineObserver
from trtllm_av.runtime.operations import TorchOperations
from trtllm_av.runtime.sampling import Distribution
from trtllm_av.runtime.step import Drafts, Round, RoundOutcome

REQUESTS = (1, 8, 64, 256)
POSITIONS = 7
LIMITS_US = {("budget", 256): 60.0, ("decide", 256): 120.0, ("round", 64): 150.0}
_MEDIANS = 15
_SAMPLES = 15
_CALLS = 10


@dataclass(frozen=True, slots=True)
class Row:
    op: str
    R: int
    K: int
    us: float


def time_us(run: Callable[[], Any]) -> float:
    """The least median of several short series, in µs."""
    medians = []
    for _ in range(_MEDIANS):
        times = []
        for _ in range(_SAMPLES):
            start = time.thread_time()
            for _ in range(_CALLS):
                run()
            times.append((time.thread_time() - start) / _CALLS)
        medians.append(median(times))
    return 1e6 * min(medians)


def staircase_table(num_requests: int, num_positions: int) -> dict[str, Any]:
    """A cost table with a captured size every 8 tokens, steep enough to make the budget an inner one."""
    last = num_requests * (num_positions + 1)
    sizes = [1, 2, 4, *range(8, last + 1, 8)]
    return {
        "unit": "ms",
        "graph_limit_tokens": last,
        "verify_ms_by_tokens": [[size, 5.0 + 12.0 * size / num_requests / 8] for size in sizes],
        "draft_ms_by_requests": [[1, 0.9], [num_requests + 1, 2.5]],
    }


class HostRound:
    """One steady-state round of R requests, with K random confidences each."""

    def __init__(self, num_requests: int, num_positions: int) -> None:
        rng = np.random.default_rng(0)
        shape = (num_requests, num_positions)
        self.cost_model = CostModel.from_table(
            staircase_table(num_requests, num_positions), num_positions=num_positions
        )
        self.controller = DepthController(self.cost_model)
        self.history = SurvivalHistory(num_requests, num_positions)
        self.estimator = AcceptanceEstimator(num_positions)
        self.feedback = RoundFeedback(self.estimator, self.controller, num_requests)
        self.slots = np.arange(num_requests)
        self.limits = np.full(num_requests, num_positions, np.int32)
        self.floors = np.zeros(num_requests, np.int32)
        self.features = torch.from_numpy(rng.normal(2.2, 1.8, (*shape, 1)).astype(np.float32))
        self.coefficients = torch.from_numpy(self.estimator.coefficients)
        self.confidence = torch_ops.score_features(
            self.features, self.coefficients, torch.zeros(1, dtype=torch.int32)
        )
        self.base_lens = torch.ones(num_requests, dtype=torch.int32)
        self.overlap = torch.from_numpy(rng.random(num_requests, np.float32))
        self.history.update(self.slots, self.confidence.numpy(), self.limits)
        self.survival = self.history.survival(self.slots)
        self.decision = self.decide()
        _, self.verify_lens, _ = self.trim()
        # Acceptance as promised, so that the controller has no reason to probe more often.
        is_accepted = torch.from_numpy(rng.random(shape, np.float32)) < self.confidence
        self.reach = is_accepted.cumprod(1).sum(1, dtype=torch.int32)

    def budget(self) -> object:
        num_rows, depth = self.survival.shape
        return find_budgets(
            self.survival,
            self.limits,
            self.floors,
            num_rows,
            self.cost_model,
            (depth,),
            sampling_rows=num_rows,
        )

    def decide(self) -> Decision:
        num_rows = self.slots.size
        return self.controller.decide(
            self.survival, self.limits, self.floors, num_rows, sampling_rows=num_rows
        )

    def trim(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch_ops.trim_drafts(
            self.confidence,
            torch.from_numpy(self.decision.draft_lens),
            self.base_lens,
            torch.from_numpy(self.decision.min_verify_lens),
            torch.tensor([self.decision.budget], dtype=torch.int32),
        )

    def observe(self) -> None:
        draft_lens = torch.from_numpy(self.decision.draft_lens)
        accepted_lens = torch.minimum(self.reach, self.verify_lens)
        self.feedback.add(
            self.features,
            self.confidence,
            draft_lens,
            self.verify_lens,
            accepted_lens,
            draft_lens,
            self.overlap,
        )
        self.feedback.end_round()


class ControlledRound:
    """All that adaptive verification adds to a round, as the product does it: plan, trim, observe, count."""

    def __init__(self, num_requests: int, num_positions: int) -> None:
        state = HostRound(num_requests, num_positions)
        self.controller = AdaptiveController(
            "adaptive", num_positions, num_requests, state.cost_model
        )
        self.observer = EngineObserver(self.controller, num_requests)
        # The trim reads neither executor nor source.
        self.round = Round.__new__(Round)
        self.round.operations = TorchOperations()
        self.slots = state.slots
        self.limits = state.limits.tolist()
        self.is_adaptive = [True] * num_requests
        self.drafts = Drafts(
            torch.zeros(num_requests, num_positions, dtype=torch.int64),
            state.features,
            state.confidence,
            [Distribution.one_hot(torch.zeros(num_requests, dtype=torch.int64), 1)],
        )
        self.reach = state.reach.long()
        self.overlap = state.overlap
        self.next_tokens = torch.zeros(num_requests, dtype=torch.int64)
        self.trainable_lens = self.limits

    def __call__(self) -> None:
        plan = self.controller.plan(
            self.slots, draft_limits=self.limits, is_adaptive=self.is_adaptive
        )
        trim = self.round.trim(plan, self.drafts)
        accepted_lens = torch.minimum(self.reach, trim.verify_lens)
        acceptance = Acceptance(accepted_lens, self.next_tokens, self.overlap)
        self.plan, self.outcome = plan, RoundOutcome(self.drafts, trim, acceptance, [], [])
        self.controller.observe(self.slots, plan, self.outcome, self.trainable_lens)
        self.count()

    def count(self) -> None:
        self.observer.count(self.plan, self.outcome, 1e-3, self.slots.size)


def measure(requests: tuple[int, ...] = REQUESTS, num_positions: int = POSITIONS) -> list[Row]:
    """Every op at every R."""
    rows = []
    for num_requests in requests:
        state = HostRound(num_requests, num_positions)
        controlled = ControlledRound(num_requests, num_positions)
        controlled()
        ops: dict[str, Callable[[], Any]] = {
            "budget": state.budget,
            "decide": state.decide,
            "trim": state.trim,
            "observe": state.observe,
            "count": controlled.count,
            "round": controlled,
        }
        for name, run in ops.items():
            rows.append(Row(name, num_requests, num_positions, round(time_us(run), 1)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON array of rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'op':8} {'R':>4} {'K':>2} {'µs':>8}")
    for row in rows:
        limit = LIMITS_US.get((row.op, row.R))
        print(
            f"{row.op:8} {row.R:4} {row.K:2} {row.us:8.1f}" + (f"  (≤ {limit:g})" if limit else "")
        )


if __name__ == "__main__":
    main()
