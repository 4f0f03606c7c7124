"""Which drafter goes into an engine, and what a build asks of it, whatever its family.

Invariants: a drafter is exported only with the target whose tokens it means; what the runtime needs
beside the plan is in the section of ``config.json`` that ``describe`` returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trtllm_av.runtime.models.llama import LlamaModel

#: Logits of the exported step [N, V_d], and the torch module's, in the same rows.
LogitPair = tuple[Tensor, Tensor]


class DraftSource(Protocol):
    """A drafter that can be exported next to its target."""

    @property
    def label(self) -> str:
        """What the report calls it."""
        ...

    @property
    def vocab_size(self) -> int:
        """V_d, columns of its logits."""
        ...

    @property
    def num_attention_layers(self) -> int: ...

    def export(self, dtype: torch.dtype, max_len: int, folder: Path) -> None:
        """Write ``draft_step.onnx`` and what belongs to it, next to the target's ``verify.onnx``."""
        ...

    def check(
        self, folder: Path, target: LlamaModel, num_positions: int
    ) -> tuple[float, list[LogitPair]]:
        """The largest difference from the torch module, and logits of both; raises BuildError."""
        ...

    def describe(self) -> dict[str, Any]:
        """``method`` and what the runtime's drafter of that name takes."""
        ...
