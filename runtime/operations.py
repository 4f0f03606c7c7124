"""What the round asks of whoever scores and trims its drafts.

Objective: one round for torch operators and for an engine that has these operations inside. Invariants:
every implementation means what ``plugins.reference`` says; ``verify_lens`` of equal confidences is the same
from all of them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trtllm_av.plugins import cpu_trim, torch_ops


class DraftOperations(Protocol):
    """Score, trim and pack with the arguments of ``plugins.torch_ops``, the default implementation."""

    def score_drafts(
        self,
        draft_logits: Tensor,
        temperature: Tensor,
        coefficients: Tensor,
        position: Tensor,
        *,
        vocab_size: int,
        draft_lens: Tensor | None = None,
        feature_bound: float = 15.0,
        temperature_floor: float = 0.5,
    ) -> tuple[Tensor, Tensor]:
        """features [R, P, 1] and confidence [R, P] of ``draft_logits`` [R, P, V]."""
        ...

    def trim_drafts(
        self,
        confidence: Tensor,
        draft_lens: Tensor,
        base_lens: Tensor,
        min_verify_lens: Tensor,
        draft_budget: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """survival [R, K], verify_lens [R] int32 and cu_seqlens [R+1] int32."""
        ...

    def pack_drafts(
        self, base_lens: Tensor, verify_lens: Tensor, *, stride: int, capacity: int
    ) -> Tensor:
        """[capacity] int32, where each packed row of the verify pass comes from, −1 in the tail."""
        ...


class TorchOperations:
    """The operators of ``plugins.torch_ops`` for tensors on the host; stateless."""

    score_drafts = staticmethod(torch_ops.score_drafts)
    # Past the dispatcher: a round waits for this, and dispatching takes a seventh of its time.
    trim_drafts = staticmethod(cpu_trim.trim_drafts)
    pack_drafts = staticmethod(torch_ops.pack_drafts)
