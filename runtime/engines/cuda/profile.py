"""Measures what the captured graphs of an executor cost, before it serves.

Invariants: rows are live ones of the stated KV length (and a token, of the round ahead), spread as a round
spreads them; the median of five
replays counts; sizes are measured in turns of increasing size within one request bucket; the executor's
state is empty afterwards. Verify passes of the longer KV length are measured at three token buckets: what
the context adds lies on a line between them, because it is attention's part and depends on rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from trtllm_av.runtime.engines.cuda.costs import BucketProfile, DeviceCosts, token_sizes_for
from trtllm_av.runtime.engines.cuda.executor import CudaExecutor, RoundInputs
from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.estimator import cold_coefficients

#: Of what is measured here and of the kernels behind it: profiles of another one are measured again.
VERSION = 2
_REPEATS = 5


def measure_costs(
    executor: CudaExecutor,
    *,
    kv_lens: tuple[int, int],
    sampling: Sampling,
    request_buckets: Sequence[int] | None = None,
) -> DeviceCosts:
    """The costs of ``executor``, which must serve nobody; ``request_buckets`` None measures all."""
    buckets = tuple(request_buckets or executor.request_sizes)
    profile = {
        requests: _measure_bucket(executor, requests, kv_lens, sampling) for requests in buckets
    }
    state = executor.round.state
    state.integers.zero_()
    return DeviceCosts(profile, num_positions=executor.num_positions, kv_lens=kv_lens)


def _measure_bucket(
    executor: CudaExecutor, requests: int, kv_lens: tuple[int, int], sampling: Sampling
) -> BucketProfile:
    sizes = executor.request_sizes
    index = sizes.index(requests)
    tokens = token_sizes_for(requests, sizes[index - 1] if index else 0, executor.num_positions)
    tokens = tuple(size for size in tokens if size >= requests) or tokens[-1:]

    def verify(kv_len: int, num_tokens: int) -> float:
        return _median(executor, requests, kv_len, num_tokens, 1, sampling)[1]

    low = np.array([verify(kv_lens[0], size) for size in tokens])
    spread = sorted({0, len(tokens) // 2, len(tokens) - 1})
    added = [verify(kv_lens[1], tokens[i]) - low[i] for i in spread]
    high = low + np.maximum(np.interp(tokens, [tokens[i] for i in spread], added), 0.0)
    draft = []
    for kv_len in kv_lens:
        depth = executor.num_positions
        first = _median(executor, requests, kv_len, requests, 1, sampling)[0]
        whole = _median(executor, requests, kv_len, requests, depth, sampling)[0]
        draft.append([first, max(whole - first, 0.0) / max(depth - 1, 1)])
    return BucketProfile(tokens, np.stack([low, high]), np.array(draft))


def _median(
    executor: CudaExecutor,
    requests: int,
    kv_len: int,
    num_tokens: int,
    depth: int,
    sampling: Sampling,
) -> tuple[float, float]:
    """Milliseconds of drafting and of verifying in rounds of these sizes."""
    width = executor.num_positions
    drafts = num_tokens - requests
    inputs = RoundInputs(
        slots=np.arange(requests, dtype=np.int64),
        draft_lens=np.full(requests, max(depth, -(-drafts // requests)), np.int32),
        floors=np.zeros(requests, np.int32),
        budget=drafts,
        coefficients=cold_coefficients(width),
        sampling=sampling,
        is_scored=True,
    )
    ahead = replace(inputs, draft_lens=np.zeros(requests, np.int32), budget=0)
    draft_ms, verify_ms = [], []
    for turn in range(1 + _REPEATS):
        _occupy(executor, requests, kv_len, sampling)
        # As while serving, a round is launched behind another one: the device never waits for the host.
        executor.launch(ahead)
        ticket = executor.launch(inputs)
        executor.read(ticket)
        if turn > 0:  # the first turn captures or warms up
            draft_ms.append(ticket.drafted.ms_since(ticket.started))
            verify_ms.append(ticket.ended.ms_since(ticket.drafted))
    return median(draft_ms), median(verify_ms)


def _occupy(executor: CudaExecutor, requests: int, kv_len: int, sampling: Sampling) -> None:
    """Make the first slots look like requests of ``kv_len`` cached tokens."""
    state = executor.round.state
    state.integers.zero_()
    state.integers[Field.KV_LEN, :requests] = kv_len
    state.integers[Field.REMAINING, :requests] = executor.max_len
    state.integers[Field.SEED, :requests] = torch.arange(requests, device=executor.device)
    state.floats[0] = 0.0 if sampling is Sampling.GREEDY else 1.0
