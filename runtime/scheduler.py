"""Continuous batching: requests join and leave at any round, each round runs once over all live rows.

Invariants: a request occupies one slot from admission to its end and no other request sees the slot in
between; one call of ``step`` runs at most one decode round and one prefill pass; a request draws random
numbers under a (request number, round) that no other draw of this engine ever has; nothing behind a stop
is emitted or trains the estimator; a cancelled request leaves before the next round. Not thread-safe:
one thread calls ``submit``, ``cancel`` and ``step``.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections import deque
from collections.abc import Sequence

import torch

from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.depth import MAX_PROBE_PERIOD
from trtllm_av.runtime.detokenizer import Tokenizer
from trtllm_av.runtime.engines.base import Executor
from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.base import DraftContext, Drafter
from trtllm_av.runtime.observability import EngineObserver
from trtllm_av.runtime.output_stream import OutputStream
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import Purpose, RandomSource
from trtllm_av.runtime.request import Request, TokenEvent
from trtllm_av.runtime.sampling import distribution
from trtllm_av.runtime.slots import SlotTable
from trtllm_av.runtime.step import (
    NO_TOKEN,
    DecodeRows,
    Round,
    RoundPlan,
    mark_empty,
    token_logprobs,
)
from trtllm_av.runtime.token_rules import TokenRules


class Engine:
    """Slots, rounds and requests over one executor.

    ``prefill_chunk`` bounds the prompt tokens of one step. ``controller.mode`` decides whether random
    keys carry the request number: with adaptive verification they must, because two live requests with
    one seed would otherwise reveal each other's draws through the shared trim.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter | None,
        controller: AdaptiveController,
        source: RandomSource,
        *,
        max_seq_len: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        is_greedy_draft: bool = False,
        prefill_chunk: int = 256,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.executor = executor
        self.drafter = drafter
        self.controller = controller
        self.source = source
        self.max_seq_len = max_seq_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.num_speculative_tokens = controller.num_positions
        self.round = Round(
            executor,
            drafter,
            source,
            num_speculative_tokens=controller.num_positions,
            is_greedy_draft=is_greedy_draft,
            dtype=dtype,
            options=controller.options,
        )
        margin = 2 * (controller.num_positions + 1)
        self.slots = SlotTable(executor.num_slots, max_seq_len + margin)
        self._free = list(range(executor.num_slots))
        self._waiting: deque[Request] = deque()
        self._live: dict[int, Request] = {}
        self._by_id: dict[int, Request] = {}
        self._cancelled: list[Request] = []
        self._num_submitted = 0
        self.observer = EngineObserver(controller, executor.num_slots)

    @property
    def vocab_size(self) -> int:
        return self.executor.vocab_size

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._live or self._cancelled)

    @property
    def num_live(self) -> int:
        """Requests that hold a slot."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def report(self) -> RoundReport:
        """Totals since the last reset; the object goes on counting."""
        return self.observer.totals()

    def reset_report(self) -> None:
        self.observer.start_report()

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; RequestError if it can never be served."""
        prompt = [int(token) for token in prompt_token_ids]
        if not prompt:
            raise RequestError("the prompt has no tokens; send at least one")
        if (worst := min(prompt)) < 0 or (worst := max(prompt)) >= self.vocab_size:
            raise RequestError(
                f"prompt token {worst} is outside the vocabulary of {self.vocab_size}; "
                "encode the prompt with this model's tokenizer"
            )
        if len(prompt) + params.max_tokens > self.max_seq_len:
            raise RequestError(
                f"prompt of {len(prompt)} tokens + max_tokens={params.max_tokens} exceeds "
                f"max_seq_len={self.max_seq_len}; shorten one of them"
            )
        wanted = params.num_speculative_tokens
        if wanted is not None and wanted > self.num_speculative_tokens:
            raise RequestError(
                f"num_speculative_tokens={wanted} exceeds this engine's "
                f"{self.num_speculative_tokens}; ask for at most that"
            )
        rules = TokenRules(params, prompt, self.eos_token_ids, vocab_size=self.vocab_size)
        stream = OutputStream(self.tokenizer, params, self.eos_token_ids)
        self._num_submitted += 1
        request = Request(
            self._num_submitted, prompt, params, stream, rules if rules.is_active else None
        )
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        return request.request_id

    def cancel(self, request_id: int) -> bool:
        """End a request before the next round; False if it has ended already."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return False
        if request.slot < 0:
            self._waiting.remove(request)
        else:
            self._release(request)
        self._cancelled.append(request)
        return True

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One decode round over the rows that decode, and one prefill pass over those that do not yet."""
        events = [
            TokenEvent(request.request_id, [], request.stream.flush(), finish_reason="cancelled")
            for request in self._cancelled
        ]
        self._cancelled.clear()
        self._admit()
        rows = [self._live[slot] for slot in sorted(self._live)]
        decoding = [request for request in rows if request.is_decoding]
        if decoding:
            events += self._decode(decoding)
        # In order of arrival: by slot, short prompts in low slots could hold up a long one for good.
        filling = sorted(
            (request for request in rows if not request.is_decoding), key=lambda r: r.request_id
        )
        if filling:
            events += self._prefill(filling)
        return events

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = heapq.heappop(self._free)
            params = request.params
            seed = secrets.randbits(63) if params.seed is None else params.seed
            self.slots.admit(
                request.slot,
                torch.tensor(request.prompt, dtype=torch.int64),
                seed=seed,
                request_number=request.request_id if self.controller.is_adaptive else 0,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
            )
            if self.drafter is not None:
                self.drafter.reset(request.slot)
            self.controller.admit(request.slot)
            self._live[request.slot] = request

    def _release(self, request: Request) -> None:
        del self._live[request.slot]
        heapq.heappush(self._free, request.slot)
        self._by_id.pop(request.request_id, None)

    def _rows(self, requests: list[Request]) -> DecodeRows:
        slots = torch.tensor([request.slot for request in requests], dtype=torch.int64)
        table = self.slots
        return DecodeRows(
            slots=slots,
            lens=table.lens[slots],
            history=table.history,
            seeds=table.seeds[slots],
            request_numbers=table.request_numbers[slots],
            rounds=table.rounds[slots],
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            rules=[request.rules for request in requests],
            outputs=[request.output for request in requests],
            wants_logprobs=[request.params.logprobs for request in requests],
        )

    def _decode(self, requests: list[Request]) -> list[TokenEvent]:
        started = time.perf_counter()
        rows = self._rows(requests)
        plan = self.controller.plan(
            rows.slots.numpy(),
            draft_limits=[self._draft_limit(request) for request in requests],
            is_adaptive=[request.params.adaptive for request in requests],
        )
        # Before the first draw: a failed round's keys are used up.
        self.slots.rounds[rows.slots] += 1
        outcome = self.round.run(rows, plan)
        events: list[TokenEvent] = []
        trainable_lens: list[int] = []
        drafts = zip(
            plan.draft_lens.tolist(),
            outcome.trim.verify_lens.tolist(),
            outcome.acceptance.accepted_lens.tolist(),
            strict=True,
        )
        for r, (request, counts) in enumerate(zip(requests, drafts, strict=True)):
            event = self._emit(request, outcome.emitted[r], outcome.logprobs[r], counts)
            trainable_lens.append(0 if request.rules is not None else len(event.token_ids))
            events.append(event)
        self.observer.report.untrained_rows += sum(
            lens == 0 < drafted
            for lens, drafted in zip(trainable_lens, plan.draft_lens.tolist(), strict=True)
        )
        self.controller.observe(rows.slots.numpy(), plan, outcome, trainable_lens)
        self._refresh_drafter(requests, plan)
        emitted = sum(len(event.token_ids) for event in events)
        self.observer.count(plan, outcome, time.perf_counter() - started, emitted)
        return events

    def _draft_limit(self, request: Request) -> int:
        """Drafts worth verifying: the round emits one more token than it accepts."""
        limit = request.params.num_speculative_tokens
        remaining = request.params.max_tokens - len(request.output)
        return min(self.num_speculative_tokens if limit is None else limit, remaining - 1)

    def _emit(
        self,
        request: Request,
        tokens: list[int],
        logprobs: list[float] | None,
        draft_counts: tuple[int, int, int] = (0, 0, 0),
    ) -> TokenEvent:
        """Push committed tokens through the request's stops; release the slot at its end.

        A trailing NO_TOKEN ends the request: its rules leave nothing to emit there.
        """
        is_stuck = tokens[-1] == NO_TOKEN
        emission = request.stream.push(tokens[:-1] if is_stuck else tokens)
        kept = tokens[: emission.kept]
        text, finish_reason, stop_reason = (
            emission.text, emission.finish_reason, emission.stop_reason,
        )  # fmt: skip
        if is_stuck and finish_reason is None:
            text += request.stream.flush()
            # Without rules only logits that are all NaN or -inf leave nothing to emit.
            stuck = "no token is allowed" if request.rules is not None else "logits are not finite"
            finish_reason, stop_reason = "stop", stuck
            self.observer.report.fallbacks[stuck] += 1
        self.slots.commit(request.slot, kept)
        request.output.extend(kept)
        if finish_reason is not None:
            self._release(request)
        return TokenEvent(
            request.request_id,
            kept,
            text,
            None if logprobs is None else logprobs[: emission.kept],
            finish_reason,
            stop_reason,
            *draft_counts,
        )

    def _refresh_drafter(self, requests: list[Request], plan: RoundPlan) -> None:
        """Rows that did not draft let the drafter's cache fall behind; bound what a later draft catches up.

        Drafting catches up by itself. Long gaps cost less in one pass than in many, and nothing at all
        for rows that end first, so this waits for as many tokens as probes are ever apart.
        """
        if self.drafter is None:
            return
        idle = [
            request.slot
            for request, drafted in zip(requests, plan.draft_lens.tolist(), strict=True)
            if not drafted
            and self._live.get(request.slot) is request
            and self._draft_limit(request) > 0
        ]
        if not idle:
            return
        slots = torch.tensor(idle, dtype=torch.int64)
        context = DraftContext(slots, self.slots.lens[slots], self.slots.history)
        behind = self.drafter.lag(context) > MAX_PROBE_PERIOD
        if bool(behind.any()):
            slots = slots[behind]
            self.drafter.refresh(DraftContext(slots, self.slots.lens[slots], self.slots.history))

    def _prefill(self, requests: list[Request]) -> list[TokenEvent]:
        started = time.perf_counter()
        chunks: list[list[int]] = []
        budget = self.prefill_chunk
        for request in requests:
            chunks.append(request.prompt[request.prefilled : request.prefilled + budget])
            budget -= len(chunks[-1])
            if budget == 0:
                break
        requests = requests[: len(chunks)]
        batch = PackedBatch.from_lists(
            chunks,
            [request.slot for request in requests],
            [request.prefilled for request in requests],
        )
        for request, chunk in zip(requests, chunks, strict=True):
            request.prefilled += len(chunk)
        done = [r for r, request in enumerate(requests) if request.is_decoding]
        logit_rows = batch.cu_seqlens[1:][done] - 1
        logits, hidden = self.executor.prefill(batch, logit_rows)
        if self.drafter is not None and self.drafter.reads_hidden:
            self.drafter.observe(batch.slots, batch.kv_lens, batch.cu_seqlens, hidden)
        events = self._first_tokens([requests[r] for r in done], logits) if done else []
        self.observer.report.prefill_seconds += time.perf_counter() - started
        self.observer.report.prefill_tokens += sum(len(chunk) for chunk in chunks)
        return events

    def _first_tokens(self, requests: list[Request], logits: torch.Tensor) -> list[TokenEvent]:
        """Draw the token behind each finished prompt; this is round 0 of the request."""
        rows = self._rows(requests)
        edited = logits
        if any(request.rules is not None for request in requests):
            edited = logits.to(self.round.dtype, copy=True)
            for i, request in enumerate(requests):
                if request.rules is not None:
                    edited[i] = request.rules.apply(edited[i], request.output)
        law = distribution(
            edited,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            vocab_size=self.vocab_size,
            dtype=self.round.dtype,
        )
        index = torch.arange(len(requests))
        mark_empty(law)
        tokens = law.draw(self.source, rows.keys(index, torch.zeros_like(index), Purpose.BONUS))
        self.slots.rounds[rows.slots] += 1
        events = []
        for i, request in enumerate(requests):
            token = [int(tokens[i])]
            logprobs = (
                token_logprobs(logits[i : i + 1], token, self.vocab_size)
                if request.params.logprobs
                else None
            )
            events.append(self._emit(request, token, logprobs))
        self.observer.report.emitted += sum(len(event.token_ids) for event in events)
        return events
