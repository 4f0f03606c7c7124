"""What the round asks of an engine that holds the target model.

Invariants: a forward pass writes the keys and values of its packed tokens at the positions of the batch
and attends to everything before them in the slot; it never reads behind them. Verification passes return
logits for every packed row, prefill passes only for the rows that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtllm_av.runtime.models.batch import PackedBatch


@dataclass(frozen=True, slots=True)
class ExecutorIdentity:
    """What a measured cost profile depends on besides the model."""

    executor: str
    device: str
    dtype: str
    threads: int


class Executor(Protocol):
    """The target model behind one face."""

    @property
    def identity(self) -> ExecutorIdentity: ...

    @property
    def vocab_size(self) -> int:
        """Real vocabulary size; logits may have more, padded columns."""
        ...

    @property
    def num_slots(self) -> int: ...

    @property
    def max_len(self) -> int:
        """Positions per slot of the KV cache."""
        ...

    def verify(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and final hidden states [T, H] of decode rows (last token, then drafts)."""
        ...

    def prefill(self, batch: PackedBatch, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the packed rows ``logit_rows`` and hidden states [T, H] of prompt chunks."""
        ...
