"""Estimator, history, decision, trim and feedback in a loop, against a workload with a set acceptance.

Whether a draft is accepted is drawn from stored rows (feature, Σ min(p, q)), never from the estimator's
own logistic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.confidence import SurvivalHistory
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.depth import Decision, DepthController
from trtllm_av.runtime.estimator import AcceptanceEstimator
from trtllm_av.runtime.exploration import Exploration
from trtllm_av.runtime.feedback import RoundFeedback

DATA = Path(__file__).resolve().parent.parent / "data"
COST_PROFILE = DATA / "cost_profile.json"


@dataclass
class Workload:
    """Rows resampled so that their mean acceptance is what is asked for."""

    feature: NDArray[np.float32]
    overlap: NDArray[np.float32]
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def load(cls) -> Workload:
        rows = np.load(DATA / "acceptance_rows.npz")
        return cls(rows["feature"], rows["overlap"])

    def set_acceptance(self, mean: float) -> None:
        """Tilt the rows by exp(t·overlap), t found by bisection."""
        low, high = -200.0, 200.0
        for _ in range(80):
            tilt = (low + high) / 2
            weights = np.exp(tilt * (self.overlap - self.overlap.max() * (tilt > 0)))
            self.weights = weights / weights.sum()
            if self.weights @ self.overlap < mean:
                low = tilt
            else:
                high = tilt

    def draw(
        self, rng: np.random.Generator, shape: tuple[int, int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = rng.choice(self.feature.size, size=shape, p=self.weights)
        return self.feature[rows], self.overlap[rows]


class ClosedLoop:
    """R requests that never end, K positions.

    ``deep``, if set, is the workload of positions from ``FIRST_DEEP`` on. ``has_trimmed_labels`` False leaves
    out the label of the first trimmed position, as the public reference does.
    """

    FIRST_DEEP = 3

    def __init__(
        self,
        num_requests: int,
        num_positions: int,
        *,
        is_block: bool = True,
        exploration: float = 0.0,
        has_trimmed_labels: bool = True,
        seed: int = 0,
    ) -> None:
        self.shape = (num_requests, num_positions)
        self.rng = np.random.default_rng(seed)
        self.workload = Workload.load()
        self.deep: Workload | None = None
        self.has_trimmed_labels = has_trimmed_labels
        self.cost_model = CostModel.from_table(
            COST_PROFILE, num_positions=num_positions, is_block=is_block
        )
        self.estimator = AcceptanceEstimator(num_positions)
        self.history = SurvivalHistory(num_requests, num_positions)
        self.controller = DepthController(self.cost_model)
        self.feedback = RoundFeedback(self.estimator, self.controller, num_requests)
        self.exploration = Exploration(num_positions, exploration) if exploration else None
        self.decisions: list[Decision] = []
        self.tokens = 0
        self.ms = 0.0

    def run(self, rounds: int) -> float:
        """Tokens per ms over the next ``rounds``."""
        self.tokens, self.ms = 0, 0.0
        for _ in range(rounds):
            self.step()
        return self.tokens / self.ms

    def step(self) -> None:
        num_requests, num_positions = self.shape
        slots = np.arange(num_requests)
        limits = np.full(num_requests, num_positions, np.int32)
        survival = self.history.survival(slots)
        decision = self.controller.decide(
            survival, limits, np.zeros_like(limits), num_requests, sampling_rows=num_requests
        )
        if self.exploration is not None:
            decision = self.exploration.aim(decision, survival, self.estimator.label_counts)
        self.decisions.append(decision)
        feature, overlap = self.workload.draw(self.rng, self.shape)
        if self.deep is not None:
            rest = (num_requests, num_positions - self.FIRST_DEEP)
            feature[:, self.FIRST_DEEP :], overlap[:, self.FIRST_DEEP :] = self.deep.draw(
                self.rng, rest
            )
        features = torch.from_numpy(feature[:, :, None])
        confidence = self.score(feature) * (np.arange(num_positions) < decision.draft_lens[:, None])
        _, verify_lens, _ = torch_ops.trim_drafts(
            torch.from_numpy(confidence),
            torch.from_numpy(decision.draft_lens),
            torch.ones(num_requests, dtype=torch.int32),
            torch.from_numpy(decision.min_verify_lens),
            torch.tensor([decision.budget], dtype=torch.int32),
        )
        verified = verify_lens.numpy()
        is_accepted = np.cumprod(self.rng.random(self.shape) < overlap, axis=1)
        accepted = np.minimum(is_accepted.sum(axis=1), verified).astype(np.int32)
        first_trimmed = overlap[slots, np.minimum(verified, num_positions - 1)]
        soft = np.where(
            self.has_trimmed_labels & (accepted == verified) & (verified < decision.draft_lens),
            first_trimmed,
            np.nan,
        )
        self.feedback.add(
            features,
            torch.from_numpy(confidence),
            torch.from_numpy(decision.draft_lens),
            verify_lens,
            torch.from_numpy(accepted),
            torch.from_numpy(limits),
            torch.from_numpy(soft.astype(np.float32)),
        )
        self.history.update(slots, confidence, decision.draft_lens)
        if self.feedback.end_round():
            self.history.set_coefficients(self.estimator.coefficients)
        self.tokens += int(accepted.sum()) + num_requests
        draft_ms = self.cost_model.draft_ms(num_requests, int(decision.draft_lens.max()))
        tokens = np.array([num_requests + int(verified.sum())])
        self.ms += float(self.cost_model.verify_ms(tokens)[0]) + draft_ms

    def score(self, feature: NDArray[np.float32]) -> NDArray[np.float32]:
        """[R,K] confidence of ``feature`` [R,K]."""
        return torch_ops.score_features(
            torch.from_numpy(feature[:, :, None]),
            torch.from_numpy(self.estimator.coefficients),
            torch.zeros(1, dtype=torch.int32),
        ).numpy()

    def calibration_error(self) -> NDArray[np.float64]:
        """[K]: mean confidence minus the workload's acceptance."""
        rows = self.rng.choice(self.workload.feature.size, size=4096, p=self.workload.weights)
        feature = np.repeat(self.workload.feature[rows][:, None], self.shape[1], axis=1)
        acceptance = float(self.workload.weights @ self.workload.overlap)
        return np.asarray(self.score(feature).mean(axis=0) - acceptance, np.float64)
