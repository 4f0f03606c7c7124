"""Weights of a decoder as plain tensors on one device.

Invariants: matrices are row-major [out, in], whatever layout the CPU's kernels keep them in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class Matrix:
    """y = x Wᵀ + b with ``weight`` [out, in] and ``bias`` [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] → [N, out]."""
        return F.linear(x, self.weight, self.bias)

    @classmethod
    def copy_of(cls, linear: Linear, device: torch.device, dtype: torch.dtype) -> Matrix:
        weight, bias = linear.plain()
        return cls(
            weight.to(device, dtype).contiguous(),
            None if bias is None else bias.to(device, dtype),
        )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; ``qkv`` and ``gate_up`` are fused along their outputs."""

    attention_norm: Tensor
    qkv: Matrix
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """``embedding`` [V, H], the layers, ``final_norm`` [H] and the output layer ``head``."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Matrix

    @classmethod
    def copy_of(cls, model: LlamaModel, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
        """The weights of ``model`` on ``device``."""
        embedding, layers, final_norm, head = model.parts()

        def copy(linear: Linear) -> Matrix:
            return Matrix.copy_of(linear, device, dtype)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype)

        moved = move(embedding)
        is_tied = model.config.tie_word_embeddings
        return cls(
            moved,
            [
                LayerWeights(
                    move(layer.attention_norm),
                    copy(layer.qkv),
                    copy(layer.output),
                    move(layer.mlp_norm),
                    copy(layer.gate_up),
                    copy(layer.down),
                )
                for layer in layers
            ],
            move(final_norm),
            Matrix(moved) if is_tied else copy(head),
        )

    @classmethod
    def random(
        cls, config: LlamaConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0
    ) -> DecoderWeights:
        """Weights of the shape of ``config`` that mean nothing, for measuring what its steps cost."""
        generator = torch.Generator(device).manual_seed(seed)
        width, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            weight = torch.empty(rows, columns, device=device, dtype=dtype)
            return weight.normal_(0.0, columns**-0.5, generator=generator)

        def ones() -> Tensor:
            return torch.ones(width, device=device, dtype=dtype)

        embedding = matrix(config.vocab_size, width)
        layers = [
            LayerWeights(
                ones(),
                Matrix(matrix(heads + 2 * kv_heads, width)),
                Matrix(matrix(width, heads)),
                ones(),
                Matrix(matrix(2 * inner, width)),
                Matrix(matrix(width, inner)),
            )
            for _ in range(config.num_layers)
        ]
        is_tied = config.tie_word_embeddings
        head = Matrix(embedding if is_tied else matrix(config.vocab_size, width))
        return cls(embedding, layers, ones(), head)

    @staticmethod
    def num_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
        """Memory that the weights of ``config`` take."""
        width, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        layer = width * (2 * heads + 2 * kv_heads + 3 * inner + 2)
        tables = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
        return (config.num_layers * layer + tables + width) * dtype.itemsize
