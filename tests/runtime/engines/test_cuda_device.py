"""The device path on a GPU: captured graphs against the host's engine, no waiting, no allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.engines.cuda_support import K, device_engine, host_engine, serve, tiny_model
from trtllm_av.plugins.sampling_laws import Laws, Verdict
from trtllm_av.runtime.engines.cuda import fused, round_ops
from trtllm_av.runtime.engines.cuda.round_ops import DraftRecord, Rows
from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.params import AvMode, SamplingParams

pytestmark = pytest.mark.cuda

ROUNDS = 1000  # none of which may wait
MODES: list[AvMode] = ["off", "fixed", "shadow"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 3.0},
    {"temperature": 3.0, "top_k": 40, "top_p": 0.9},
]


def both(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Equal random tensors on the CPU and on the GPU."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return value, value.cuda()


def assert_close(gpu: Tensor, cpu: Tensor) -> None:
    tolerance = 1e-5 if cpu.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        gpu.cpu().float(), cpu.float(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "cut"])
def test_graphs_give_the_hosts_tokens(mode: AvMode, params: dict[str, Any]) -> None:
    """Guards against: a length, position or law frozen at capture, and kernels unlike their definition."""
    loaded = tiny_model()
    engine = device_engine(loaded, mode, device="cuda")
    assert serve(engine, params) == serve(host_engine(loaded, mode), params)
    assert engine.device.graphs.num_captured > 0


def test_adaptive_graphs_give_the_targets_tokens() -> None:
    """Guards against: a trim, padding row or shared buffer that changes what is emitted."""
    loaded = tiny_model(is_tied=True)
    engine = device_engine(loaded, "adaptive", device="cuda")
    params = {"temperature": 0.0}
    assert serve(engine, params) == serve(host_engine(loaded, "off"), params)
    assert engine.report().drafted > 0


def test_rounds_neither_wait_nor_allocate() -> None:
    """Guards against: a hidden copy to the host in a round, and memory that grows while serving."""
    max_len = ROUNDS * (1 + K) + 64
    engine = device_engine(tiny_model(), "adaptive", device="cuda", max_len=max_len)
    with torch.inference_mode():
        for requests in engine.device.request_sizes:
            engine.device.warm_up(requests, [Sampling.PLAIN], is_scored=True, depth=K)
    tokens = max_len - 32
    for n in range(4):
        engine.submit([1, 2, 3 + n], SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True))
    for _ in range(6):
        engine.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(ROUNDS):
            assert engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries"):
        assert after[name] == before[name], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_compute_their_definitions(dtype: torch.dtype) -> None:
    """Guards against: a column, head or cache row that a kernel leaves out or mixes up."""
    width, kv_heads, heads, dim, reach, tokens = 96, 2, 4, 24, 16, 5
    x, delta, weight = (
        both(*s, seed=n, dtype=dtype) for n, s in enumerate([(5, 96), (5, 96), (96,)])
    )
    for cpu, gpu in zip(
        fused.add_rms_norm(x[0], delta[0], weight[0], 1e-5),
        fused.add_rms_norm(x[1], delta[1], weight[1], 1e-5),
        strict=True,
    ):
        assert_close(gpu, cpu)
    gate_up = both(tokens, 2 * 48, seed=4, dtype=dtype)
    assert_close(fused.silu_and_multiply(gate_up[1]), fused.silu_and_multiply(gate_up[0]))
    embedding, ids = both(11, width, seed=5, dtype=dtype), torch.tensor([3, 0, 10, 7, 7])
    joined = [
        fused.join_norms(ids.to(e.device), e, h, (w, w), 1e-5)
        for e, h, w in zip(embedding, x, weight, strict=True)
    ]
    assert_close(joined[1], joined[0])
    qkv = both(tokens, (heads + 2 * kv_heads) * dim, seed=6, dtype=dtype)
    frequencies = torch.linspace(0.1, 1.0, dim // 2)
    positions, slots = torch.tensor([3, 4, 0, 9, 15]), torch.tensor([0, 0, 2, 1, 1])
    found = []
    for one in qkv:
        keys, values = (
            torch.zeros(3, kv_heads, reach, dim, dtype=dtype, device=one.device) for _ in range(2)
        )
        table = fused.rotation_table(reach, frequencies.to(one.device), dtype)
        queries = fused.rotate_and_store(
            one,
            table,
            positions.to(one.device),
            (slots * reach + positions).to(one.device),
            keys,
            values,
        )
        found.append((queries, keys, values))
    for cpu, gpu in zip(*found, strict=True):
        assert_close(gpu, cpu)


def round_case(device: str) -> dict[str, Any]:
    """Three rows in four slots: a live one, a dead one, and one whose law allows no token."""
    generator = torch.Generator().manual_seed(1)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(device)

    integers = ints(50, len(Field), 5)
    integers[Field.REMAINING] = torch.tensor([9, 4, 0, 2, 0])
    laws = Laws(
        torch.randn(8, 40, generator=generator).to(device),
        40,
        ints(40, 8),
        torch.tensor([1.0, 2.0, 3.0, -torch.inf, 0.0, 1.0, 1.0, 1.0], device=device),
        *(torch.rand(3, 8, generator=generator).to(device)),
    )
    lens = torch.zeros(3, 3, dtype=torch.int32, device=device)
    rows = Rows(ints(1, len(Field), 3), torch.zeros(2, 3, device=device), *lens)
    record = DraftRecord(
        ints(40, 3, 4),
        ints(40, 3, 4),
        torch.zeros(4, 3, 4, device=device),
        torch.zeros(3, 4, 40, device=device),
        ints(1, 3),
        torch.zeros(3, 6, device=device),
    )
    return {"integers": integers, "laws": laws, "rows": rows, "record": record}


def run_round_case(device: str) -> list[Tensor]:
    """All bookkeeping of a round once; everything that it writes."""
    case = round_case(device)
    integers, laws, rows, record = (case[k] for k in ("integers", "laws", "rows", "record"))
    slots = torch.tensor([1, 4, 3], device=device)
    floats = torch.arange(10.0, device=device).view(2, 5)
    planned = torch.tensor([4, 4, 4], dtype=torch.int32, device=device)
    round_ops.read_rows(integers, floats, slots, planned, rows)
    drafts = Laws(laws.logits[:3], 40, *(number[:3] for number in laws.row_numbers))
    state = torch.arange(18.0, device=device).view(3, 6)
    score = (laws.logits[:3, :4, None].contiguous(), laws.logits[3:6, :4].contiguous())
    targets = torch.arange(40, device=device).flip(0)
    for at, keeps_law in ((0, True), (3, False)):
        round_ops.record_draft(
            record,
            torch.tensor([at], dtype=torch.int32, device=device),
            drafts,
            torch.tensor([5, 6, 7], device=device),
            targets,
            state,
            keeps_law=keeps_law,
        )
    results = {
        "overlap": torch.zeros(3, device=device),
        "features": torch.zeros(3, 4, 1, device=device),
        "confidence": torch.zeros(3, 4, device=device),
        "lens": torch.zeros(4, 3, dtype=torch.int32, device=device),
        "tokens": torch.zeros(3, 5, dtype=torch.int64, device=device),
    }
    int32 = {"dtype": torch.int32, "device": device}
    verdict = Verdict(
        torch.tensor([2, 0, 0], **int32),
        torch.tensor([2, 3, 3], device=device),
        torch.tensor([2, -1, 8], device=device),
        torch.tensor([True, False, True], device=device),
    )
    end = round_ops.finish_round(
        integers,
        slots,
        rows,
        torch.tensor([0, 3, 3, 5], **int32),
        torch.tensor([2, 0, 1], **int32),
        record.draft_tokens,
        laws,
        verdict,
        torch.tensor([11, 12, 13], device=device),
        torch.tensor([torch.nan, 0.5, 0.25], device=device),
        score,
        results,
    )
    written = [integers, rows.integers, rows.floats, rows.kv_lens, rows.base_lens, rows.draft_lens]
    written += [record.draft_tokens, record.points, record.laws, record.logits]
    written += [record.token, record.state, *results.values()]
    return [*written, end.next_ids, end.last_positions]


def test_bookkeeping_kernels_compute_their_definitions() -> None:
    """Guards against: a dead row that commits, a token behind a draft that is another row's."""
    for gpu, cpu in zip(run_round_case("cuda"), run_round_case("cpu"), strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=0, atol=0, equal_nan=True)
