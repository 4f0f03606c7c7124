"""Score on the CPU: the implementation behind ``torch.ops.trtllm_av.score_*`` for host tensors.

Invariants: scratch memory is one block of rows in the float type of the arithmetic (float64 for float64
logits, float32 otherwise), never [R, P, V]; dead rows cost nothing; positions are scored one by one, so
a block of P positions and P calls with one position do the same work.

Passes over the vocabulary are torch calls, what is left per row is NumPy: its calls cost less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.plugins.reference import check_positions, check_vocabulary

#: Elements of one block of rows: 1 MB of float32, which stays in a core's second-level cache.
_BLOCK_ELEMENTS = 1 << 18


def arithmetic_dtype(values: Tensor) -> torch.dtype:
    """float64 stays float64 (exact enumeration); every other float type computes in float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def score_drafts(
    draft_logits: Tensor,
    temperature: Tensor,
    coefficients: Tensor,
    position: Tensor,
    *,
    vocab_size: int,
    allowed_mask: Tensor | None = None,
    draft_lens: Tensor | None = None,
    feature_bound: float = 15.0,
    temperature_floor: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """As ``reference.score_drafts``; features [R, P, 1] and confidence [R, P]."""
    num_rows, num_scored, num_columns = draft_logits.shape
    check_vocabulary(vocab_size, num_columns)
    dtype = arithmetic_dtype(draft_logits)
    first = int(position)
    scale = temperature.to(dtype)[:, None]
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=temperature_floor)).reciprocal_()
    # Σ exp over all tokens but the top one, relative to the top; NaN where nothing was scored.
    others = torch.full((num_rows, num_scored), torch.nan, dtype=dtype)
    block = max(1, _BLOCK_ELEMENTS // vocab_size)
    for i in range(num_scored):
        column = draft_logits[:, i, :vocab_size]
        live = _live_rows(draft_lens, first + i)
        for begin in range(0, num_rows if live is None else live.numel(), block):
            if live is None:
                rows: slice | Tensor = slice(begin, begin + block)
                values = column[rows].to(dtype, copy=True)
            else:
                rows = live[begin : begin + block]
                values = column.index_select(0, rows).to(dtype)
            if allowed_mask is not None:
                values.masked_fill_(~allowed_mask[rows, :vocab_size], -torch.inf)
            others[rows, i] = _sum_without_top(values, scale[rows])

    rest = others.numpy()
    is_scored = ~np.isnan(rest)
    with np.errstate(divide="ignore"):
        features = np.where(is_scored, -np.log(rest), 0).clip(-feature_bound, feature_bound)
    features = features.reshape(num_rows, num_scored, 1)
    confidence = _confidence(features, coefficients, first)
    confidence *= is_scored
    return torch.from_numpy(features), torch.from_numpy(confidence)


def score_features(features: Tensor, coefficients: Tensor, position: Tensor) -> Tensor:
    """As ``reference.score_features``; confidence [R, P]."""
    values = features.to(arithmetic_dtype(features)).numpy()
    return torch.from_numpy(_confidence(values, coefficients, int(position)))


def law_features(
    draft_logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    feature_bound: float = 15.0,
    temperature_floor: float = 0.5,
) -> Tensor:
    """As ``reference.law_features``; [R, P, 2]. Torch calls only: this runs on any device."""
    check_vocabulary(vocab_size, draft_logits.shape[2])
    dtype = arithmetic_dtype(draft_logits)
    scale = temperature.to(dtype)[:, None]
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=temperature_floor)).reciprocal_()
    features = draft_logits.new_zeros((*draft_logits.shape[:2], 2), dtype=dtype)
    for i in range(draft_logits.shape[1]):
        values = draft_logits[:, i, :vocab_size].to(dtype)
        top = values.topk(min(2, vocab_size), dim=-1).values
        below = (values - top[:, :1]) * scale
        weights = below.exp()
        total = weights.sum(-1)
        # A token at −inf has weight 0 and no share in the entropy.
        terms = torch.where(weights > 0, weights * below, 0.0).sum(-1)
        gap = (top[:, 0] - top[:, -1]) * scale[:, 0] if vocab_size > 1 else torch.inf + total
        is_scored = torch.isfinite(total)
        features[:, i, 0] = torch.where(is_scored, gap.clamp(max=feature_bound), 0.0)
        features[:, i, 1] = torch.where(is_scored, total.log() - terms / total, 0.0)
    return features


def _live_rows(draft_lens: Tensor | None, position: int) -> Tensor | None:
    """Rows that drafted ``position``, or None if all did: those need no gather."""
    if draft_lens is None:
        return None
    is_live = draft_lens.numpy() > position
    return None if is_live.all() else torch.from_numpy(is_live.nonzero()[0])


def _sum_without_top(values: Tensor, scale: Tensor) -> Tensor:
    """Σ exp((x − top)·scale) over all but the top of logits [B, V], which it overwrites: [B].

    NaN where the row holds NaN or +inf, or −inf alone. After the top is subtracted every maximum is
    exactly e⁰ = 1 and all else is below, so the fractional parts sum the tokens below the top, and the
    maxima beside the first one are whole numbers in what is left. This equals the sum without the
    argmax, for tiny complements too, and spares the search for its index, which takes as long as the
    exponential.
    """
    top = values.amax(-1, keepdim=True)
    values.sub_(top).mul_(scale).exp_()
    total = values.sum(-1)
    below = values.frac_().sum(-1)
    return below.add_((total - below).round_().sub_(1.0))


def _confidence(features: NDArray[Any], coefficients: Tensor, first: int) -> NDArray[Any]:
    """σ(Σ ω_k f_k + β_{first + i}) of features [R, P, F], 0 where the log-odds are not finite."""
    num_scored, num_features = features.shape[1:]
    check_positions(first, num_scored, coefficients.numel() - num_features)
    c = coefficients.numpy().astype(features.dtype)
    log_odds = c[num_features + first : num_features + first + num_scored]
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(num_features):
            log_odds = log_odds + c[k] * features[:, :, k]
        confidence: NDArray[Any] = 1 / (1 + np.exp(-log_odds))
    confidence[~np.isfinite(log_odds)] = 0
    return confidence
