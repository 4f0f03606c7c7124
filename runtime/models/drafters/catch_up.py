"""How a drafter's KV cache catches up with committed tokens without padding every row to the longest gap."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Longest pass of one row that catches up: bounds the attention mask.
CHUNK = 512


def catch_up_passes(
    starts: Tensor, ends: Tensor, longest: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Split gaps [R] into passes (rows, starts, ends): long ones row by row, then all rows together.

    Attention pads rows to the longest, so a gap beyond ``longest`` is fed in chunks of its own, except
    for its last entry.
    """
    starts = starts.clone()
    for row in (ends - starts > longest).nonzero().view(-1):
        rest = ends[row] - 1
        while starts[row] < rest:
            end = torch.minimum(starts[row] + CHUNK, rest)
            yield row[None], starts[row][None].clone(), end[None]
            starts[row] = end
    yield torch.arange(starts.numel()), starts, ends
