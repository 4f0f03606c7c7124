"""Rotary position embedding in the half-split convention of Llama checkpoints.

Invariants: angles are computed in float32 whatever the model's dtype, in the same order of operations as
the checkpoints' reference implementation, so that logits agree to rounding.
Sources: Su et al. 2021 (RoPE); the Llama 3.1 release for the ``llama3`` frequency scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtllm_av.runtime.models.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """[head_dim / 2] float32 angular frequencies."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    is_low = wavelengths > context / scaling.low_freq_factor
    is_high = wavelengths < context / scaling.high_freq_factor
    return torch.where(
        is_high, frequencies, torch.where(is_low, frequencies / scaling.factor, blended)
    )


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), each [T, 1, head_dim] of ``dtype``, for ``rotate``; positions [T] int64."""
    angles = positions.float()[:, None] * frequencies
    sin = angles.sin()
    cos = angles.cos()
    return (
        torch.cat((cos, cos), -1).to(dtype)[:, None],
        torch.cat((-sin, sin), -1).to(dtype)[:, None],
    )


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate ``heads`` [T, N, head_dim]: pair i of each head is (i, i + head_dim / 2)."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)
