"""What the adaptive part of a round costs on the device: graphs of nothing else, timed by replays."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from trtllm_av.plugins import torch_ops, verify_pass
from trtllm_av.runtime.engines.cuda.executor import CudaExecutor

_CALLS, _REPLAYS = 20, 9


def adaptive_ms(executor: CudaExecutor, requests: int) -> tuple[float, float]:
    """Milliseconds of scoring one more position, and of scoring, trim, labels and statistics per round."""
    round, device = executor.round, executor.device
    drafter = round.drafter
    assert drafter is not None
    width = round.num_positions
    logits = torch.randn(requests, width, drafter.vocab_size, device=device).to(round.target.dtype)
    temperature = torch.ones(requests, device=device)
    coefficients = torch.full((1 + width,), 0.3, device=device)

    def ints(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    position, base_lens, floors = ints(0, 1), ints(1, requests), ints(0, requests)
    draft_lens, accepted_lens = ints(width, requests), ints(1, requests)
    budget = ints(requests * 2, 1)
    confidence = torch.rand(requests, width, device=device)
    features = torch.randn(requests, width, 1, device=device)
    overlap = torch.rand(requests, device=device)
    tokens, slots = ints(1, requests, dtype=torch.int64), torch.arange(requests, device=device)
    drafts = ints(1, requests, width, dtype=torch.int64)

    def score(lens: torch.Tensor) -> None:
        torch_ops.score_drafts(
            logits,
            temperature,
            coefficients,
            position,
            vocab_size=drafter.vocab_size,
            draft_lens=lens,
        )

    def rest() -> None:
        _, verify_lens, *_ = verify_pass.trim_and_pack(
            confidence,
            draft_lens,
            base_lens,
            floors,
            budget,
            tokens,
            drafts,
            tokens,
            slots,
            stride=1 + width,
            capacity=requests * 3,
            slot_stride=executor.max_len,
            pad_offset=0,
        )
        labels = torch_ops.label_drafts(
            draft_lens,
            verify_lens,
            accepted_lens,
            draft_lens,
            overlap,
            num_positions=width,
            confidence=confidence,
        )
        torch_ops.accumulate_statistics(features, labels, coefficients)

    shallow = _replay_ms(lambda: score(base_lens))
    deep = _replay_ms(lambda: score(draft_lens))
    per_position = max(deep - shallow, 0.0) / (width - 1)
    return per_position, shallow - per_position + _replay_ms(rest)


def _replay_ms(call: Callable[[], None]) -> float:
    """Median milliseconds of one call out of a graph of many."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _CALLS)
    return float(median(times[1:]))
