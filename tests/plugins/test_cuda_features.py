"""More than one feature on CUDA: what runs there, and what says that it does not. Needs a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_av.plugins import cuda_ops, torch_ops
from trtllm_av.runtime.errors import UsageError

pytestmark = pytest.mark.cuda

assert cuda_ops.IMPLEMENTATIONS  # registered by the import


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_a_law_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Guards against an operator that exists on one device only, and rows without a law that differ."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 3, 1000, generator=generator) * 4).to(dtype)
    logits[1], logits[2, 1, 5], logits[3, :, 1:] = -math.inf, math.nan, -math.inf
    temperature = torch.tensor([1.0, 0.7, 1.0, 1.0, 0.0, 1.3])
    expected = torch_ops.law_features(logits, temperature, vocab_size=990)
    found = torch_ops.law_features(logits.cuda(), temperature.cuda(), vocab_size=990)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_several_features_are_those_of_the_cpu() -> None:
    """Guards against a kernel that reads slopes as intercepts."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(9, 4, 3, generator=generator)
    coefficients = torch.randn(7, generator=generator)
    first = torch.zeros(1, dtype=torch.int32)
    expected = torch_ops.score_features(features, coefficients, first)
    found = torch_ops.score_features(features.cuda(), coefficients.cuda(), first.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_statistics_of_several_features_are_refused() -> None:
    """Guards against a kernel that sums the first feature and calls it all of them."""
    arguments = [torch.zeros(5, 4, 2), torch.zeros(5, 4), torch.zeros(6)]
    with pytest.raises(UsageError, match=r"features has 2 values a draft.*or sum on the CPU"):
        torch_ops.accumulate_statistics(*(tensor.cuda() for tensor in arguments))
