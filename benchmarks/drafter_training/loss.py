"""Distillation of one chain step: draft logits, loss and gradient without keeping the logits.

The draft distribution q lives on the V_d draft ids; the target's p keeps its full normalisation, so mass
outside the draft vocabulary counts as lost. Two losses per row:

* cross entropy −Σ_S p log q (mode covering; its gradient is P_S·q − p), and
* total variation 1 − Σ_S min(p, q), which is the rejection probability itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class TargetRows:
    """The target side of one batch: logits [B, T', V_d] on draft ids and log-sums [B, T'] over all ids."""

    logits: Tensor
    log_total: Tensor


@dataclass(slots=True, frozen=True)
class Shares:
    """How the two losses are mixed."""

    entropy: float
    overlap: float


@dataclass(slots=True)
class RowFigures:
    """What one depth of drafting looks like, each [M] float32 and without gradient.

    ``overlap`` = Σ min(p, q), the chance of acceptance; ``ratio`` = min(1, q/p) of the token that stands in
    the text: the weight that turns text written by the target into prefixes that were drafted and accepted;
    ``log_top`` and ``spread``: log-probability of q's top token, and q's entropy.
    """

    overlap: Tensor
    ratio: Tensor
    log_top: Tensor
    spread: Tensor


def distil_rows_plain(
    draft: Tensor, log_p: Tensor, next_column: Tensor, weight: Tensor, shares: Shares
) -> tuple[Tensor, Tensor, RowFigures]:
    """The definition, in float32: gradient [M, V_d], cross entropy [M], and figures.

    ``log_p`` [M, V_d] log target probabilities; ``next_column`` [M] draft column of the token that
    stands in the text, −1 outside the draft vocabulary.
    """
    log_q = draft.float().log_softmax(-1)
    p, q = log_p.float().exp(), log_q.exp()
    entropy = -(p * log_q).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    column = next_column.clamp(min=0)[:, None]
    ratio = (log_q.gather(1, column) - log_p.float().gather(1, column)).exp().clamp(max=1)[:, 0]
    ratio = torch.where(next_column >= 0, ratio, 0)
    is_under = (q < p).float()
    under = (q * is_under).sum(-1, keepdim=True)
    gradient = shares.entropy * (p.sum(-1, keepdim=True) * q - p)
    gradient = gradient + shares.overlap * q * (under - is_under)
    figures = RowFigures(overlap, ratio, log_q.amax(-1), -(q * log_q).sum(-1))
    return gradient * weight[:, None], entropy, figures


def _distil_rows(
    draft: Tensor, target: TargetRows, shift: int, next_column: Tensor, weight: Tensor,
    shares: Shares, length: int,
) -> tuple[Tensor, Tensor, RowFigures]:  # fmt: skip
    if not draft.is_cuda:
        log_p = target.logits.float() - target.log_total[..., None]
        log_p = log_p[:, shift : shift + length].flatten(0, 1)
        return distil_rows_plain(draft, log_p, next_column, weight, shares)
    import triton

    from .kernels import distil_rows

    rows, vocab_size = draft.shape
    entropy, *figures = (torch.empty_like(weight) for _ in range(5))
    distil_rows[(rows,)](
        draft, target.logits, target.log_total, next_column, weight, entropy, *figures,
        length, target.logits.shape[1], shift, vocab_size, shares.entropy, shares.overlap,
        BLOCK=triton.next_power_of_2(vocab_size), num_warps=16,
    )  # fmt: skip
    return draft, entropy, RowFigures(*figures)


class _Distil(torch.autograd.Function):
    """Output layer and loss in one node; only the gradient of the hidden states is kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, output_rows: Tensor, target: TargetRows, shift: int,
        next_column: Tensor, weight: Tensor, shares: Shares,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        flat = hidden.detach().flatten(0, 1).to(output_rows.dtype)
        gradient, entropy, figures = _distil_rows(
            flat @ output_rows.T, target, shift, next_column, weight, shares, hidden.shape[1]
        )
        ctx.save_for_backward((gradient.to(output_rows.dtype) @ output_rows).view_as(hidden))
        loss = (weight * (shares.entropy * entropy + shares.overlap * (1 - figures.overlap))).sum()
        parts = (figures.overlap, figures.ratio, figures.log_top, figures.spread)
        ctx.mark_non_differentiable(*parts)
        return loss, *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None


def distil(
    hidden: Tensor, output_rows: Tensor, target: TargetRows, *, shift: int, next_column: Tensor,
    weight: Tensor, shares: Shares,
) -> tuple[Tensor, RowFigures]:  # fmt: skip
    """Weighted loss (scalar) and figures of ``hidden`` [B, T, H]; M = B·T.

    Row t of a sequence is compared with target row t + ``shift``.
    """
    loss, *figures = _Distil.apply(hidden, output_rows, target, shift, next_column, weight, shares)
    return loss, RowFigures(*figures)
