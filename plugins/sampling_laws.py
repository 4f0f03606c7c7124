"""The law of the next token as a few numbers per row beside the logits: no table of probabilities.

Invariants: one float32 expression (``mass``, over ``total``) turns a logit into a probability, for drawing
and for judging; a greedy row is one-hot at its first maximum; tokens at NaN or −inf, below the row's cut,
and columns at or behind ``vocab_size`` have probability 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
#: Bound of ``Laws.scale``: a temperature too small to be inverted leaves the ties of the maximum.
LARGEST_SCALE = 3.4028234663852886e38


#: Tokens of a row among which a device looks for its cut, f32 each.
CUT_CANDIDATES = 2048


@dataclass(frozen=True, slots=True)
class Laws:
    """N laws over the first ``vocab_size`` columns of ``logits`` [N, ≥ vocab_size] f16, bf16 or f32.

    ``point`` [N] int64: first maximum. ``maximum`` [N] f32: its logit, −inf where no token is allowed
    (the row is then one-hot at token 0 and must not be emitted from). ``scale`` [N] f32: log2(e) over the
    temperature; 0 marks a one-hot row. ``cut`` [N] f32: smallest logit that has probability. ``total`` [N]
    f32: Σ ``mass`` over the tokens at or above the cut. ``masses`` [N, B] f32, where a device keeps them: the
    total's parts by blocks of columns, which spare a draw the reading of the row.
    """

    logits: Tensor
    vocab_size: int
    point: Tensor
    maximum: Tensor
    scale: Tensor
    cut: Tensor
    total: Tensor
    masses: Tensor | None = None

    def __len__(self) -> int:
        return self.point.numel()

    @property
    def row_numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What is stored per row: point, maximum, scale, cut, total."""
        return self.point, self.maximum, self.scale, self.cut, self.total


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of R rows' verified drafts.

    ``accepted_lens`` [R] int32 ≤ verify_lens. ``rows`` [R] int64: the target row behind the accepted
    drafts, which gives the next token. ``draft_rows`` [R] int64: row of the draft's law at that position,
    −1 where none was drafted. ``is_rejected`` [R] bool: that draft was judged and rejected.
    """

    accepted_lens: Tensor
    rows: Tensor
    draft_rows: Tensor
    is_rejected: Tensor


def scale_of(temperature: Tensor, maximum: Tensor) -> Tensor:
    """[N] f32 ``Laws.scale`` of rows with these temperatures and maxima."""
    is_sampled = (temperature > 0.0) & torch.isfinite(maximum)
    scale = (LOG2_E / temperature.float()).clamp(max=LARGEST_SCALE)
    return torch.where(is_sampled, scale, 0.0)


def inverse_map(draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] int32: the draft column of each target token, −1 where the drafter has none.

    ``draft_to_target`` [V_d] names the target token of each draft column; names are distinct.
    """
    columns = torch.arange(draft_to_target.numel(), device=draft_to_target.device)
    inverse = torch.full((vocab_size,), -1, dtype=torch.int32, device=columns.device)
    inverse[draft_to_target.long()] = columns.int()
    return inverse
