"""How well a confidence tells accepted drafts from rejected ones.

A label is the chance of acceptance Σ min(p, q), and every position weighs as much as its prefix is likely
to be accepted, so that the figures are those of drafting. Expected calibration error has 15 bins of equal
weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BINS = 15


@dataclass(slots=True)
class CalibrationReport:
    """By position, then ``pooled`` over all and ``not_first`` without the first: area under the ROC curve
    of the head (``auc``) and of the draft's top probability (``auc_top``), calibration error and log loss
    of the head."""

    auc: list[float]
    auc_top: list[float]
    ece: list[float]
    log_loss: list[float]
    pooled: dict[str, float]
    not_first: dict[str, float]


def area_under_curve(score: Tensor, label: Tensor, weight: Tensor) -> float:
    """Chance that an accepted draft has the higher ``score`` [N]; labels in 0 … 1, ties count half."""
    rank = score.double().unique(return_inverse=True)[1]
    size = int(rank.max()) + 1
    accepted = torch.zeros(size, dtype=torch.float64).index_add_(0, rank, weight * label)
    rejected = torch.zeros(size, dtype=torch.float64).index_add_(0, rank, weight * (1 - label))
    below = rejected.cumsum(0) - rejected / 2
    return float((accepted * below).sum() / (accepted.sum() * rejected.sum()))


def calibration_error(probability: Tensor, label: Tensor, weight: Tensor) -> float:
    """Mean distance of predicted and true acceptance over bins of equal weight."""
    order = probability.argsort()
    share = weight[order]
    middle = (share.cumsum(0) - share / 2) / share.sum()
    bins = (middle * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gap = share * (probability[order] - label[order])
    total = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, bins, gap)
    return float(total.abs().sum() / share.sum())


def _figures(logit: Tensor, top: Tensor, label: Tensor, weight: Tensor) -> dict[str, float]:
    surprise = F.binary_cross_entropy_with_logits(logit, label, reduction="none")
    return {
        "auc": area_under_curve(logit, label, weight),
        "auc_top": area_under_curve(top, label, weight),
        "ece": calibration_error(logit.sigmoid(), label, weight),
        "log_loss": float((weight * surprise).sum() / weight.sum()),
    }


class Judgements:
    """Collects the confidences of one measurement, position by position."""

    def __init__(self, num_positions: int) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(num_positions)]

    def add(self, position: int, logit: Tensor, top: Tensor, label: Tensor, weight: Tensor) -> None:
        """All [B, T]; positions of weight 0 do not count."""
        rows = torch.stack([part.double() for part in (logit, top, label.clamp(0, 1), weight)])
        self._parts[position].append(rows[:, weight > 0].cpu())

    def report(self) -> CalibrationReport | None:
        """None if there was no confidence to judge at some position."""
        if not all(self._parts):
            return None
        positions = [torch.cat(parts, 1) for parts in self._parts]
        if not all(rows.numel() for rows in positions):
            return None
        by_position = [_figures(*rows) for rows in positions]
        return CalibrationReport(
            *([row[name] for row in by_position] for name in ("auc", "auc_top", "ece", "log_loss")),
            pooled=_figures(*torch.cat(positions, 1)),
            not_first=_figures(*torch.cat(positions[1:], 1)) if len(positions) > 1 else {},
        )
