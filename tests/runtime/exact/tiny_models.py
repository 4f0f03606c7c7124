"""A target and a drafter small enough to enumerate: logits are a table over the last two tokens.

The target keeps its tokens in a real cache, slot by slot and position by position, so that a wrong
position, slot or length in the product changes its logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead


def random_table(vocab_size: int, scale: float, seed: int) -> Tensor:
    """Logits [V, V, V]: of the next token, given the last two."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab_size, vocab_size, vocab_size)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


class TableExecutor:
    """A target whose next-token logits are ``table[second last, last]``."""

    identity = ExecutorIdentity("table", "cpu", "float64", 1)

    def __init__(self, table: Tensor, num_slots: int, max_len: int) -> None:
        self.table = table
        self.vocab_size = table.shape[0]
        self.num_slots = num_slots
        self.max_len = max_len
        self.cache = torch.zeros(num_slots, max_len, dtype=torch.int64)

    def verify(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        slots = batch.slots[torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths)]
        self.cache[slots, batch.positions] = batch.token_ids
        before = self.cache[slots, batch.positions - 1]
        return self.table[before, self.cache[slots, batch.positions]], torch.zeros(0, 1)

    def prefill(self, batch: PackedBatch, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        logits, hidden = self.verify(batch)
        return logits[logit_rows], hidden


class TableDrafter(NoConfidenceHead):
    """A drafter whose logits are its own table over the last two tokens."""

    name = "table"
    reads_hidden = False
    draft_to_target: Tensor | None = None

    def __init__(self, table: Tensor, max_draft_len: int, *, is_block: bool = False) -> None:
        self.table = table
        self.max_draft_len = max_draft_len
        self.is_block = is_block
        self.last = torch.empty(0)
        self.before = torch.empty(0)

    def reset(self, slot: int) -> None:
        pass

    def observe(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        raise AssertionError("this drafter does not read hidden states")

    def lag(self, context: DraftContext) -> Tensor:
        return torch.zeros_like(context.slots)

    def refresh(self, context: DraftContext) -> None:
        pass

    def start(self, context: DraftContext) -> Tensor:
        self.last = context.history[context.slots, context.lens - 1]
        self.before = context.history[context.slots, context.lens - 2]
        return self.table[self.before, self.last]

    def step(self, position: int, tokens: Tensor) -> Tensor:
        self.before, self.last = self.last, tokens
        return self.table[self.before, self.last]


class HeadedTableDrafter(TableDrafter):
    """A TableDrafter with a confidence head, a table [V, V] of logits over the last two tokens."""

    has_confidence_head = True

    def __init__(
        self, table: Tensor, head: Tensor, max_draft_len: int, *, is_block: bool = False
    ) -> None:
        super().__init__(table, max_draft_len, is_block=is_block)
        self.head = head

    def confidence_logit(self) -> Tensor:
        return self.head[self.before, self.last]
