"""The fixed memory of a round: what the host sends, what it gets back, and what stages hand on.

Invariants: for one request bucket every part lies at one address for good, so that captured graphs can
refer to it; buckets share the storage, because rounds follow one another in one stream; inputs are one
block and results are one block, each a single copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_av.runtime.engines.cuda.round_ops import DraftRecord, Rows
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.engines.cuda.transfer import carve, carved_bytes

Parts = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What sizes a round's memory besides the number of requests.

    ``draft_columns``: of the draft logits, 0 without a drafter; ``dtype`` theirs; ``hidden`` the width of
    the drafter's state.
    """

    num_positions: int
    draft_columns: int
    hidden: int
    dtype: torch.dtype

    def inputs(self, requests: int) -> Parts:
        """What the host fixes before a round; ``slots`` may repeat the scratch slot."""
        return {
            "budget": (torch.int32, (1,)),
            "coefficients": (torch.float32, (1 + self.num_positions,)),
            "slots": (torch.int64, (requests,)),
            "draft_lens": (torch.int32, (requests,)),
            "floors": (torch.int32, (requests,)),
        }

    def results(self, requests: int) -> Parts:
        """What a round tells the host. ``lens``: drafted, verified, accepted, emitted; ``tokens``: the
        drafts and, last, the token behind the accepted ones."""
        width = self.num_positions
        return {
            "statistics": (torch.float64, (width, 6)),
            "confidence": (torch.float32, (requests, width)),
            "features": (torch.float32, (requests, width, 1)),
            "overlap": (torch.float32, (requests,)),
            "lens": (torch.int32, (4, requests)),
            "tokens": (torch.int64, (requests, width + 1)),
        }

    def scratch(self, requests: int) -> Parts:
        """What the stages of a round hand on: the rows as they were read, and the drafts.

        ``laws``: maximum, scale, cut and total of each draft's law, ``points`` its first maximum.
        """
        width = self.num_positions
        return {
            "position": (torch.int32, (1,)),
            "integers": (torch.int64, (len(Field), requests)),
            "floats": (torch.float32, (2, requests)),
            "kv_lens": (torch.int32, (requests,)),
            "base_lens": (torch.int32, (requests,)),
            "draft_lens": (torch.int32, (requests,)),
            "draft_tokens": (torch.int64, (requests, width)),
            "points": (torch.int64, (requests, width)),
            "laws": (torch.float32, (4, requests, width)),
            "token": (torch.int64, (requests,)),
            "state": (self.dtype, (requests, self.hidden)),
            "logits": (self.dtype, (requests, width, self.draft_columns)),
        }


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """The memory of one request bucket; see ``RoundShape`` for the names."""

    requests: int
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    scratch: dict[str, Tensor]

    @property
    def rows(self) -> Rows:
        """The rows as the round reads them."""
        names = ("integers", "floats", "kv_lens", "base_lens", "draft_lens")
        return Rows(*(self.scratch[name] for name in names))

    @property
    def drafts(self) -> DraftRecord:
        """Where drafts are kept."""
        names = ("draft_tokens", "points", "laws", "logits", "token", "state")
        return DraftRecord(*(self.scratch[name] for name in names))


class RoundMemory:
    """Storage for up to ``max_requests`` requests; hands out the views of each bucket."""

    def __init__(self, shape: RoundShape, max_requests: int, device: torch.device) -> None:
        self.shape = shape

        def storage(parts: Parts) -> Tensor:
            return torch.zeros(carved_bytes(parts), dtype=torch.uint8, device=device)

        self.inputs = storage(shape.inputs(max_requests))
        self.results = storage(shape.results(max_requests))
        self._scratch = storage(shape.scratch(max_requests))
        self._buffers: dict[int, RoundBuffers] = {}

    def buffers(self, requests: int) -> RoundBuffers:
        """The views for ``requests`` rows."""
        found = self._buffers.get(requests)
        if found is None:
            found = self._buffers[requests] = RoundBuffers(
                requests,
                carve(self.inputs, self.shape.inputs(requests)),
                carve(self.results, self.shape.results(requests)),
                carve(self._scratch, self.shape.scratch(requests)),
            )
        return found
