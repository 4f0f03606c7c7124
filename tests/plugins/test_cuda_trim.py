"""Trim and pack on CUDA: bit-equal to the definition and to the CPU. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trtllm_av.plugins import cuda_ops, reference, torch_ops, verify_pass
from trtllm_av.runtime.errors import UsageError

pytestmark = pytest.mark.cuda

assert cuda_ops.IMPLEMENTATIONS  # registered by the import

K = 7


def on_gpu(value: Any) -> Any:
    """``value`` with all its tensors on the GPU."""
    return tree_map_only(Tensor, Tensor.cuda, value)


def assert_same_bits(cuda: Tensor, cpu: Tensor) -> None:
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


def trim_case(seed: int) -> tuple[Tensor, ...]:
    """Arguments of ``trim_drafts``: random or adversarial, by the seed."""
    g = np.random.default_rng(seed)
    rows = int(g.choice([1, 2, 3, 7, 31, 32, 33, 64])) if seed % 100 else int(g.integers(200, 1025))
    positions = int(g.integers(1, 17))
    shape = (rows, positions)
    make: list[Callable[[], Any]] = [
        lambda: g.random(shape),
        lambda: np.ones(shape),  # every slot ties
        lambda: g.choice([0.0, 0.5, 1.0], shape),
        lambda: g.choice([np.nan, 1e-39, 1e-20, 0.9, -1.0, 2.0, np.inf], shape),
        lambda: np.broadcast_to(g.random(positions), shape).copy(),  # requests tie
        lambda: 1 / (1 + np.exp(-g.normal(0, 8, shape))),  # saturated
        lambda: g.random(shape) ** 40,  # products underflow
    ]
    confidence = make[seed % len(make)]().astype(np.float32)
    floors = g.integers(-1, positions + 2, rows) * (g.random(rows) < 0.2)
    budget = g.choice([0, -1, rows * positions, int(g.integers(0, rows * positions + 1))])
    ints = (
        g.integers(-1, positions + 2, rows),
        g.choice([0, 1, 1, 1, 5], rows),
        floors,
        np.array([budget]),
    )
    return torch.from_numpy(confidence), *(torch.from_numpy(i.astype(np.int32)) for i in ints)


def test_lengths_are_bit_equal_in_all_implementations() -> None:
    """Guards against: ranks or executors that verify other drafts for the same confidences."""
    for seed in range(10_000):
        arguments = trim_case(seed)
        cuda = torch_ops.trim_drafts(*on_gpu(arguments))
        cpu = torch_ops.trim_drafts(*arguments)
        expected = reference.trim_drafts(*(argument.numpy() for argument in arguments))
        for k in range(3):
            assert np.array_equal(cuda[k].cpu().numpy(), expected[k]), (seed, k)
            assert np.array_equal(cpu[k].numpy(), expected[k]), (seed, k)


@pytest.mark.parametrize("rows", [0, 1, 33, 1024])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_the_next_pass(rows: int, dtype: torch.dtype) -> None:
    """Guards against: a draft fed to another request, or written over another's cache."""
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        base_lens = (torch.rand(rows, generator=g) < 0.8).int()
        arguments = (
            torch.rand(rows, K, generator=g),
            torch.randint(0, K + 1, (rows,), generator=g).int(),
            base_lens,
            torch.zeros(rows, dtype=torch.int32),
            torch.tensor([rows * 3], dtype=torch.int32),
            torch.randint(0, 9999, (rows,), generator=g).to(dtype),
            torch.randint(0, 9999, (rows, K + 1), generator=g).to(dtype)[:, 1:],
            torch.randint(0, 500, (rows,), generator=g).to(dtype),
            torch.randperm(rows, generator=g).to(dtype),
        )
        options = {
            "stride": K + 1,
            "capacity": rows * (K + 1) + 5,
            "slot_stride": 512,
            "pad_offset": 77,
        }
        cpu = verify_pass.trim_and_pack(*arguments, **options)
        cuda = verify_pass.trim_and_pack(*on_gpu(arguments), **options)
        for result, expected in zip(cuda, cpu, strict=True):
            assert_same_bits(result, expected)
        lens = {"stride": K + 1, "capacity": options["capacity"]}
        packed = torch_ops.pack_drafts(base_lens.cuda(), cuda[1], **lens)
        assert_same_bits(packed, cpu[3])


def test_prefill_chunks_are_packed() -> None:
    """Guards against: a request of more rows than a warp has lanes, cut or written over the next one."""
    base = torch.tensor([1, 300, 0, 65] * 20, dtype=torch.int32)
    lens = torch.tensor([3, 0, 0, 0] * 20, dtype=torch.int32)
    options = {"stride": 304, "capacity": 8000}
    cuda = torch_ops.pack_drafts(base.cuda(), lens.cuda(), **options)
    assert_same_bits(cuda, torch_ops.pack_drafts(base, lens, **options))


def test_packed_rows_behind_the_capacity_are_dropped() -> None:
    """Guards against: a batch that outgrows its bucket writing over other memory."""
    guard = torch.full((64,), 5, dtype=torch.int32, device="cuda")
    lens = torch.full((8,), 4, dtype=torch.int32, device="cuda")
    packed = torch_ops.pack_drafts(lens, lens, stride=8, capacity=20)
    assert_same_bits(packed, torch.arange(20, dtype=torch.int32))
    assert (guard == 5).all()


def test_batches_that_do_not_fit_one_block() -> None:
    """Guards against: requests or positions beyond a block's that would be left out silently."""
    many = torch.ones(1025, dtype=torch.int32, device="cuda")
    with pytest.raises(UsageError, match="1025 requests exceed 1024"):
        torch_ops.trim_drafts(torch.ones(1025, 2, device="cuda"), many, many, many, many[:1])
    few = many[:4]
    with pytest.raises(UsageError, match="17 draft positions exceed 16"):
        torch_ops.trim_drafts(torch.ones(4, 17, device="cuda"), few, few, few, few[:1])


def test_small_launches() -> None:
    """Guards against: what only a memory or race checker sees; small, so that one can watch it
    (`compute-sanitizer --tool racecheck python -m pytest -k small_launches`)."""
    for seed in range(100, 128):
        arguments = trim_case(seed)
        cuda = torch_ops.trim_drafts(*on_gpu(arguments))
        for result, expected in zip(cuda, torch_ops.trim_drafts(*arguments), strict=True):
            assert_same_bits(result, expected)
    test_rows_of_the_next_pass(33, torch.int64)
    torch.cuda.synchronize()
