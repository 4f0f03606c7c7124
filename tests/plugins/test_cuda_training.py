"""Labels, statistics and overlap on CUDA against the CPU. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trtllm_av.plugins import cuda_ops, torch_ops, verify_pass

pytestmark = pytest.mark.cuda

assert cuda_ops.IMPLEMENTATIONS  # registered by the import

K = 7
COEFFICIENTS = torch.tensor([0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_gpu(value: Any) -> Any:
    """``value`` with all its tensors on the GPU."""
    return tree_map_only(Tensor, Tensor.cuda, value)


def assert_same_bits(cuda: Tensor, cpu: Tensor) -> None:
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 33, 700])
def test_labels_and_statistics(rows: int) -> None:
    """Guards against: labels of another position, statistics that NaN enters, and sums whose bits change
    from run to run, so that ranks fit other coefficients."""
    g = torch.Generator().manual_seed(rows)
    drafted = torch.randint(0, K + 1, (rows,), generator=g)
    verified = torch.minimum(torch.randint(0, K + 1, (rows,), generator=g), drafted)
    accepted = torch.minimum(torch.randint(0, K + 1, (rows,), generator=g), verified)
    trainable = torch.randint(0, K + 2, (rows,), generator=g)
    lens = [value.int() for value in (drafted, verified, accepted, trainable)]
    overlap = torch.rand(rows, generator=g)
    confidence = torch.rand(rows, K, generator=g).round()
    for chosen in (None, confidence):
        options = {"num_positions": K, "confidence": chosen}
        labels = torch_ops.label_drafts(*lens, overlap, **options)
        cuda = torch_ops.label_drafts(*on_gpu(lens), overlap.cuda(), **on_gpu(options))
        assert_same_bits(cuda, labels)
    features = torch.randn(rows, K, 1, generator=g) * 6
    features[0, 0] = float("nan")
    arguments = (features, labels, COEFFICIENTS)
    statistics = torch_ops.accumulate_statistics(*on_gpu(arguments))
    expected = torch_ops.accumulate_statistics(*arguments)
    torch.testing.assert_close(statistics.cpu(), expected, rtol=1e-12, atol=1e-12)
    for _ in range(20):
        again = torch_ops.accumulate_statistics(*on_gpu(arguments))
        assert torch.equal(again, statistics)


@pytest.mark.parametrize("vocab_size", [3, 1000, 49152, 50001])
def test_overlap(vocab_size: int) -> None:
    """Guards against: soft labels of other rows, of unaligned rows cut short, or of changing bits."""
    g = torch.Generator().manual_seed(vocab_size)
    target = (torch.randn(9, vocab_size, generator=g) * 3).softmax(-1)
    draft = (torch.randn(4, vocab_size, generator=g) * 3).softmax(-1)
    rows = (int32(8, 0, -1, 3, 3), int32(0, 3, 1, -1, 2))
    cpu = verify_pass.overlap_mass(target, draft, *rows)
    cuda = verify_pass.overlap_mass(*on_gpu((target, draft, *rows)))
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-5, atol=1e-6, equal_nan=True)
    again = verify_pass.overlap_mass(*on_gpu((target, draft, *rows)))
    assert_same_bits(again, cuda.cpu())


def test_small_launches() -> None:
    """Guards against: what only a memory or race checker sees; small, so that one can watch it
    (`compute-sanitizer --tool memcheck python -m pytest -k small_launches`)."""
    test_labels_and_statistics(33)
    test_overlap(50001)
    torch.cuda.synchronize()
