"""Drafts made outside the engine, verified by an engine of the mode ``draft_tokens_external``.

Every round of a request is one request of the executor: its tokens so far, and the drafts to verify. Which
of them those are is decided here, on the host, before the request is sent: a prefix, which may be empty.
This is the exact way for targets without EAGLE heads, and needs no plugin in the engine.

Greedy only: drafts are accepted by equality with the target's tokens, so what is verified cannot change
them. Written against the interface in ``builder/trtllm/assumptions.json``; not executed with TensorRT-LLM
where it was written.

Invariants: budget and floors are fixed before the drafts are made (``plan``); an empty prefix is a request
without drafts, never one with a draft that is not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.acceptance import Acceptance
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.sampling import Distribution
from trtllm_av.runtime.step import Drafts, RoundOutcome, RoundPlan, Trim

_POLL = timedelta(milliseconds=100)


@dataclass(frozen=True, slots=True)
class ExternalDrafts:
    """Drafts of R requests. ``slots`` [R] names their rows in the controller; ``contexts``: all their tokens
    so far; ``tokens`` [R,K] int64 and ``logits`` [R,K,V] as drafted, valid up to the plan's lengths."""

    slots: NDArray[np.int64]
    contexts: Sequence[Sequence[int]]
    tokens: Tensor
    logits: Tensor


class ExternalDraftVerifier:
    """Verifies rounds on ``executor`` (of ``bindings``) as ``controller`` decides.

    ``vocab_size`` is the real one; ``end_id`` ends a request in the middle of a round.
    """

    def __init__(
        self,
        executor: Any,
        bindings: Any,
        controller: AdaptiveController,
        *,
        vocab_size: int,
        end_id: int | None = None,
    ) -> None:
        self._executor = executor
        self._bindings = bindings
        self._controller = controller
        self._vocab_size = vocab_size
        self._end_id = end_id

    def plan(self, slots: NDArray[np.int64], draft_limits: Sequence[int]) -> RoundPlan:
        """The next round of the requests in ``slots`` [R], before their drafts are made."""
        is_adaptive = [True] * len(slots)
        return self._controller.plan(slots, draft_limits=draft_limits, is_adaptive=is_adaptive)

    def verify(self, plan: RoundPlan, drafts: ExternalDrafts) -> list[list[int]]:
        """The tokens that every request gains: accepted drafts, and one of the target's own.

        RequestError if the executor fails one.
        """
        num_rows, num_positions = drafts.tokens.shape
        features, confidence = torch_ops.score_drafts(
            drafts.logits,
            torch.zeros(num_rows),
            plan.coefficients,
            torch.zeros(1, dtype=torch.int32),
            vocab_size=self._vocab_size,
            draft_lens=plan.draft_lens,
        )
        survival, verify_lens, cu_seqlens = torch_ops.trim_drafts(
            confidence,
            plan.draft_lens,
            torch.ones(num_rows, dtype=torch.int32),
            plan.min_verify_lens,
            torch.tensor([plan.draft_budget], dtype=torch.int32),
        )
        emitted = self._run(drafts, verify_lens.tolist())
        accepted = [
            _num_equal(tokens, row[:length])
            for tokens, row, length in zip(
                emitted, drafts.tokens.tolist(), verify_lens.tolist(), strict=True
            )
        ]
        following = [
            tokens[count] if count < len(tokens) else tokens[-1]
            for tokens, count in zip(emitted, accepted, strict=True)
        ]
        deepest = int(plan.draft_lens.max()) if num_rows else 0
        laws = [Distribution.one_hot(drafts.tokens[:, i], self._vocab_size) for i in range(deepest)]
        outcome = RoundOutcome(
            Drafts(drafts.tokens, features, confidence, laws),
            Trim(survival, verify_lens, cu_seqlens),
            Acceptance(
                torch.tensor(accepted),
                torch.tensor(following),
                torch.full((num_rows,), torch.nan, dtype=confidence.dtype),
                torch.full((num_rows, num_positions), torch.nan, dtype=confidence.dtype),
            ),
            emitted,
            [None] * num_rows,
        )
        self._controller.observe(drafts.slots, plan, outcome, [len(tokens) for tokens in emitted])
        return emitted

    def _run(self, drafts: ExternalDrafts, verify_lens: Sequence[int]) -> list[list[int]]:
        b = self._bindings
        numbers: list[int] = []
        for context, row, length in zip(
            drafts.contexts, drafts.tokens.tolist(), verify_lens, strict=True
        ):
            config = b.ExternalDraftTokensConfig(tokens=row[:length]) if length else None
            request = b.Request(
                input_token_ids=list(context),
                max_tokens=length + 1,
                streaming=False,
                sampling_config=b.SamplingConfig(),
                output_config=b.OutputConfig(exclude_input_from_output=True),
                end_id=self._end_id,
                external_draft_tokens_config=config,
            )
            numbers.append(int(self._executor.enqueue_request(request)))
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        running = set(numbers)
        while running:
            for response in self._executor.await_responses(timeout=_POLL):
                number = int(response.request_id)
                if number not in running:
                    continue
                if response.has_error():
                    raise RequestError(f"verification failed: {response.error_msg}")
                tokens[number].extend(int(t) for t in response.result.output_token_ids[0])
                if response.result.is_final:
                    running.discard(number)
        if not all(tokens.values()):
            raise RequestError(
                "a verification returned no token; is the prompt at the engine's end?"
            )
        return [tokens[number] for number in numbers]


def _num_equal(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of ``drafts`` were accepted: those that the target's ``tokens`` begin with."""
    count = 0
    for token, draft in zip(tokens, drafts, strict=False):
        if token != draft:
            break
        count += 1
    return count
