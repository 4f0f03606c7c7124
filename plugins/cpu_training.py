"""Labels and statistics on the CPU: the implementations behind the operators of that name.

Invariants: statistics are float64 sums over requests in ascending order, whatever the thread count;
a position without a label adds exactly nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trtllm_av.plugins.reference import CURVATURE_FLOOR, num_statistics


def label_drafts(
    draft_lens: Tensor,
    verify_lens: Tensor,
    accepted_lens: Tensor,
    trainable_lens: Tensor,
    overlap: Tensor,
    *,
    num_positions: int,
    confidence: Tensor | None = None,
) -> Tensor:
    """As ``reference.label_drafts``; labels [R, num_positions] in the float type of ``overlap``."""
    drafted, verified, accepted, trainable = (
        lens.numpy() for lens in (draft_lens, verify_lens, accepted_lens, trainable_lens)
    )
    values = overlap.numpy()
    # What the first draft that was not accepted teaches, if it was drafted and may train.
    first_other = np.where(accepted < verified, 0, values)
    first_other[accepted >= np.minimum(drafted, trainable)] = np.nan
    # Position-major [K, R]: comparisons then run over whole rows.
    positions = np.arange(num_positions, dtype=np.int32)[:, None]
    labels = np.where(positions == accepted, first_other, np.nan).astype(values.dtype, copy=False)
    np.copyto(labels, 1, where=positions < np.minimum(accepted, trainable))
    if confidence is not None:
        np.copyto(labels, np.nan, where=~(confidence.numpy().T > 0))
    return torch.from_numpy(labels.T.copy())


def accumulate_statistics(features: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    """As ``reference.accumulate_statistics``; statistics [K, n(F)] float64."""
    # Feature-major [F, R, K]: every sum below runs over whole arrays.
    f = features.numpy().astype(np.float64).transpose(2, 0, 1)
    y = labels.numpy().astype(np.float64)
    c = coefficients.numpy().astype(np.float64)
    num_features = len(f)
    is_known = np.isfinite(f[0]) & np.isfinite(y)
    for values in f[1:]:
        is_known &= np.isfinite(values)
    is_unknown = ~is_known
    np.copyto(f, 0, where=is_unknown)
    np.copyto(y, 0, where=is_unknown)
    log_odds = c[num_features:]
    for slope, values in zip(c, f, strict=False):
        log_odds = log_odds + slope * values
    # Bounded, so that the exponential of a negative logit overflows into no warning; σ(−700) is 0.
    log_odds = np.maximum(log_odds, -700)
    p = 1 / (1 + np.exp(-log_odds))
    terms = np.empty((*y.shape, num_statistics(num_features)))
    # Places of b, c, g0 and g1, behind the upper triangle of a.
    at_b = num_features * (num_features + 1) // 2
    at_c = at_b + num_features
    at_g1 = at_c + 1 + num_features
    terms[..., at_c] = np.maximum(p * (1 - p), CURVATURE_FLOOR) * is_known
    terms[..., at_g1] = (y - p) * is_known
    at_a = 0
    for i in range(num_features):
        terms[..., at_b + i] = terms[..., at_c] * f[i]
        terms[..., at_c + 1 + i] = terms[..., at_g1] * f[i]
        for j in range(i, num_features):
            terms[..., at_a] = terms[..., at_b + i] * f[j]
            at_a += 1
    terms[..., -1] = is_known
    # Reducing the outer axis adds whole requests, one after another; no pairwise summation.
    return torch.from_numpy(np.add.reduce(terms, axis=0))
