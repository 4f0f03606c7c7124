"""Rounds whose depth and budget are given, so that a rule under test decides in every one of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.budget import lens_at_depth
from trtllm_av.runtime.depth import Decision
from trtllm_av.runtime.exploration import Exploration
from trtllm_av.runtime.scheduler import Engine

Int32 = NDArray[np.int32]


class FixedDepth:
    """In the place of a DepthController: always ``depth`` and ``budget``, forecast at ``rate`` tokens per ms."""

    num_probes = 0
    probe_ms = 0.0

    def __init__(self, depth: int, budget: int, rate: float) -> None:
        self.depth = depth
        self.budget = budget
        self.rate = rate

    def decide(
        self,
        survival: NDArray[np.float64],
        draft_limits: Int32,
        floors: Int32,
        base_tokens: int,
        *,
        sampling_rows: int,
    ) -> Decision:
        lens = lens_at_depth(draft_limits, floors, self.depth)
        budget = min(self.budget, int(lens.sum()))
        return Decision(self.depth, budget, lens, floors, self.rate, 1.0, False, -1)

    def observe(self, expected_accepted: float, variance: float, actual_accepted: float) -> None:
        """Nothing to learn."""


@dataclass
class FixedPlans:
    """``Scenario.prepare``: rounds of ``depth`` and ``budget``; ``explored_share`` of an Exploration, if any."""

    depth: int
    budget: int
    rate: float = 1.0
    explored_share: float = 0.0

    def __call__(self, engine: Engine) -> None:
        controller = engine.controller
        fixed = FixedDepth(self.depth, self.budget, self.rate)
        controller.depth = fixed  # type: ignore[assignment]
        assert controller.feedback is not None
        controller.feedback._controller = fixed  # type: ignore[assignment]
        if self.explored_share:
            controller.exploration = Exploration(controller.num_positions, self.explored_share)
            controller.exploration._labels[:] = 0.0  # starved from the first round on
