"""Laws of the next token as tables on one device, and what a draft is recorded with.

The same definitions as the runtime's sampling, without its per-row cases: every law is a row of a
table, a greedy one a one-hot row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BOUND = 40.0
_SMALLEST = 1e-30


def laws(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities [N, V] f32 of ``logits`` after temperature and top-p; temperature 0 is one-hot."""
    if temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    mass = (logits / temperature).softmax(-1)
    return mass if top_p >= 1.0 else cut_top_p(mass, top_p)


def cut_top_p(mass: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens that holds ``top_p``, and whatever ties with its last.

    The threshold is found by bisection over the bits of a float32, which order like the values do.
    """
    bits = mass.view(torch.int32)
    low = torch.zeros(mass.shape[:-1], dtype=torch.int32, device=mass.device)
    high = bits.amax(-1) + 1
    for _ in range(31):
        middle = low + (high - low) // 2
        is_enough = mass.where(bits >= middle[..., None], 0.0).sum(-1) >= top_p
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle)
    kept = mass.where(bits >= low[..., None], 0.0)
    return kept / kept.sum(-1, keepdim=True)


def draw(law: Tensor, generator: torch.Generator) -> Tensor:
    """One token [N] int64 of each row: the winner of a race of exponentials."""
    times = torch.empty_like(law).exponential_(generator=generator).clamp_(min=_SMALLEST)
    return (law / times).argmax(-1)


def log_odds(logits: Tensor, scale: float) -> Tensor:
    """[N], log(q_max / (1 − q_max)) of softmax(``logits`` / ``scale``), clamped to ±40."""
    best, top = logits.max(-1, keepdim=True)
    others = logits.scatter(-1, top, -torch.inf)
    return -((others - best) / scale).exp().sum(-1).log().clamp(-_BOUND, _BOUND)


def draft_numbers(logits: Tensor, temperature: float, scales: Sequence[float]) -> Tensor:
    """[N, 3 + S] f32 of draft ``logits`` [N, V]: feature, gap, entropy, and the feature at ``scales``."""
    scale = temperature or 1.0
    two = logits.topk(2, dim=-1).values
    log_q = (logits / scale).log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    gap = ((two[:, 0] - two[:, 1]) / scale).clamp(max=_BOUND)
    return torch.stack(
        [log_odds(logits, scale), gap, entropy, *(log_odds(logits, one) for one in scales)], -1
    )
