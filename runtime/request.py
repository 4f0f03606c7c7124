"""A request as the engine sees it, and what it reports of one.

Invariants: ``output`` holds exactly the emitted tokens; a request decodes once its whole prompt is in the
target's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trtllm_av.runtime.output_stream import FinishReason, OutputStream
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.token_rules import TokenRules


class TokenEvent(NamedTuple):
    """What one step added to one request; ``token_ids`` and ``text`` are the new ones only.

    ``drafted``, ``verified``, ``accepted``: this step's drafts of the request, counted like RoundReport's.
    """

    request_id: int
    token_ids: list[int]
    text: str
    logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    verified: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Request:
    """A request between submission and its end; ``slot`` is −1 while it waits."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    stream: OutputStream
    rules: TokenRules | None
    slot: int = -1
    prefilled: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.prefilled == len(self.prompt)
