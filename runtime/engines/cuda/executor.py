"""Rounds and prompts on one device, launched without waiting, their results read later.

Invariants: everything a request owns lies on the device and changes in stream order only; a launch never
waits for the device and, once its graphs are captured, allocates nothing; results are read from pinned
memory behind a fence. ``plan`` values of a launch are fixed before its first draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.plugins import cuda_ops
from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.engines.cuda.buffers import Parts, RoundMemory, RoundShape
from trtllm_av.runtime.engines.cuda.graphs import GraphCache, Stage
from trtllm_av.runtime.engines.cuda.prefill import Chunk, prefill
from trtllm_av.runtime.engines.cuda.round import DeviceRound
from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.engines.cuda.sizes import padded, request_sizes, sizes_up_to
from trtllm_av.runtime.engines.cuda.transfer import Fence, PinnedRing, RingSlot, carve, carved_bytes

assert cuda_ops.IMPLEMENTATIONS  # the import has registered them

_IN_FLIGHT = 4  # rounds whose host memory may be in use at once


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """What the host fixes for R rows: ``slots`` [R] int64, ``draft_lens`` and ``floors`` [R] int32, the
    ``budget`` (floors included) and ``coefficients`` [1+K] f32."""

    slots: NDArray[np.int64]
    draft_lens: NDArray[np.int32]
    floors: NDArray[np.int32]
    budget: int
    coefficients: NDArray[np.float32]
    sampling: Sampling
    is_scored: bool


@dataclass(frozen=True, slots=True)
class RoundTicket:
    """A launched round. ``requests`` and ``num_tokens`` are the buckets that it runs in."""

    num_rows: int
    requests: int
    num_tokens: int
    depth: int
    slot: RingSlot
    started: Fence
    drafted: Fence
    ended: Fence


@dataclass(frozen=True, slots=True)
class PrefillTicket:
    """A launched prefill pass with ``num_tokens`` first tokens."""

    num_tokens: int
    slot: RingSlot


class CudaExecutor:
    """A target, its drafter and the state of ``num_slots`` requests on one device."""

    def __init__(self, round: DeviceRound, *, max_requests: int | None = None) -> None:
        target, drafter = round.target, round.drafter
        self.round = round
        self.device = target.device
        self.num_slots = target.cache.num_slots
        self.max_len = target.cache.max_len
        self.request_sizes = request_sizes(max_requests or self.num_slots)
        self.shape = round_shape(round)
        self.memory = RoundMemory(self.shape, self.request_sizes[-1], self.device)
        self.graphs = GraphCache(self.device)
        most = self.request_sizes[-1]
        self._inputs = PinnedRing(_IN_FLIGHT, carved_bytes(self.shape.inputs(most)), self.device)
        self._results = PinnedRing(_IN_FLIGHT, carved_bytes(self.shape.results(most)), self.device)
        self._first_tokens = PinnedRing(_IN_FLIGHT, 8 * self.num_slots, self.device)
        self._fences = {
            id(slot): [Fence(self.device, is_timed=True) for _ in range(3)]
            for slot in self._results.slots
        }
        self._views: dict[tuple[int, int], dict[str, Any]] = {}
        self._known_stages: dict[tuple[object, ...], list[tuple[object, Stage]]] = {}
        self._has_drafter = drafter is not None

    @property
    def identity(self) -> ExecutorIdentity:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        dtype = str(self.round.target.dtype).removeprefix("torch.")
        return ExecutorIdentity("torch-cuda", name, dtype, 1)

    @property
    def vocab_size(self) -> int:
        return self.round.target.config.vocab_size

    @property
    def num_positions(self) -> int:
        return self.round.num_positions

    def bucket_of(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """The (requests, tokens) that a round of these sizes runs in."""
        requests = padded(num_rows, self.request_sizes)
        return requests, padded(num_tokens, self.token_sizes(requests))

    def token_sizes(self, requests: int) -> tuple[int, ...]:
        """Token buckets of a request bucket: enough for every row's full draft."""
        return sizes_up_to(requests * (1 + self.num_positions))

    def launch(self, inputs: RoundInputs) -> RoundTicket:
        """Enqueue one round."""
        num_rows = inputs.slots.size
        depth = int(inputs.draft_lens.max(initial=0)) if self._has_drafter else 0
        requests, num_tokens = self.bucket_of(num_rows, num_rows + inputs.budget)
        stages = self._stages(requests, num_tokens, depth, inputs.sampling, inputs.is_scored)
        self.capture(requests, stages)
        sent = self._inputs.take()
        self._fill(sent, requests, inputs)
        num_bytes = carved_bytes(self.shape.inputs(requests))
        result = self._results.take()
        fences = self._fences[id(result)]
        fences[0].record()
        self.memory.inputs[:num_bytes].copy_(sent.data[:num_bytes], non_blocking=True)
        sent.fence.record()
        for key, stage in stages[:-1]:
            self.graphs.run(key, stage)
        fences[1].record()
        self.graphs.run(*stages[-1])
        num_bytes = carved_bytes(self.shape.results(requests))
        result.data[:num_bytes].copy_(self.memory.results[:num_bytes], non_blocking=True)
        fences[2].record()
        result.fence.record()
        return RoundTicket(num_rows, requests, num_tokens, depth, result, *fences)

    def read(self, ticket: RoundTicket) -> dict[str, Any]:
        """Results of a round, waiting for it: arrays by the names of ``RoundShape.results``, R rows each."""
        ticket.slot.fence.wait()
        views = self._host_views(ticket.slot, ticket.requests, self.shape.results)
        rows = ticket.num_rows
        return {
            "statistics": views["statistics"].copy(),
            "lens": views["lens"][:, :rows].copy(),
            **{
                name: views[name][:rows].copy()
                for name in ("confidence", "features", "overlap", "tokens")
            },
        }

    def prefill(self, chunks: list[Chunk], sampling: Sampling) -> PrefillTicket:
        """Enqueue a pass over prompt chunks."""
        tokens = prefill(self.round, chunks, sampling)
        slot = self._first_tokens.take()
        num_bytes = 8 * tokens.numel()
        slot.data[:num_bytes].copy_(tokens.view(torch.uint8), non_blocking=True)
        slot.fence.record()
        return PrefillTicket(tokens.numel(), slot)

    def read_first_tokens(self, ticket: PrefillTicket) -> list[int]:
        """First tokens of the prompts that ended in the pass, waiting for it."""
        ticket.slot.fence.wait()
        values: list[int] = ticket.slot.data[: 8 * ticket.num_tokens].view(torch.int64).tolist()
        return values

    def warm_up(
        self, requests: int, samplings: Iterable[Sampling], *, is_scored: bool, depth: int
    ) -> None:
        """Capture all graphs of a request bucket, so that no round does; ``depth`` 0 drafts never."""
        for sampling in samplings:
            for num_tokens in self.token_sizes(requests):
                self.capture(
                    requests,
                    self._stages(requests, num_tokens, min(depth, 2), sampling, is_scored),
                )

    def capture(self, requests: int, stages: list[tuple[object, Stage]]) -> None:
        """Capture what is missing of ``stages``, on rows that are all padding."""
        missing = {key: stage for key, stage in stages if not self.graphs.has(key)}
        if not missing:
            return
        buffers = self.memory.buffers(requests)
        for name, view in buffers.inputs.items():
            view.fill_(self.num_slots if name == "slots" else 0)
        for key, stage in missing.items():
            self.graphs.capture(key, stage)

    def _stages(
        self, requests: int, num_tokens: int, depth: int, sampling: Sampling, is_scored: bool
    ) -> list[tuple[object, Stage]]:
        """The graphs of a round in order, with what to run where they are not captured."""
        kind = (requests, sampling, is_scored)
        key = (num_tokens, depth, *kind)
        stages = self._known_stages.get(key)
        if stages is not None:
            return stages
        buffers = self.memory.buffers(requests)
        stages = []
        if depth > 0:
            first = partial(self.round.draft_first, buffers, sampling, is_scored=is_scored)
            following = partial(self.round.draft_next, buffers, sampling, is_scored=is_scored)
            stages.append((("first draft", *kind), first))
            stages += [(("next draft", *kind), following)] * (depth - 1)
        verify = partial(self.round.verify, buffers, num_tokens, sampling, is_scored=is_scored)
        stages.append((("verify", num_tokens, *kind), verify))
        self._known_stages[key] = stages
        return stages

    def _host_views(
        self, slot: RingSlot, requests: int, parts: Callable[[int], Parts]
    ) -> dict[str, Any]:
        """Arrays over the memory of ``slot``, kept because making them costs more than using them."""
        key = (id(slot), requests)
        views = self._views.get(key)
        if views is None:
            carved = carve(slot.data, parts(requests))
            views = self._views[key] = {name: view.numpy() for name, view in carved.items()}
        return views

    def _fill(self, slot: RingSlot, requests: int, inputs: RoundInputs) -> None:
        views = self._host_views(slot, requests, self.shape.inputs)
        rows = inputs.slots.size
        views["budget"][0] = inputs.budget
        views["coefficients"][:] = inputs.coefficients
        for name, values, padding in (
            ("slots", inputs.slots, self.num_slots),
            ("draft_lens", inputs.draft_lens, 0),
            ("floors", inputs.floors, 0),
        ):
            views[name][:rows] = values
            views[name][rows:] = padding


def round_shape(round: DeviceRound) -> RoundShape:
    """The memory that ``round`` works in."""
    drafter = round.drafter
    return RoundShape(
        round.num_positions,
        draft_columns=0 if drafter is None else drafter.vocab_size,
        hidden=0 if drafter is None else drafter.states.shape[1],
        dtype=round.target.dtype,
    )
