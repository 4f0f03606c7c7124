"""Score and trim by an engine's own plans.

Invariants: a round may use fewer draft positions than the engine was built for; what it does not use is
passed as not drafted. What the plan was not built for is done by the torch operator of the same meaning:
logits of another width, which token rules widen to the target's vocabulary, and another bound or floor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.adaptive_options import FEATURE_BOUND, TEMPERATURE_FLOOR
from trtllm_av.runtime.engines.plan import Plan


class PlanOperations:
    """``score`` is built for logits [R, 1, ``vocab_size``], both plans for K = ``num_positions``."""

    def __init__(self, score: Plan, trim: Plan, *, vocab_size: int, num_positions: int) -> None:
        self._score = score
        self._trim = trim
        self._vocab_size = vocab_size
        self._num_positions = num_positions
        self._verify_lens = torch.empty(0, dtype=torch.int32)
        self._pack_index = torch.empty(0, dtype=torch.int32)

    def score_drafts(
        self,
        draft_logits: Tensor,
        temperature: Tensor,
        coefficients: Tensor,
        position: Tensor,
        *,
        vocab_size: int,
        draft_lens: Tensor | None = None,
        feature_bound: float = FEATURE_BOUND,
        temperature_floor: float = TEMPERATURE_FLOOR,
    ) -> tuple[Tensor, Tensor]:
        asked = (*draft_logits.shape[1:], vocab_size, feature_bound, temperature_floor)
        built = (1, self._vocab_size, self._vocab_size, FEATURE_BOUND, TEMPERATURE_FLOOR)
        if asked != built:
            return torch_ops.score_drafts(
                draft_logits,
                temperature,
                coefficients,
                position,
                vocab_size=vocab_size,
                draft_lens=draft_lens,
                feature_bound=feature_bound,
                temperature_floor=temperature_floor,
            )
        if draft_lens is None:
            draft_lens = torch.full_like(temperature, self._num_positions, dtype=torch.int32)
        feed = {
            "draft_logits": draft_logits,
            "temperature": temperature.float(),
            "coefficients": _widened(coefficients.float(), 1 + self._num_positions),
            "position": position,
            "draft_lens": draft_lens,
        }
        features, confidence = self._score.run(feed, ["features", "confidence"])
        return features, confidence

    def trim_drafts(
        self,
        confidence: Tensor,
        draft_lens: Tensor,
        base_lens: Tensor,
        min_verify_lens: Tensor,
        draft_budget: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        used = confidence.shape[1]
        feed = {
            "confidence": _widened(confidence.float(), self._num_positions),
            "draft_lens": draft_lens.clamp_max(used),
            "base_lens": base_lens,
            "min_verify_lens": min_verify_lens,
            "draft_budget": draft_budget,
        }
        names = ["survival", "verify_lens", "cu_seqlens", "pack_index"]
        survival, self._verify_lens, cu_seqlens, self._pack_index = self._trim.run(feed, names)
        return survival[:, :used], self._verify_lens, cu_seqlens

    def pack_drafts(
        self, base_lens: Tensor, verify_lens: Tensor, *, stride: int, capacity: int
    ) -> Tensor:
        """The plan's own index if it comes from the trim that gave ``verify_lens``."""
        is_own = verify_lens is self._verify_lens and capacity <= self._pack_index.numel()
        if not is_own or bool((base_lens > 1).any()):
            return torch_ops.pack_drafts(base_lens, verify_lens, stride=stride, capacity=capacity)
        index = self._pack_index[:capacity]
        built = self._num_positions + 1
        moved = index // built * stride + index % built
        return moved.where(index >= 0, index)


def _widened(values: Tensor, length: int) -> Tensor:
    """``values`` with zeros up to ``length`` along the last axis."""
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]))
