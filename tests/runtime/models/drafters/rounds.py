"""The committed state of a few requests, driven as the scheduler would drive it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.runtime.models.tiny_checkpoints import VOCAB_SIZE
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext, Drafter
from trtllm_av.runtime.models.kv_cache import KVCache


class Requests:
    """Committed tokens per slot, with a target cache that holds all but the last of each."""

    def __init__(self, target: LoadedModel, *, num_slots: int, max_len: int) -> None:
        self.target = target
        self.cache = KVCache(target.config, num_slots, max_len)
        self.tokens: dict[int, list[int]] = {}
        self._history = torch.full((num_slots, max_len), -1, dtype=torch.int64)

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = list(tokens)
        batch = PackedBatch.from_lists([tokens[:-1]], [slot], [0])
        self.target.model.forward(batch, self.cache)

    def verify(
        self, drafts: dict[int, list[int]], accepted: dict[int, int], next_token: int
    ) -> None:
        """Feed last token and drafts to the target, then commit what was accepted plus one token."""
        slots = list(drafts)
        rows = [[self.tokens[slot][-1], *drafts[slot]] for slot in slots]
        kv_lens = [len(self.tokens[slot]) - 1 for slot in slots]
        self.target.model.forward(PackedBatch.from_lists(rows, slots, kv_lens), self.cache)
        for slot in slots:
            self.tokens[slot] += [*drafts[slot][: accepted[slot]], next_token]

    def context(self, slots: list[int]) -> DraftContext:
        for slot in slots:
            self._history[slot].fill_(-1)  # nothing behind ``lens`` may be read
            committed = torch.tensor(self.tokens[slot])
            self._history[slot, : committed.numel()] = committed
        lens = torch.tensor([len(self.tokens[slot]) for slot in slots])
        return DraftContext(torch.tensor(slots), lens, self._history)


class ObservedRequests(Requests):
    """Requests whose hidden states the drafter is shown, as the engine shows them."""

    def __init__(
        self, target: LoadedModel, drafter: Drafter, *, num_slots: int, max_len: int
    ) -> None:
        super().__init__(target, num_slots=num_slots, max_len=max_len)
        self._drafter = drafter

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = list(tokens)
        half = len(tokens) // 2
        for begin, end in ((0, half), (half, len(tokens) - 1)):  # a prompt in two chunks
            batch = PackedBatch.from_lists([tokens[begin:end]], [slot], [begin])
            hidden = self.target.model(batch, self.cache).hidden
            self._drafter.observe(batch.slots, batch.kv_lens, batch.cu_seqlens, hidden)

    def verify(
        self, drafts: dict[int, list[int]], accepted: dict[int, int], next_token: int
    ) -> None:
        slots = list(drafts)
        rows = [[self.tokens[slot][-1], *drafts[slot]] for slot in slots]
        kv_lens = [len(self.tokens[slot]) - 1 for slot in slots]
        batch = PackedBatch.from_lists(rows, slots, kv_lens)
        hidden = self.target.model(batch, self.cache).hidden
        kept = [
            hidden[start : start + accepted[slot] + 1]
            for start, slot in zip(batch.cu_seqlens.tolist(), slots, strict=False)
        ]
        bounds = torch.tensor([0, *(len(part) for part in kept)]).cumsum(0)
        self._drafter.observe(batch.slots, batch.kv_lens, bounds, torch.cat(kept))
        for slot in slots:
            self.tokens[slot] += [*drafts[slot][: accepted[slot]], next_token]


def draft(drafter: Drafter, context: DraftContext, tokens: Tensor) -> list[Tensor]:
    """Logits [R, V] of positions 0 … d−1, with ``tokens`` [R, d−1] as the drawn drafts."""
    logits = [drafter.start(context).clone()]
    for position in range(1, tokens.shape[1] + 1):
        logits.append(drafter.step(position, tokens[:, position - 1]).clone())
    return logits


def random_tokens(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))
