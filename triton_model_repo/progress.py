"""What a request has produced, and the output tensors that say so.

Invariants: streamed responses, joined, are the tokens and the text of the one response that the same request
gets without streaming; an output is built only if the client asked for it. Names, types and shapes are
TensorRT-LLM's; ``av_*`` are additions. Nothing here needs Triton.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.request import TokenEvent
from trtllm_av.triton_model_repo.model_request import RowRequest

Outputs = dict[str, NDArray[Any]]


@dataclass(slots=True)
class Progress:
    """One row. ``pending_*`` is what no response has carried yet; the counts are totals."""

    request: RowRequest
    index: int
    call_key: int = 0
    pending_tokens: list[int] = field(default_factory=list)
    pending_text: str = ""
    pending_logprobs: list[float] = field(default_factory=list)
    cum_logprob: float = 0.0
    num_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    finish_reason: str | None = None
    arrival_ns: int = field(default_factory=time.time_ns)
    first_token_ns: int = 0
    last_token_ns: int = 0

    def add(self, event: TokenEvent) -> None:
        self.pending_tokens += event.token_ids
        self.pending_text += event.text
        if event.logprobs is not None:
            self.pending_logprobs += event.logprobs
            self.cum_logprob += sum(event.logprobs)
        self.num_tokens += len(event.token_ids)
        self.drafted += event.drafted
        self.verified += event.verified
        self.accepted += event.accepted
        self.finish_reason = event.finish_reason
        if event.token_ids:
            self.last_token_ns = time.time_ns()
            self.first_token_ns = self.first_token_ns or self.last_token_ns

    def clear_pending(self) -> None:
        self.pending_tokens = []
        self.pending_text = ""
        self.pending_logprobs = []


def _column(get: Callable[[Progress], Any], dtype: type) -> Callable[..., NDArray[Any]]:
    """A builder of [rows, 1]."""
    return lambda rows, _: np.array([[get(row)] for row in rows], dtype=dtype)


def _ids(row: Progress, has_input: bool) -> list[int]:
    return (row.request.prompt_token_ids if has_input else []) + row.pending_tokens


def _output_ids(rows: Sequence[Progress], has_input: bool) -> NDArray[np.int32]:
    """[rows, 1 beam, longest], shorter ones filled up with their pad_id."""
    ids = [_ids(row, has_input) for row in rows]
    result = np.empty((len(rows), 1, max(map(len, ids))), dtype=np.int32)
    for n, row in enumerate(rows):
        result[n, 0, : len(ids[n])] = ids[n]
        result[n, 0, len(ids[n]) :] = row.request.pad_id
    return result


def _log_probs(rows: Sequence[Progress], _: bool) -> NDArray[np.float32]:
    """[rows, 1 beam, longest] of the output tokens; zeros if they were not asked for."""
    width = max(len(row.pending_tokens) for row in rows)
    result = np.zeros((len(rows), 1, width), dtype=np.float32)
    for n, row in enumerate(rows):
        result[n, 0, : len(row.pending_logprobs)] = row.pending_logprobs
    return result


def _texts(rows: Sequence[Progress], has_input: bool) -> NDArray[Any]:
    return np.array(
        [
            [((row.request.prompt_text if has_input else "") + row.pending_text).encode()]
            for row in rows
        ],
        dtype=np.object_,
    )


# Counts of a whole request: meaningful in every response, final in the last.
_COUNTS: dict[str, Callable[..., NDArray[Any]]] = {
    "cum_log_probs": _column(lambda row: row.cum_logprob, np.float32),
    "acceptance_rate": _column(
        lambda row: row.accepted / row.verified if row.verified else 0.0, np.float32
    ),
    "total_accepted_draft_tokens": _column(lambda row: row.accepted, np.int32),
    "total_draft_tokens": _column(lambda row: row.drafted, np.int32),
    "av_verified_draft_tokens": _column(lambda row: row.verified, np.int32),
    "av_trimmed_draft_tokens": _column(lambda row: row.drafted - row.verified, np.int32),
    "num_input_tokens": _column(lambda row: len(row.request.prompt_token_ids), np.int32),
    "num_output_tokens": _column(lambda row: row.num_tokens, np.int32),
    "arrival_time_ns": _column(lambda row: row.arrival_ns, np.int64),
    "first_token_time_ns": _column(lambda row: row.first_token_ns, np.int64),
    "last_token_time_ns": _column(lambda row: row.last_token_ns, np.int64),
    "finish_reason": _column(lambda row: (row.finish_reason or "").encode(), np.object_),
}

# [rows, …], as Triton wants it from a model with a batch dimension.
TOKEN_OUTPUTS: dict[str, Callable[..., NDArray[Any]]] = _COUNTS | {
    "output_ids": _output_ids,
    "sequence_length": lambda rows, has_input: np.array(
        [[len(_ids(row, has_input))] for row in rows], dtype=np.int32
    ),
    "output_log_probs": _log_probs,
    "batch_index": _column(lambda row: row.index, np.int32),
    "sequence_index": _column(lambda row: 0, np.int32),
    "av_text": _texts,
    "av_call": _column(lambda row: row.call_key, np.int64),
}

TEXT_OUTPUTS: dict[str, Callable[..., NDArray[Any]]] = _COUNTS | {
    "text_output": _texts,
    "output_log_probs": lambda rows, has_input: _log_probs(rows, has_input)[:, 0],
}


def build_outputs(
    builders: Mapping[str, Callable[..., NDArray[Any]]],
    names: Sequence[str],
    rows: Sequence[Progress],
    *,
    has_input: bool,
) -> Outputs:
    """The tensors ``names`` for ``rows``, from what they have pending.

    ``has_input``: tokens and text begin with the prompt's.
    """
    return {name: builders[name](rows, has_input) for name in names if name in builders}
