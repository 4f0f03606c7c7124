"""A round of CUDA operators in graphs, under torch.compile, on streams and threads; errors without a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trtllm_av.plugins import cuda_launch, cuda_ops, cuda_scratch, torch_ops, verify_pass
from trtllm_av.runtime.errors import DeviceError

K = 7
COEFFICIENTS = torch.tensor([0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_gpu(value: Any) -> Any:
    """``value`` with all its tensors on the GPU."""
    return tree_map_only(Tensor, Tensor.cuda, value)


def assert_same_bits(cuda: Tensor, cpu: Tensor) -> None:
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


def round_arguments(rows: int, seed: int, vocab_size: int = 2048) -> dict[str, Any]:
    """What one round reads, on the CPU."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g)

    return {
        "logits": (torch.randn(rows, K, vocab_size, generator=g) * 4).bfloat16(),
        "temperature": torch.rand(rows, generator=g) + 0.5,
        "coefficients": COEFFICIENTS,
        "position": int32(0),
        "draft_lens": integers(0, K + 1, rows).int(),
        "base_lens": torch.ones(rows, dtype=torch.int32),
        "min_verify_lens": torch.zeros(rows, dtype=torch.int32),
        "draft_budget": int32(rows * 3),
        "last_tokens": integers(0, 9999, rows),
        "draft_tokens": integers(0, 9999, rows, K),
        "kv_lens": integers(0, 500, rows),
        "slots": torch.arange(rows),
        "trainable_lens": torch.full((rows,), K, dtype=torch.int32),
        "overlap": torch.rand(rows, generator=g),
    }


def run_round(a: dict[str, Any]) -> tuple[Tensor, ...]:
    """All operators of one round on whatever device ``a`` lies."""
    features, confidence = torch_ops.score_drafts(
        a["logits"],
        a["temperature"],
        a["coefficients"],
        a["position"],
        vocab_size=a["logits"].shape[-1],
        draft_lens=a["draft_lens"],
    )
    trim = ("draft_lens", "base_lens", "min_verify_lens", "draft_budget")
    gather = ("last_tokens", "draft_tokens", "kv_lens", "slots")
    packed = verify_pass.trim_and_pack(
        confidence,
        *(a[name] for name in trim + gather),
        stride=K + 1,
        capacity=a["slots"].numel() * (K + 1),
        slot_stride=1024,
        pad_offset=-1,
    )
    labels = torch_ops.label_drafts(
        a["draft_lens"],
        packed[1],
        packed[1],
        a["trainable_lens"],
        a["overlap"],
        num_positions=K,
        confidence=confidence,
    )
    statistics = torch_ops.accumulate_statistics(features, labels, a["coefficients"])
    return confidence, *packed, labels, statistics


def test_import_needs_no_gpu() -> None:
    """Guards against: a CPU machine on which importing the package fails, or an operator left out."""
    for implementation in cuda_ops.IMPLEMENTATIONS:
        name = f"trtllm_av::{implementation.__name__}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_one_line() -> None:
    """Guards against: torch's assertion or a driver code where a user asked for CUDA."""
    with pytest.raises(DeviceError, match="use device 'cpu'") as raised:
        cuda_launch.architecture()
    assert "\n" not in str(raised.value)


def test_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: a GPU whose launches fail one by one because it lacks the instructions."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(DeviceError, match=r"Old GPU has compute capability 7\.5"):
        cuda_launch.architecture(0)


@pytest.mark.cuda
def test_graph_replays_follow_their_inputs() -> None:
    """Guards against: lengths, budget or temperature frozen at capture, mailboxes that a replay leaves full,
    and allocation or synchronisation in a round."""
    given = on_gpu(round_arguments(8, 0))
    run_round(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_round(given)
    for seed in (1, 2):
        fresh = round_arguments(8, seed)
        for name, value in fresh.items():
            given[name].copy_(value)
        graph.replay()
        for result, expected in zip(results, run_round(on_gpu(fresh)), strict=True):
            assert_same_bits(result, expected.cpu())
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(1000):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats() == before


@pytest.mark.cuda
def test_eager_rounds_neither_wait_nor_grow() -> None:
    """Guards against: a hidden copy to the host, and scratch that the allocator must ask the driver for."""
    given = on_gpu(round_arguments(8, 0))
    for _ in range(3):
        run_round(given)
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(1000):
            run_round(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_device_free", "reserved_bytes.all.current"):
        assert after[name] == before[name], name
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]


@pytest.mark.cuda
def test_compiled_rounds_equal_eager_ones() -> None:
    """Guards against: operators that break torch.compile's graph or mislead it about shapes."""
    given = on_gpu(round_arguments(8, 0))
    expected = run_round(given)
    compiled = torch.compile(run_round, fullgraph=True)
    for result, value in zip(compiled(given), expected, strict=True):
        assert_same_bits(result, value.cpu())


@pytest.mark.cuda
def test_streams_do_not_share_mailboxes() -> None:
    """Guards against: two engines whose split rows read each other's partial sums."""
    given = [on_gpu(round_arguments(2, seed, 60_000)) for seed in range(2)]
    expected = [[value.cpu() for value in run_round(a)] for a in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    results: list[Any] = [None, None]
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i] = run_round(given[i])
    torch.cuda.synchronize()
    for i in range(2):
        for result, value in zip(results[i], expected[i], strict=True):
            assert_same_bits(result, value)


@pytest.mark.cuda
def test_another_thread_can_launch() -> None:
    """Guards against: a server's worker thread that has no context of its own."""
    given = on_gpu(round_arguments(2, 0))
    expected = run_round(given)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run_round(given)))
    thread.start()
    thread.join()
    for result, value in zip(results[0], expected, strict=True):
        assert_same_bits(result, value.cpu())


@pytest.mark.cuda
def test_first_use_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: compiling and loading inside a capture, which breaks it with a driver code."""
    given = on_gpu(round_arguments(2, 0))
    run_round(given)
    torch.cuda.synchronize()
    for cached in (cuda_launch.kernels, cuda_scratch._mailboxes):
        cached.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(DeviceError, match="run its operator once before"), torch.cuda.graph(graph):
        run_round(given)
    run_round(given)
