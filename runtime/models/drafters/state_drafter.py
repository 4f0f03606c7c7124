"""What drafters on the target's hidden states share: the states, and how far their KV cache is.

Entry t of a slot is made of the target's hidden state of token t and of the token behind it; of a drafter
with several modules, entry t of module k of the state of module k − 1 and of token t + 1 + k. Invariants:
entries of committed tokens are computed from the target's states, also where a draft of the same token
was computed from something else before; a slot may stay behind for any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trtllm_av.runtime.models.drafters.base import DraftContext
from trtllm_av.runtime.models.drafters.eagle_head import EagleHeadConfig
from trtllm_av.runtime.models.drafters.hidden_states import HiddenStates


class StateDrafter(ABC):
    """The bookkeeping half of a ``Drafter`` whose modules are layers of the shape ``layer``."""

    name: str
    reads_hidden = True

    def __init__(
        self,
        layer: EagleHeadConfig,
        draft_to_target: Tensor,
        dtype: torch.dtype,
        *,
        num_slots: int,
        max_len: int,
        max_draft_len: int,
        num_modules: int = 1,
    ) -> None:
        """``draft_to_target`` [V_d] int64 names the target token of each row of the output layer; ``dtype``
        is that of the target's states, ``num_slots`` and ``max_len`` are those of its cache."""
        self.max_draft_len = max_draft_len
        self.draft_to_target: Tensor | None = draft_to_target
        sizes = (layer.num_heads, layer.intermediate_size, draft_to_target.numel())
        self.cost_key = f"{self.name} {','.join(map(str, sizes))}"
        self._hidden = HiddenStates(num_slots, max_len, layer.hidden_size, dtype)
        #: Entries of each module that its KV cache holds, all of committed tokens.
        self._held = torch.zeros(num_modules, num_slots, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        self._held[:, slot] = 0

    def observe(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        self._hidden.store(slots, starts, cu_seqlens, hidden)

    def lag(self, context: DraftContext) -> Tensor:
        return (self._committed(context.lens) - self._held[:, context.slots]).clamp_min(0).amax(0)

    def refresh(self, context: DraftContext) -> None:
        rows = (self.lag(context) > 0).nonzero().view(-1)
        if rows.numel():
            self._hold(DraftContext(context.slots[rows], context.lens[rows], context.history))

    def _committed(self, lens: Tensor) -> Tensor:
        """[modules, R] entries that consist of ``lens`` [R] committed tokens."""
        # One entry less than tokens: the last token's entry needs the one after it.
        return (lens - 1 - torch.arange(len(self._held))[:, None]).clamp_min(0)

    @abstractmethod
    def _hold(self, context: DraftContext) -> None:
        """Make the KV cache hold every entry of the committed tokens."""
