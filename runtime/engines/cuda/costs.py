"""What a device round costs, by request bucket, token bucket and context length.

A profile holds the milliseconds of every captured verify pass and of drafts at two KV lengths; between
them costs are interpolated by the batch's mean. While serving, each completed round moves the ratio of
measured to profiled time (exponential means of its logarithm, plain ones at first): a part that all buckets
of as many requests share, because a card under load is slower than in a profile, and a part that is the
bucket's own. Without the first, buckets that no round has used would look cheap for no other reason than
that.

Invariants: no cost falls with more tokens or depth: the running maximum is applied again after every
update; a ratio stays within ±30 % of the profile, and is reported; the profile that is stored holds none
of the ratios; ``bucket`` and ``verify_ms`` describe the same staircase.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.engines.cuda.sizes import padded, sizes_up_to

Float64 = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]

MAX_DRIFT = 0.3
#: Of one round in the ratio that buckets share and in a bucket's own, once there were 1 / weight of them.
_COMMON_WEIGHT, _OWN_WEIGHT = 0.2, 0.05
_PRIOR_ROUNDS = 3  # that stand for a bucket being no different from the others


@dataclass(frozen=True, slots=True)
class BucketProfile:
    """Milliseconds of one request bucket. ``verify`` [2, N] by KV length and token bucket ``tokens`` [N];
    ``draft`` [2, 2] by KV length, of the first and of each further drafted position."""

    tokens: tuple[int, ...]
    verify: Float64
    draft: Float64


class _Ratios:
    """Measured over profiled time of N buckets: what all of them share, times what is a bucket's own.

    A card's clock moves every bucket at once and within seconds. So a round of one bucket says something
    about all, and a bucket that was last used while the card was slow is not held to be slow for good.
    Both parts are kept as logarithms, in which noise averages out: with means of quotients it would raise
    every bucket that fell out of use, without an end.
    """

    def __init__(self, size: int) -> None:
        self.counts = np.zeros(size, np.int64)
        self._common = 0.0
        self._own: Float64 = np.zeros(size)
        self._usage: Float64 = np.zeros(size)

    def add(self, index: int, ratio: float) -> None:
        """Take in one round's ratio; what a clock cannot have measured is left out."""
        if math.isnan(ratio):
            return
        self.counts[index] += 1
        self._usage *= 1.0 - _OWN_WEIGHT
        self._usage[index] += 1.0
        measured = math.log(min(max(ratio, 1.0 - MAX_DRIFT), 1.0 + MAX_DRIFT))
        weight = max(_COMMON_WEIGHT, 1.0 / float(self.counts.sum()))
        self._common += weight * (measured - self._own[index] - self._common)
        weight = max(_OWN_WEIGHT, 1.0 / float(self.counts[index] + _PRIOR_ROUNDS))
        self._own[index] += weight * (measured - self._common - self._own[index])
        # Only the sum is measured: what is shared is the mean over the buckets in use.
        mean = float(self._usage @ self._own / self._usage.sum())
        self._own[self.counts > 0] -= mean
        self._common += mean

    def current(self) -> Float64:
        """[N], within the bounds; what is shared where no round has used a bucket."""
        ratios: Float64 = np.exp(self._common + self._own)
        np.maximum(ratios, 1.0 - MAX_DRIFT, out=ratios)
        return np.minimum(ratios, 1.0 + MAX_DRIFT, out=ratios)


class DeviceCosts(CostModel):
    """The cost model of a ``CudaExecutor``; ``kv_lens`` are the two lengths of the profile.

    ``set_batch`` chooses the batch that the other methods speak of. Nothing but the face is the base's.
    """

    def __init__(
        self,
        profile: Mapping[int, BucketProfile],
        *,
        num_positions: int,
        kv_lens: tuple[int, int],
    ) -> None:
        self.num_positions = num_positions
        self.is_block = False
        self.kv_lens = kv_lens
        self.profile = dict(profile)
        self.num_updates = 0
        self._requests = tuple(sorted(self.profile))
        self._ratios = {
            requests: (_Ratios(len(bucket.tokens)), _Ratios(1))
            for requests, bucket in self.profile.items()
        }
        self.set_batch(1, kv_lens[0])

    def set_batch(self, num_requests: int, mean_kv_len: float) -> None:
        """Speak of a round of ``num_requests`` rows over ``mean_kv_len`` cached tokens each."""
        self._bucket = padded(num_requests, self._requests)
        bucket = self.profile[self._bucket]
        verify_ratio, draft_ratio = (part.current() for part in self._ratios[self._bucket])
        share = self._share(mean_kv_len)
        low, high = bucket.verify
        costs = np.maximum.accumulate((low + share * (high - low)) * verify_ratio)
        first, following = (
            bucket.draft[0] + share * (bucket.draft[1] - bucket.draft[0])
        ) * draft_ratio
        self._share_now = share
        self._tokens = bucket.tokens
        self._draft = (float(first), float(following))
        sizes = np.diff(np.concatenate(([-1], bucket.tokens)))
        self._dense: Float64 = costs.repeat(sizes)

    def bucket(self, tokens: int) -> int:
        """The size that a pass of ``tokens`` runs at."""
        return padded(tokens, self._tokens)

    def verify_ms(self, tokens: Ints) -> Float64:
        """Cost of passes of ``tokens`` [N], [N] f64 in ms; in proportion behind the last bucket."""
        last = self._dense.size - 1
        beyond = np.maximum(tokens / last, 1.0)
        return np.asarray(self._dense[np.minimum(tokens, last)] * beyond, np.float64)

    def verify_row(self, first: int, last: int) -> Float64:
        """The costs of ``first`` … ``last`` tokens, a view not to be written to."""
        return self._dense[first : last + 1]

    def draft_ms(self, requests: int, depth: int) -> float:
        """Cost of drafting ``depth`` positions; all rows of the batch draft together, whoever needs it."""
        if requests == 0 or depth == 0:
            return 0.0
        return self._draft[0] + (depth - 1) * self._draft[1]

    def observe(
        self, requests: int, num_tokens: int, depth: int, draft_ms: float, verify_ms: float
    ) -> None:
        """Take in a completed round of these buckets, at about the batch that was set last."""
        bucket = self.profile.get(requests)
        if bucket is None or num_tokens not in bucket.tokens:
            return
        verify_ratio, draft_ratio = self._ratios[requests]
        index = bisect_left(bucket.tokens, num_tokens)
        low, high = bucket.verify[:, index]
        verify_ratio.add(index, verify_ms / (low + self._share_now * (high - low)))
        if depth > 0:
            first, following = bucket.draft[0] + self._share_now * (
                bucket.draft[1] - bucket.draft[0]
            )
            draft_ratio.add(0, draft_ms / (first + (depth - 1) * following))
        self.num_updates += 1

    def drift(self) -> dict[str, float]:
        """Least and greatest ratio of live to profiled costs, and the rounds behind them, for reports."""
        ratios = np.concatenate(
            [part.current()[part.counts > 0] for pair in self._ratios.values() for part in pair]
        )
        return {
            "updates": self.num_updates,
            "min_ratio": float(ratios.min(initial=1.0)),
            "max_ratio": float(ratios.max(initial=1.0)),
        }

    def _share(self, kv_len: float) -> float:
        low, high = self.kv_lens
        return min(max((kv_len - low) / (high - low), 0.0), 1.0)


def token_sizes_for(requests: int, previous: int, num_positions: int) -> tuple[int, ...]:
    """Token buckets that a request bucket uses: from one token each of ``previous`` + 1 rows on."""
    sizes = sizes_up_to(requests * (1 + num_positions))
    return sizes[bisect_left(sizes, previous + 1) :]
