"""The adaptive part beside a TensorRT-LLM executor: traces and statistics in, control block out.

The engine trims by itself in every step; what it trims with comes from here, some steps late. Nothing waits
for this: a step uses the newest block that was computed from rounds before it.

Invariants: a budget is computed from rounds that are over, and the block says which; without usable step
costs everything is verified, or sizes are tried in turn to get them, both counted; with an acceptance that
is not greedy the block stays at verify-all, counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.calibration import CalibrationBins
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import DepthController
from trtllm_av.runtime.engines.trtllm_control import ControlWriter
from trtllm_av.runtime.engines.trtllm_costs import Iteration, StepCosts
from trtllm_av.runtime.engines.trtllm_trace import (
    ROUND_MODULUS,
    TraceReader,
    TraceRow,
    VerifiedDrafts,
    is_later,
)
from trtllm_av.runtime.engines.trtllm_tree import DraftTree
from trtllm_av.runtime.errors import CostTableError
from trtllm_av.runtime.estimator import AcceptanceEstimator

logger = logging.getLogger(__name__)

#: Rounds between two decisions: a block is read by every step, and writing it more often gains nothing.
DECISION_ROUNDS = 8
#: Shares of all drafts that are verified in turn while step costs are measured.
PROFILED_SHARES = (1.0, 0.5, 0.0, 0.75, 0.25)
#: Decisions after which step costs are taken from the newest samples; the probe schedule starts again.
RENEWAL_DECISIONS = 256

Int32 = NDArray[np.int32]


class StepResult(NamedTuple):
    """One result of a request: its ``av_trace``, None without one."""

    request_id: int
    trace: Any
    is_final: bool


class TrtllmAdaptation:
    """Learns from results and iterations, and writes ``writer``.

    ``cost_model`` replaces measured step costs. ``min_draft_len`` is the engine's. ``fallbacks`` counts, by
    reason, decisions that could not be made; ``budget`` is the last one written, None for all drafts;
    ``expected_accepted`` and ``actual_accepted`` compare forecasts with what came.
    """

    def __init__(
        self,
        tree: DraftTree,
        writer: ControlWriter,
        *,
        min_draft_len: int = 1,
        cost_model: CostModel | None = None,
        is_greedy: bool = True,
        refit_interval: int = 100,
    ) -> None:
        self.tree = tree
        self.estimator = AcceptanceEstimator(tree.num_levels, refit_interval=refit_interval)
        self.costs = StepCosts(tree.num_drafts)
        self.reader = TraceReader(tree.num_drafts)
        self.calibration = CalibrationBins()
        self.fallbacks: Counter[str] = Counter()
        self.expected_accepted = 0.0
        self.actual_accepted = 0
        self.budget: int | None = None
        self._writer = writer
        self._min_draft_len = min_draft_len
        self._cost_model = cost_model
        self._is_greedy = is_greedy
        self._depth: DepthController | None = None
        self._round: int | None = None
        self._rounds_to_decision = DECISION_ROUNDS
        self._decided_requests = 0
        self._num_profiled = 0
        self._decisions_to_renewal = 0
        if not is_greedy:
            logger.warning(
                "drafts are accepted by a threshold, not greedily: trimming would change what is "
                "generated, so every draft is verified"
            )
            self.fallbacks["acceptance is not greedy"] += 1

    def observe(self, results: Sequence[StepResult]) -> None:
        """Take in results in the order of arrival; decides when enough rounds have passed."""
        rows: list[TraceRow] = []
        verified: list[VerifiedDrafts] = []
        for result in results:
            new, fates = self.reader.read(result.request_id, result.trace, is_final=result.is_final)
            rows += new
            verified += fates
        if verified:
            self._train(verified)
        for row in rows:
            self.costs.add_row(row.round, row.verified_len)
            self._pass_rounds(row.round)
        # A budget is for so many requests: with others it would starve them, or spend too much.
        if self._rounds_to_decision <= 0 or len(self.reader.live) != self._decided_requests:
            self._rounds_to_decision = DECISION_ROUNDS
            self.decide()

    def observe_iterations(self, iterations: list[Iteration]) -> None:
        """Take in the executor's iterations, in their order."""
        self.costs.add_iterations(iterations)

    def _pass_rounds(self, round: int) -> None:
        if self._round is not None and not is_later(round, self._round):
            return
        passed = 1 if self._round is None else (round - self._round) % ROUND_MODULUS
        self._round = round
        self._rounds_to_decision -= passed
        for _ in range(min(passed, self.estimator.refit_interval)):
            self.estimator.tick()

    def _train(self, verified: Sequence[VerifiedDrafts]) -> None:
        features = np.stack([drafts.features for drafts in verified]).astype(np.float32)
        lens, accepted, paths = (
            np.array(values, np.int32)
            for values in zip(
                *(
                    (drafts.verified_len, drafts.num_accepted_tokens, drafts.accepted_path)
                    for drafts in verified
                ),
                strict=True,
            )
        )
        tree, coefficients = self.tree, self.estimator.coefficients
        labels = tree.labels(lens, accepted, paths)
        confidence = tree.confidence(features, coefficients)
        self.calibration.add(confidence, labels)
        statistics = torch_ops.accumulate_statistics(
            torch.from_numpy(tree.by_level(features)[:, :, None]),
            torch.from_numpy(tree.by_level(labels)),
            torch.from_numpy(coefficients),
        )
        self.estimator.observe(statistics.numpy(), self.estimator.version)
        is_verified = np.arange(tree.num_drafts) < lens[:, None]
        # A level's nodes exclude each other, so their sum is the chance to get that deep.
        deep = np.minimum(tree.level_sums(tree.survival(confidence) * is_verified), 1.0)
        means = deep.sum(axis=1, dtype=np.float64)
        squares = deep.astype(np.float64) @ (2.0 * np.arange(tree.num_levels) + 1.0)
        expected, actual = float(means.sum()), int((accepted - 1).sum())
        self.expected_accepted += expected
        self.actual_accepted += actual
        if self._depth is not None:
            self._depth.observe(expected, float((squares - means * means).sum()), actual)

    def decide(self) -> None:
        """Write the control block for the requests that live now."""
        live = [row for row in self.reader.live.values() if row.draft_len > 0]
        self._decided_requests = len(self.reader.live)
        if not live or not self._is_greedy or self._round is None:
            return
        lens = np.array([row.draft_len for row in live], np.int32)
        floors = np.minimum(lens, self._min_draft_len).astype(np.int32)
        depth = self._current_depth(lens, floors)
        if depth is None:
            return
        features = np.stack([row.features for row in live]).astype(np.float32)
        tree = self.tree
        confidence = tree.confidence(features, self.estimator.coefficients)
        survival = tree.falling(tree.survival(confidence))
        decision = depth.decide(
            survival, lens, floors, base_tokens=len(live), sampling_rows=len(live)
        )
        # A probe cannot single out a request here: it verifies everything until the next decision.
        self._write(None if decision.is_probe else decision.budget)

    def _current_depth(self, lens: Int32, floors: Int32) -> DepthController | None:
        """Who decides; None where step costs are missing, after writing what is done about it."""
        if self._decisions_to_renewal > 0 and self._depth is not None:
            self._decisions_to_renewal -= 1
            return self._depth
        try:
            model = self._cost_model or self.costs.model()
        except CostTableError as error:
            if not self.fallbacks["step costs cannot steer"]:
                logger.warning("every draft is verified: %s", error)
            self.fallbacks["step costs cannot steer"] += 1
            self._write(None)
            return None
        if model is None:
            share = PROFILED_SHARES[self._num_profiled % len(PROFILED_SHARES)]
            self._num_profiled += 1
            self.fallbacks["step costs are being measured"] += 1
            self._write(
                int(floors.sum() + share * (lens.sum() - floors.sum())) if share < 1 else None
            )
            return None
        self._decisions_to_renewal = RENEWAL_DECISIONS
        self._depth = DepthController(model)
        return self._depth

    def _write(self, budget: int | None) -> None:
        """Tell the engine to verify ``budget`` drafts a step, all if it is None."""
        assert self._round is not None
        newest = self._writer.newest_round
        # The trace's round is wrapped; the block's is not.
        round = max(newest - (newest - self._round) % ROUND_MODULUS, 0)
        if budget is None:
            is_written = self._writer.verify_all(round=round)
        else:
            is_written = self._writer.write(
                budget=budget,
                coefficients=[float(value) for value in self.estimator.coefficients],
                floor=self._min_draft_len,
                round=round,
            )
        if is_written:
            self.budget = budget
        else:
            self.fallbacks["ranks have not passed the last write"] += 1
