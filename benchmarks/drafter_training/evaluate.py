"""Acceptance by depth, measured in float32 over the full vocabulary.

The chance that a draft at depth k is accepted, given that all before it were, is Σ min(p, q) averaged
over accepted prefixes. Text written by the target becomes such prefixes by weighting every start with
Π min(1, q/p) of the tokens that stand in the text, so the figure is exact without drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtllm_av.runtime.models.drafters.dspark_head import figures_of_logits

from .calibration import CalibrationReport, Judgements
from .families import Family
from .target import FrozenTarget


@dataclass(slots=True)
class DepthReport:
    """Per depth 1 … K: ``conditional`` acceptance (positions before it accepted) and its standard error,
    ``unconditional`` Σ min(p, q) behind any prefix of the text, ``greedy`` matches of the two arg-maxima
    behind any prefix; ``accepted`` is the expected number of accepted drafts of K; ``confidence``: how
    well a confidence head, and beside it the draft's own top token, tell accepted drafts from rejected."""

    conditional: list[float]
    standard_error: list[float]
    unconditional: list[float]
    greedy: list[float]
    accepted: float
    num_positions: int
    confidence: CalibrationReport | None = None


@torch.no_grad()
def acceptance_by_depth(
    family: Family,
    head: nn.Module,
    target: FrozenTarget,
    draft_to_target: Tensor,
    tokens: Tensor,
    is_counted: Tensor,
    num_steps: int,
    *,
    groups: Tensor | None = None,
    batch: int = 8,
) -> DepthReport:
    """Measure ``head`` on ``tokens`` [B, S]; drafts count where all their positions are ``is_counted``.

    ``groups`` [B] (default: each its own) join rows that are not independent, for the standard error.
    """
    rows = target.output_rows[draft_to_target]
    column = torch.full((target.config.vocab_size,), -1, device=target.device)
    column[draft_to_target] = torch.arange(len(draft_to_target), device=target.device)
    sums = torch.zeros(len(tokens), num_steps, 5, dtype=torch.float64)
    length = tokens.shape[1] - num_steps - 1
    judgements = Judgements(num_steps)
    for first in range(0, len(tokens), batch):
        ids = tokens[first : first + batch].to(target.device)
        hidden = target.encode(ids)
        log_p = (hidden @ target.output_rows.T).log_softmax(-1)
        best = log_p.argmax(-1)
        log_p = log_p[..., draft_to_target]
        counted = is_counted[first : first + batch].to(target.device)
        valid = torch.ones(len(ids), length, dtype=torch.float64, device=target.device)
        reach = torch.ones_like(valid)
        proposals = family.unroll(head, target.embedding, ids, hidden, num_steps)
        for k, proposal in enumerate(proposals):
            log_q = (proposal.state @ rows.T).log_softmax(-1)
            log_target = log_p[:, 1 + k : 1 + k + length]
            overlap = torch.minimum(log_target.exp(), log_q.exp()).sum(-1).double()
            valid = valid * counted[:, 2 + k : 2 + k + length]
            is_same = draft_to_target[log_q.argmax(-1)] == best[:, 1 + k : 1 + k + length]
            reached = valid * reach
            parts = (reached * overlap, reached, valid * overlap, valid * is_same, valid)
            if proposal.confidence is not None:
                figures = figures_of_logits(log_q)
                judgements.add(k, proposal.confidence(figures), figures[..., 0], overlap, reached)
            sums[first : first + batch, k] = torch.stack([part.sum(1) for part in parts], -1).cpu()
            at = column[ids[:, 2 + k : 2 + k + length].long()]
            gap = (log_q - log_target).gather(-1, at.clamp(min=0)[..., None])[..., 0]
            reach = reach * torch.where(at >= 0, gap.double().exp().clamp(max=1), 0)
    return _report(sums, groups, judgements.report())


def _report(
    sums: Tensor, groups: Tensor | None, confidence: CalibrationReport | None
) -> DepthReport:
    if groups is not None:
        joined = torch.zeros(int(groups.max()) + 1, *sums.shape[1:], dtype=sums.dtype)
        sums = joined.index_add_(0, groups, sums)
    total = sums.sum(0)
    conditional = total[:, 0] / total[:, 1]
    residual = sums[:, :, 0] - conditional * sums[:, :, 1]
    error = residual.square().sum(0).sqrt() / total[:, 1]
    return DepthReport(
        conditional.tolist(),
        error.tolist(),
        (total[:, 2] / total[:, 4]).tolist(),
        (total[:, 3] / total[:, 4]).tolist(),
        float((total[:, 0] / total[:, 4]).sum()),
        int(total[0, 4]),
        confidence,
    )
