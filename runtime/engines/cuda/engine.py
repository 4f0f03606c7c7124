"""Continuous batching over a device that runs one round ahead of what the host knows.

Objective: the face of ``runtime.scheduler.Engine`` with no host stall. ``step`` launches the next round
first and then reads the one before it, so that planning, emission and launches happen while the device
works. Invariants: a round is planned from rounds that were read; the host learns of an end one round late,
and what the device computed for the request after it is discarded, uncounted and untrained; a slot is
given away in stream order, so that nothing of the old request can reach the new one; a request field that
the device path does not honour is refused by name. Not thread-safe, as its base.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.depth import Decision
from trtllm_av.runtime.detokenizer import Tokenizer
from trtllm_av.runtime.engines.base import Executor
from trtllm_av.runtime.engines.cuda.costs import DeviceCosts
from trtllm_av.runtime.engines.cuda.executor import (
    CudaExecutor,
    PrefillTicket,
    RoundInputs,
    RoundTicket,
)
from trtllm_av.runtime.engines.cuda.feedback import LateFeedback
from trtllm_av.runtime.engines.cuda.graphs import device_error
from trtllm_av.runtime.engines.cuda.host_rows import HostRows
from trtllm_av.runtime.engines.cuda.prefill import Chunk
from trtllm_av.runtime.engines.cuda.state import Admission
from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.request import Request, TokenEvent
from trtllm_av.runtime.scheduler import Engine
from trtllm_av.runtime.slots import SlotTable
from trtllm_av.runtime.step import NO_TOKEN, RoundPlan


class _NoTable(SlotTable):
    """The host keeps no copy of what the device holds."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def commit(self, slot: int, tokens: list[int]) -> None:
        """The device has committed them already."""


@dataclass(frozen=True, slots=True)
class _PendingPrefill:
    """A prefill pass that was not read yet; ``requests`` are those whose prompt ended in it."""

    ticket: PrefillTicket
    requests: list[Request]


@dataclass(frozen=True, slots=True)
class _PendingRound:
    """A round that was not read yet; ``owners`` [R] are the requests that held ``slots`` [R]."""

    ticket: RoundTicket
    slots: NDArray[np.int64]
    owners: NDArray[np.int64]
    plan: RoundPlan
    decision: Decision | None


class CudaEngine(Engine):
    """Requests over a ``CudaExecutor``; ``name`` is what errors of the device call this engine."""

    def __init__(
        self,
        executor: CudaExecutor,
        controller: AdaptiveController,
        *,
        max_seq_len: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        prefill_chunk: int = 2048,
        name: str = "cuda",
    ) -> None:
        super().__init__(
            cast(Executor, executor),  # its rounds replace all that the base asks of one
            None,
            controller,
            KeyedSource(),
            max_seq_len=max_seq_len,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            prefill_chunk=prefill_chunk,
        )
        self.name = name
        self.device = executor
        self.slots = _NoTable()
        self._pending: deque[_PendingPrefill | _PendingRound] = deque()
        self._host = HostRows(executor.num_slots, controller.num_positions)
        self._eos = np.array(self.eos_token_ids, np.int64)
        self._filling: dict[int, Request] = {}  # prompts that are not computed yet, by arrival
        self._feedback = LateFeedback(controller)
        self._costs = (
            controller.cost_model if isinstance(controller.cost_model, DeviceCosts) else None
        )
        #: Totals over rounds that were read: of the device, of drafting alone, and of waiting for it.
        self.device_ms = self.draft_ms = self.wait_seconds = 0.0
        self._step_started = 0.0

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._pending)

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """As the base; RequestError for what only the CPU's engine does."""
        if params.is_constrained:
            names = ", ".join(sorted(params.model_fields_set & _RULES))
            raise RequestError(
                f"{names or 'token rules'}: device 'cuda' does not edit logits; leave it out or use "
                "device 'cpu'"
            )
        if params.logprobs:
            raise RequestError(
                "logprobs=True: device 'cuda' does not return log-probabilities; leave it out or use "
                "device 'cpu'"
            )
        return super().submit(prompt_token_ids, params)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Launch a round and a prefill pass where there are rows for them; read what was launched before."""
        self._step_started = time.perf_counter()
        events = [
            TokenEvent(request.request_id, [], request.stream.flush(), finish_reason="cancelled")
            for request in self._cancelled
        ]
        self._cancelled.clear()
        num_unread = len(self._pending)
        try:
            self._admit()
            if self._host.decoding.size:
                self._launch(self._host.decoding)
            if self._filling:
                self._launch_prefill()
            for _ in range(num_unread):
                pending = self._pending.popleft()
                if isinstance(pending, _PendingPrefill):
                    events += self._read_first_tokens(pending)
                else:
                    events += self._read_round(pending)
        except RuntimeError as error:
            raise device_error(f"engine {self.name!r}: a decode round", error) from error
        return events

    def _admit(self) -> None:
        admissions = []
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = heapq.heappop(self._free)
            params = request.params
            admissions.append(
                Admission(
                    request.slot,
                    params.max_tokens,
                    secrets.randbits(63) if params.seed is None else params.seed,
                    request.request_id if self.controller.is_adaptive else 0,
                    params.temperature,
                    params.top_k,
                    params.top_p,
                )
            )
            self.controller.admit(request.slot)
            self._live[request.slot] = request
            self._host.admit(request, has_text=self.tokenizer is not None)
            self._filling[request.request_id] = request
        if admissions:
            self.device.round.state.admit(admissions)

    def _release(self, request: Request) -> None:
        super()._release(request)
        self._host.release(request.slot)
        self._filling.pop(request.request_id, None)

    def _launch(self, slots: NDArray[np.int64]) -> None:
        rows = self._host
        if self._costs is not None:
            self._costs.set_batch(slots.size, float(rows.context[slots].sum()) / slots.size)
        plan = self.controller.plan(
            slots,
            draft_limits=rows.draft_limits(slots).tolist(),
            is_adaptive=rows.adaptive_flags,
        )
        inputs = RoundInputs(
            slots,
            plan.draft_lens.numpy(),
            plan.min_verify_lens.numpy(),
            plan.draft_budget,
            self._coefficients(plan),
            rows.sampling(slots),
            plan.is_scored,
        )
        decision = self.controller.last_decision
        ticket = self.device.launch(inputs)
        self._pending.append(_PendingRound(ticket, slots, rows.owner[slots], plan, decision))

    def _coefficients(self, plan: RoundPlan) -> NDArray[np.float32]:
        """[1+K]; an engine without drafts has none of its own."""
        if self.num_speculative_tokens == 0:
            return np.zeros(1 + self.device.num_positions, np.float32)
        return plan.coefficients.numpy()

    def _launch_prefill(self) -> None:
        chunks: list[Chunk] = []
        done: list[Request] = []
        budget = self.prefill_chunk
        for request in list(self._filling.values()):
            end = min(request.prefilled + budget, len(request.prompt))
            tokens = request.prompt[request.prefilled : end]
            following = request.prompt[end] if end < len(request.prompt) else None
            chunks.append(Chunk(request.slot, request.prefilled, tokens, following))
            request.prefilled = end
            if following is None:
                done.append(request)
                del self._filling[request.request_id]
                self._host.start(request.slot)
            budget -= len(tokens)
            if budget == 0:
                break
        sampling = self._host.sampling(np.array([request.slot for request in done], np.int64))
        ticket = self.device.prefill(chunks, sampling)
        self._pending.append(_PendingPrefill(ticket, done))
        self.observer.report.prefill_tokens += sum(len(chunk.tokens) for chunk in chunks)

    def _read_first_tokens(self, pending: _PendingPrefill) -> list[TokenEvent]:
        tokens = self.device.read_first_tokens(pending.ticket)
        events = []
        for request, token in zip(pending.requests, tokens, strict=True):
            if self._live.get(request.slot) is request:  # not cancelled meanwhile
                self._host.remaining[request.slot] -= 1
                self._host.context[request.slot] += 1
                events.append(self._emit(request, [token], None))
        self.observer.report.emitted += sum(len(event.token_ids) for event in events)
        return events

    def _read_round(self, pending: _PendingRound) -> list[TokenEvent]:
        plan, slots, rows = pending.plan, pending.slots, self._host
        waiting = time.perf_counter()
        pending.ticket.slot.fence.wait()
        self.wait_seconds += time.perf_counter() - waiting
        results = self.device.read(pending.ticket)
        self._count_device_time(pending.ticket)
        lens = results["lens"]
        # A request that has ended, or was cancelled, meanwhile holds its slot no more.
        is_counted = rows.owner[slots] == pending.owners
        tokens = emitted_tokens(results)
        num_emitted = np.where(is_counted, lens[3], 0)
        rows.remaining[slots] -= num_emitted
        rows.context[slots] += num_emitted
        needs_look = is_counted & (rows.is_watched[slots] | self._has_end(slots, tokens, lens))
        events = self._emit_rows(pending, tokens, lens, is_counted & ~needs_look)
        width = results["confidence"].shape[1]
        trainable_lens = np.where(is_counted, width, 0).astype(np.int32)
        for r in np.flatnonzero(needs_look).tolist():
            request = self._live[int(slots[r])]
            if not rows.is_watched[slots[r]]:
                # All but the first of its tokens went past its stream.
                request.stream.skip(len(request.output) - 1)
            drafted, verified, accepted, length = lens[:, r].tolist()
            event = self._emit(
                request, tokens[r, :length].tolist(), None, (drafted, verified, accepted)
            )
            if event.finish_reason is not None:
                trainable_lens[r] = min(len(event.token_ids), trainable_lens[r])
            events.append(event)
        outcome = self._feedback.observe(slots, plan, results, trainable_lens, is_counted)
        if events:
            counted = replace(plan, draft_lens=torch.from_numpy(lens[0, is_counted]))
            self.controller.last_decision = pending.decision  # that of the round which is counted
            emitted = sum(len(event.token_ids) for event in events)
            # The host's step: it waits for the round, so that both take equally long.
            seconds = time.perf_counter() - self._step_started
            self.observer.count(counted, outcome, seconds, emitted)
        return events

    def _has_end(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], lens: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """[R] True for rows that emit their last token, an end-of-sequence token or none at all."""
        is_end = np.isin(tokens, self._eos) & ~self._host.ignores_eos[slots, None]
        is_end |= tokens == NO_TOKEN
        is_end &= np.arange(tokens.shape[1]) < lens[3][:, None]
        found: NDArray[np.bool_] = is_end.any(axis=1) | (self._host.remaining[slots] <= 0)
        return found

    def _emit_rows(
        self,
        pending: _PendingRound,
        tokens: NDArray[np.int64],
        lens: NDArray[np.int32],
        is_plain: NDArray[np.bool_],
    ) -> list[TokenEvent]:
        """Events of rows that only go on: nothing ends and nobody asks for text."""
        owners, slots = pending.owners[is_plain].tolist(), pending.slots[is_plain].tolist()
        drafted, verified, accepted, lengths = lens[:, is_plain].tolist()
        kept = [
            row[:length] for row, length in zip(tokens[is_plain].tolist(), lengths, strict=True)
        ]
        for slot, row in zip(slots, kept, strict=True):
            self._live[slot].output.extend(row)
        nothing = repeat(None)
        fields = zip(
            owners, kept, repeat(""), nothing, nothing, nothing, drafted, verified, accepted
        )
        return list(map(TokenEvent._make, fields))

    def _count_device_time(self, ticket: RoundTicket) -> None:
        draft_ms = ticket.drafted.ms_since(ticket.started)
        verify_ms = ticket.ended.ms_since(ticket.drafted)
        self.draft_ms += draft_ms
        self.device_ms += draft_ms + verify_ms
        if self._costs is not None:
            self._costs.observe(
                ticket.requests, ticket.num_tokens, ticket.depth, draft_ms, verify_ms
            )


#: Fields of SamplingParams that edit logits.
_RULES = frozenset(
    {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words_ids",
        "min_tokens",
    }
)


def emitted_tokens(results: dict[str, Any]) -> NDArray[np.int64]:
    """[R, K+1] tokens of each row in order: accepted drafts, the token behind them, then anything."""
    tokens: NDArray[np.int64] = results["tokens"].copy()
    tokens[np.arange(len(tokens)), results["lens"][2]] = results["tokens"][:, -1]
    return tokens
