"""What serves, wherever it came from: the parts of an engine before they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trtllm_av.runtime.detokenizer import Tokenizer
from trtllm_av.runtime.engines.base import Executor
from trtllm_av.runtime.models.drafters.base import Drafter
from trtllm_av.runtime.operations import DraftOperations, TorchOperations

#: Prompt tokens of one step if nobody says otherwise.
DEFAULT_PREFILL_CHUNK = 256


@dataclass(slots=True)
class EngineParts:
    """``drafter`` is None without speculation, and ``num_positions`` (K) is 0 then; ``digest`` names the
    target's weights."""

    executor: Executor
    drafter: Drafter | None
    digest: str
    num_positions: int
    max_seq_len: int
    prefill_chunk: int
    eos_token_ids: Sequence[int]
    tokenizer: Tokenizer | None
    operations: DraftOperations = field(default_factory=TorchOperations)
