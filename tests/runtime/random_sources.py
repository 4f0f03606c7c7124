"""Random sources for tests: one that follows scripts with exact weights, one that watches the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from trtllm_av.runtime.random_source import KeyMaker, Purpose, RandomKeys, RandomSource

Key = tuple[int, int, int, int, int]


def key_maker(seeds: Tensor, requests: Tensor, rounds: Tensor) -> KeyMaker:
    """Keys of a round whose rows have these ``seeds``, ``requests`` and ``rounds`` ([R] each)."""

    def make(rows: Tensor, positions: Tensor, purpose: Purpose) -> RandomKeys:
        return RandomKeys(seeds[rows], requests[rows], rounds[rows], positions, purpose)

    return make


@dataclass
class RecordingSource:
    """Passes calls on to ``inner`` and fails as soon as a key comes twice."""

    inner: RandomSource
    used: set[Key] = field(default_factory=set)

    def _record(self, keys: RandomKeys) -> None:
        for seed, request, round_, position in self._parts(keys):
            key = (seed, request, round_, position, int(keys.purpose))
            assert key not in self.used, f"key used twice: {key}"
            self.used.add(key)

    @staticmethod
    def _parts(keys: RandomKeys) -> Iterator[tuple[int, int, int, int]]:
        columns = (keys.seeds, keys.requests, keys.rounds, keys.positions)
        return zip(*(column.tolist() for column in columns), strict=True)

    def categorical(self, probabilities: Tensor, keys: RandomKeys) -> Tensor:
        self._record(keys)
        return self.inner.categorical(probabilities, keys)

    def accept(
        self, target_probability: Tensor, draft_probability: Tensor, keys: RandomKeys
    ) -> Tensor:
        self._record(keys)
        return self.inner.accept(target_probability, draft_probability, keys)


class ScriptedSource:
    """All outcomes of one round of one request at once: batch row r follows script r.

    There is a script for every combination of K draft tokens, K acceptances and the next token;
    ``keys.requests`` must number the rows. ``weights`` [R] float64 ends as the exact probability of each
    row: it starts as 1/R, and every decision that is really asked for multiplies it by its probability
    and by the number of its alternatives. Decisions never asked for thereby count once in total.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        choices = [range(vocab_size)] * depth + [range(2)] * depth + [range(vocab_size)]
        self.script = torch.tensor(list(product(*choices)))
        self.num_rows = self.script.shape[0]
        self.vocab_size = vocab_size
        self.depth = depth
        self.weights = torch.full((self.num_rows,), 1.0 / self.num_rows, dtype=torch.float64)

    @property
    def keys(self) -> KeyMaker:
        zeros = torch.zeros(self.num_rows, dtype=torch.int64)
        return key_maker(zeros, torch.arange(self.num_rows), zeros)

    def categorical(self, probabilities: Tensor, keys: RandomKeys) -> Tensor:
        is_draft = keys.purpose is Purpose.DRAFT
        column = keys.positions if is_draft else torch.full_like(keys.positions, 2 * self.depth)
        tokens = self.script[keys.requests, column]
        chance = probabilities.gather(1, tokens[:, None])[:, 0]
        self.weights[keys.requests] *= chance * self.vocab_size
        return tokens

    def accept(
        self, target_probability: Tensor, draft_probability: Tensor, keys: RandomKeys
    ) -> Tensor:
        flat = keys.requests * self.depth + keys.positions
        assert flat.unique().numel() == flat.numel(), "a draft was judged twice"
        decision = self.script[keys.requests, self.depth + keys.positions].bool()
        chance = (target_probability / draft_probability).clamp(max=1.0)
        factor = torch.where(decision, chance, 1.0 - chance) * 2.0
        self.weights.scatter_reduce_(0, keys.requests, factor, "prod")
        return decision
