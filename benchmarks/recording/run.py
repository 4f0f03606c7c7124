"""Speculative rounds on one device, many requests at once, every judged draft recorded.

The rounds are the product's: chained drafts from q, rejection sampling against p, a token from the
residual or the bonus law; requests join as slots get free. Laws are computed in float32 from the
logits of the model's dtype.

On a GPU the two halves of a round are captured as graphs in the first round and replayed after it: launching
their kernels one by one takes several times as long as running them.

Invariants: a slot's records name the request that held it in that round; labels end with the token that
ends the request; random numbers are drawn once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.drafter_training.target import FrozenTarget

from .cached import CachedTarget, Place
from .laws import draft_numbers, draw, laws
from .rows import NUMBERS, RoundRecord
from .trimming import Trimming

_STRIDE = 64  # keys are read in multiples of this
_Result = TypeVar("_Result")


class RowDrafter(Protocol):
    """A drafter that serves all rows at once; see ``EagleRows``."""

    draft_to_target: Tensor

    def prefill(self, rows: Tensor, tokens: Tensor, hidden: Tensor, lens: Tensor) -> None: ...

    def observe(self, starts: Tensor, hidden: Tensor) -> None: ...

    def start(self, history: Tensor, lens: Tensor, reach: int) -> Tensor: ...

    def step(self, position: int, tokens: Tensor) -> Tensor: ...

    def head_logit(self) -> Tensor | None: ...


@dataclass(slots=True)
class RecordedRequest:
    """``prompt``: token ids; ``answer``: what was generated, its end mark included."""

    number: int
    prompt: list[int]
    max_tokens: int
    answer: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy, for drafts too; ``scales``: more temperatures to take the feature at."""

    temperature: float
    top_p: float = 1.0
    scales: tuple[float, ...] = ()


DraftPart = tuple[Tensor, list[Tensor], Tensor]
VerifyPart = tuple[Tensor, Tensor, Tensor]


class Graph(Generic[_Result]):
    """A call without arguments, captured: ``replay`` runs it again and returns the same tensors.

    The call runs once before it is captured, so it must be one that can run twice.
    """

    def __init__(self, call: Callable[[], _Result], generator: torch.Generator) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph):
            self.result = call()

    def replay(self) -> _Result:
        self._graph.replay()
        return self.result


class SpeculativeRun:
    """Rounds of ``num_rows`` slots of ``capacity`` positions, up to ``num_positions`` drafts each."""

    def __init__(
        self,
        target: FrozenTarget,
        drafter: RowDrafter,
        trimming: Trimming,
        sampling: Sampling,
        *,
        num_rows: int,
        capacity: int,
        num_positions: int,
        end_tokens: Sequence[int],
        seed: int,
    ) -> None:
        device = target.device
        self.records: list[RoundRecord] = []
        self._cached = CachedTarget(target, num_rows, capacity)
        self._drafter, self._trimming, self._sampling = drafter, trimming, sampling
        self._num_positions, self._capacity = num_positions, capacity
        self._end_tokens = frozenset(end_tokens)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._history = torch.zeros(num_rows, capacity, dtype=torch.int64, device=device)
        self._holder: list[RecordedRequest | None] = [None] * num_rows
        # Idle rows stand at 2: a place that every pass can compute and nobody reads.
        self._lens: NDArray[np.int64] = np.full(num_rows, 2)
        self._device_lens = torch.full((num_rows,), 2, device=device)
        self._device_verify_lens = torch.zeros_like(self._device_lens)
        self._graphs: tuple[Graph[DraftPart], Graph[VerifyPart]] | None = None

    @torch.no_grad()
    def run(self, requests: Sequence[RecordedRequest], seconds: float) -> int:
        """Serve ``requests`` in their order; those still waiting after ``seconds`` stay out. Tokens made."""
        waiting, end = deque(requests), time.monotonic() + seconds
        num_tokens = 0
        while waiting or any(self._holder):
            if time.monotonic() > end:
                waiting.clear()
            num_free = self._holder.count(None)
            if waiting and (4 * num_free >= len(self._holder) or num_free >= len(waiting)):
                self._admit([waiting.popleft() for _ in range(min(num_free, len(waiting)))])
            num_tokens += self._round()
        return num_tokens

    def _admit(self, requests: list[RecordedRequest]) -> None:
        slots = [slot for slot, holder in enumerate(self._holder) if holder is None]
        slots = slots[: len(requests)]
        longest = max(len(request.prompt) for request in requests)
        padded = torch.zeros(len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            padded[row, : len(request.prompt)] = torch.tensor(request.prompt)
        device = self._history.device
        tokens, rows = padded.to(device), torch.tensor(slots, device=device)
        lens = torch.tensor([len(request.prompt) for request in requests], device=device)
        place = Place(torch.zeros_like(lens), longest, longest, self._cached.group, rows)
        hidden = self._cached.forward(tokens, place)
        self._drafter.prefill(rows, tokens, hidden, lens)
        last = hidden[torch.arange(len(slots), device=device), lens - 1]
        law = laws(self._cached.logits(last), self._sampling.temperature, self._sampling.top_p)
        first = draw(law, self._generator)
        self._history[rows, :longest] = tokens
        self._history[rows, lens] = first
        for slot, request, token in zip(slots, requests, first.tolist(), strict=True):
            self._holder[slot] = request
            self._lens[slot] = len(request.prompt) + 1
            self._trimming.admit(slot)
            self._append(slot, [token])

    def _append(self, slot: int, tokens: list[int]) -> int:
        """Commit ``tokens`` up to the request's end; how many. An ended request leaves its slot."""
        request = self._holder[slot]
        assert request is not None
        kept = tokens[: request.max_tokens - len(request.answer)]
        for index, token in enumerate(kept):
            if token in self._end_tokens:
                kept = kept[: index + 1]
                break
        request.answer += kept
        if kept[-1] in self._end_tokens or len(request.answer) == request.max_tokens:
            self._holder[slot] = None
            self._lens[slot] = 2
        return len(kept)

    def _round(self) -> int:
        """One round of all slots; tokens committed."""
        live = np.array(
            [slot for slot, one in enumerate(self._holder) if one is not None], np.int64
        )
        if live.size == 0:
            return 0
        holders = [self._holder[slot] for slot in live]
        limits = np.array(
            [
                min(self._num_positions, one.max_tokens - len(one.answer) - 1)
                for one in holders
                if one is not None
            ],
            np.int32,
        )
        draft_lens = self._trimming.plan(live, limits)
        self._device_lens.copy_(torch.from_numpy(self._lens))
        draft, verify = self._halves()
        tokens, q, numbers = draft()
        verify_lens = self._trimming.verify_lens(numbers[live, :, 0].cpu().numpy())
        all_verified = np.zeros(len(self._holder), np.int64)
        all_verified[live] = verify_lens
        self._device_verify_lens.copy_(torch.from_numpy(all_verified))
        accepted, next_tokens, overlap = verify(tokens, q)
        numbers[:, :, NUMBERS.index("overlap")] = overlap
        drafted = tokens.cpu().numpy()
        accepted_lens, nexts = accepted.cpu().numpy(), next_tokens.cpu().numpy()
        width = len(self._holder)
        record = RoundRecord(
            np.full(width, -1, np.int32),
            numbers.half().cpu().numpy(),
            *(np.zeros(width, np.int32) for _ in range(4)),
        )
        for slot, request in zip(live.tolist(), holders, strict=True):
            assert request is not None
            emitted = [*drafted[slot, : accepted_lens[slot]].tolist(), int(nexts[slot])]
            self._lens[slot] += len(emitted)
            record.request[slot] = request.number
            record.labelled_lens[slot] = self._append(slot, emitted)
        record.draft_lens[live], record.verify_lens[live] = draft_lens, verify_lens
        record.accepted_lens[live] = accepted_lens[live]
        self.records.append(record)
        soft = np.full(live.size, np.nan, np.float32)
        is_soft = (record.accepted_lens[live] == verify_lens) & (verify_lens < draft_lens)
        where = np.minimum(verify_lens, self._num_positions - 1)
        soft[is_soft] = overlap.cpu().numpy()[live, where][is_soft]
        labelled = record.labelled_lens[live]
        self._trimming.observe(record.accepted_lens[live], labelled, soft)
        return int(labelled.sum())

    def _halves(
        self,
    ) -> tuple[Callable[[], DraftPart], Callable[[Tensor, list[Tensor]], VerifyPart]]:
        """Drafting and verification of this round: graphs on a GPU, plain calls elsewhere."""
        if self._history.device.type != "cuda":
            reach = int(self._lens.max()) + self._num_positions + 1
            reach = min(-(-reach // _STRIDE) * _STRIDE, self._capacity)
            return partial(self._draft, reach), partial(self._verify, reach)
        if self._graphs is None:
            # Graphs read and write what they captured, so the second one gets the first one's results.
            draft = Graph(partial(self._draft, self._capacity), self._generator)
            tokens, q, _ = draft.replay()
            verify = Graph(partial(self._verify, self._capacity, tokens, q), self._generator)
            self._graphs = draft, verify
        draft, verify = self._graphs
        return draft.replay, lambda tokens, q: verify.replay()

    def _draft(self, reach: int) -> DraftPart:
        """Drafts [R, K], their laws (K of [R, V_d]) and numbers [R, K, C], the overlaps still missing."""
        lens = self._device_lens
        sampling, drafter = self._sampling, self._drafter
        tokens, laws_, numbers = [], [], []
        token = lens
        for position in range(self._num_positions):
            logits = (
                drafter.step(position, token)
                if position
                else drafter.start(self._history, lens, reach)
            )
            found = draft_numbers(logits, sampling.temperature, sampling.scales)
            head = drafter.head_logit()
            missing = torch.full_like(found[:, 0], torch.nan)
            law = laws(logits, sampling.temperature, sampling.top_p)
            column = draw(law, self._generator)
            log_q = law.gather(1, column[:, None])[:, 0].log()
            parts = [*found[:, :3].unbind(1), log_q, missing, missing if head is None else head]
            numbers.append(torch.stack([*parts, *found[:, 3:].unbind(1)], 1))
            token = drafter.draft_to_target[column]
            tokens.append(token)
            laws_.append(law)
        return torch.stack(tokens, 1), laws_, torch.stack(numbers, 1)

    def _verify(self, reach: int, tokens: Tensor, q: list[Tensor]) -> VerifyPart:
        """Accepted lengths [R], next tokens [R], and Σ min(p, q) [R, K]; commits the tokens."""
        lens, verify_lens = self._device_lens, self._device_verify_lens
        num_rows, depth = tokens.shape
        every = torch.arange(num_rows, device=lens.device)
        place = Place(lens - 1, depth + 1, reach, self._cached.group)
        last = self._history[every, lens - 1]
        hidden = self._cached.forward(torch.cat([last[:, None], tokens], 1), place)
        self._drafter.observe(lens - 1, hidden)
        logits = self._cached.logits(hidden).flatten(0, 1)
        p = laws(logits, self._sampling.temperature, self._sampling.top_p)
        p = p.unflatten(0, (num_rows, depth + 1))
        known = self._drafter.draft_to_target
        overlap = torch.stack(
            [torch.minimum(p[:, i, known], law).sum(-1) for i, law in enumerate(q)], 1
        )
        p_drawn = p[:, :depth].gather(2, tokens[..., None])[..., 0]
        column = torch.full((p.shape[2],), 0, dtype=torch.int64, device=lens.device)
        column[known] = torch.arange(known.numel(), device=lens.device)
        q_drawn = torch.stack([law[every, column[tokens[:, i]]] for i, law in enumerate(q)], 1)
        chance = torch.rand(p_drawn.shape, device=lens.device, generator=self._generator)
        is_verified = torch.arange(depth, device=lens.device) < verify_lens[:, None]
        is_accepted = (chance * q_drawn < p_drawn) & is_verified
        accepted = is_accepted.long().cumprod(1).sum(1)
        law = p[every, accepted]
        q_there = torch.stack(q, 1)[every, accepted.clamp(max=depth - 1)]
        rest = law.index_add(1, known, -q_there).clamp(min=0.0)
        is_rejected = (accepted < verify_lens) & (rest.sum(-1) > 0.0)
        law = torch.where(is_rejected[:, None], rest, law)
        next_tokens = draw(law, self._generator)
        where = lens[:, None] + torch.arange(depth, device=lens.device)
        self._history[every[:, None], where] = tokens
        self._history[every, lens + accepted] = next_tokens
        return accepted, next_tokens, overlap
