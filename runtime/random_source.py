"""Random numbers for drawing and judging drafts: a pure function of a key that is used once.

Invariants: a number depends on nothing but its key (seed, request, round, position, purpose), so a run
can be repeated and rows can be reordered; two different keys never read the same block of the
generator (the packing below is injective); no token of probability 0 is ever drawn. A trimmed draft is
redrawn in a later round, which is another key: reusing its number would bias the output although the
budget is stale. Whether ``requests`` carries a number that no other request ever had, or 0, is the
caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]  # 32-bit words, kept in 64 bits so that products do not overflow
Floats = NDArray[np.float64]

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_BLOCK = 256  # tokens whose probabilities are summed before the search looks inside


class Purpose(IntEnum):
    """What a random number decides."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


@dataclass(slots=True)
class RandomKeys:
    """Keys of N random numbers that serve one ``purpose``; all tensors [N] int64.

    ``positions`` counts drafts within the round, 0-based (BONUS: ``verify_lens``). ``rounds`` and
    ``positions`` must stay below 2^32 and 2^30.
    """

    seeds: Tensor
    requests: Tensor
    rounds: Tensor
    positions: Tensor
    purpose: Purpose

    def __len__(self) -> int:
        return self.seeds.numel()

    def select(self, index: Tensor) -> RandomKeys:
        """The keys at ``index`` (int64 indices or a bool mask [N])."""
        return RandomKeys(
            self.seeds[index],
            self.requests[index],
            self.rounds[index],
            self.positions[index],
            self.purpose,
        )


# (rows [N], positions [N], purpose) -> keys of these rows at these positions of the running round
KeyMaker = Callable[[Tensor, Tensor, Purpose], RandomKeys]


class RandomSource(Protocol):
    """Where draws come from; a test may put an enumerating or recording source in its place."""

    def categorical(self, probabilities: Tensor, keys: RandomKeys) -> Tensor:
        """One token per row of ``probabilities`` [N, V] (each sums to 1); returns [N] int64."""
        ...

    def accept(
        self, target_probability: Tensor, draft_probability: Tensor, keys: RandomKeys
    ) -> Tensor:
        """[N] bool, true with probability min(1, p/q) where 0 < p < q ([N] each)."""
        ...


def philox_4x32(counter: Words, key: Words) -> Words:
    """Ten rounds of Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    ``counter`` [4, N] and ``key`` [2, N] hold 32-bit words; returns [4, N] of them.
    """
    round_keys = (_KEY_STEPS + key) & _WORD
    even, odd = counter[0::2], counter[1::2]
    for round_key in round_keys:
        product = even * _MULTIPLIERS
        even = (product >> _HALF)[::-1] ^ odd ^ round_key
        odd = (product & _WORD)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(keys: RandomKeys) -> Floats:
    """[N] numbers in [0, 1) with 53 random bits, one per key."""
    seeds, requests, rounds, positions = (
        tensor.numpy().astype(np.uint64)
        for tensor in (keys.seeds, keys.requests, keys.rounds, keys.positions)
    )
    place = (positions << np.uint64(2)) | np.uint64(int(keys.purpose))
    counter = np.stack([rounds & _WORD, place & _WORD, requests & _WORD, requests >> _HALF])
    words = philox_4x32(counter, np.stack([seeds & _WORD, seeds >> _HALF]))
    bits = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    numbers: Floats = bits * 2.0**-53
    return numbers


def inverse_cdf(probabilities: NDArray[Any], uniform: Floats) -> NDArray[np.int64]:
    """The first token of each row whose cumulative probability exceeds u times the row's sum.

    ``probabilities`` [N, V] of any float type, ``uniform`` [N] in [0, 1); sums are taken in float64,
    over blocks of tokens first, so that a row costs one reading. Rows need not be normalised.
    ValueError if a row's sum is not a positive number.
    """
    num_rows, width = probabilities.shape
    whole = width - width % _BLOCK
    blocks = probabilities[:, :whole].reshape(num_rows, -1, _BLOCK)
    sums = np.add.reduce(blocks, axis=-1, dtype=np.float64)
    if whole < width:
        tail = np.add.reduce(probabilities[:, whole:], axis=-1, dtype=np.float64)
        sums = np.concatenate([sums, tail[:, None]], axis=1)
    cumulative = np.cumsum(sums, axis=1)
    total = cumulative[:, -1]
    if not np.all((total > 0.0) & np.isfinite(total)):
        row = int(np.argmin((total > 0.0) & np.isfinite(total)))
        raise ValueError(f"row {row} sums to {total[row]}; draw from rows that sum to 1")
    threshold = uniform * total  # below the total also after rounding, since u ≤ 1 − 2^-53
    block = np.argmax(cumulative > threshold[:, None], axis=1)
    rows = np.arange(num_rows)
    rest = threshold - np.where(block > 0, cumulative[rows, block - 1], 0.0)
    tokens = block[:, None] * _BLOCK + np.arange(min(_BLOCK, width))
    inside = np.where(
        tokens < width, probabilities[rows[:, None], np.minimum(tokens, width - 1)], 0.0
    )
    inner = np.cumsum(inside, axis=1, dtype=np.float64)
    # The block's sum and its running sum may round differently; stay below the latter.
    rest = np.minimum(rest, np.nextafter(inner[:, -1], 0.0))
    drawn: NDArray[np.int64] = tokens[rows, np.argmax(inner > rest[:, None], axis=1)]
    return drawn


class KeyedSource:
    """The product's source: counter-based numbers, inverse CDF, strict acceptance. CPU tensors."""

    def categorical(self, probabilities: Tensor, keys: RandomKeys) -> Tensor:
        return torch.from_numpy(inverse_cdf(probabilities.numpy(), uniforms(keys)))

    def accept(
        self, target_probability: Tensor, draft_probability: Tensor, keys: RandomKeys
    ) -> Tensor:
        """Accept iff u·q < p, strictly: p = 0 is rejected even at u = 0."""
        return torch.from_numpy(uniforms(keys)) * draft_probability < target_probability
