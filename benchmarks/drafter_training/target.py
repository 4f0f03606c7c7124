"""The frozen target on the training device: dense batches, one dtype, nothing but a forward pass.

Invariant: the hidden state is the one behind the target's final norm, the same that the runtime hands
to ``Drafter.observe``; logits are ``hidden @ output_rows.T``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.rope import inverse_frequencies, rotate, rotation


class Layer(NamedTuple):
    """The weights of one decoder layer, projections that share an input joined."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def before_attention(x: Tensor, layer: Layer, eps: float) -> Tensor:
    """Residual stream to joined q, k, v."""
    return F.linear(F.rms_norm(x, x.shape[-1:], layer.input_norm, eps), layer.qkv)


def after_attention(x: Tensor, attention: Tensor, layer: Layer, eps: float) -> Tensor:
    """Attention output and residual stream to the layer's output."""
    x = x + F.linear(attention, layer.output)
    hidden = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, eps)
    gate, up = F.linear(hidden, layer.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def _dense_layer(
    x: Tensor,
    layer: Layer,
    cos: Tensor,
    signed_sin: Tensor,
    sizes: tuple[int, int, int],
    eps: float,
) -> Tensor:
    """One causal layer of [B, T, H]; ``sizes`` = heads, key heads, head dimension."""
    heads, kv_heads, head_dim = sizes
    qkv = before_attention(x, layer, eps).unflatten(-1, (-1, head_dim))
    rotated = rotate(qkv[..., : heads + kv_heads, :], cos, signed_sin)
    q, k = rotated.split((heads, kv_heads), -2)
    v = qkv[..., heads + kv_heads :, :]
    attention = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return after_attention(x, attention.transpose(1, 2).flatten(2), layer, eps)


class FrozenTarget:
    """A Llama target with its weights in one dtype on one device."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: LlamaConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``weights`` are named as in a Hugging Face Llama checkpoint; CheckpointError with biases."""
        if config.qkv_bias or config.output_bias or config.mlp_bias:
            raise CheckpointError(
                f"{config.architecture} has biases; train drafters for a target without them"
            )

        def get(*names: str) -> Tensor:
            joined = torch.cat([weights[f"{name}.weight"] for name in names])
            return joined.to(device, dtype).contiguous()

        self.config, self.dtype, self.device = config, dtype, device
        self.embedding = get("model.embed_tokens")
        self.output_rows = self.embedding if config.tie_word_embeddings else get("lm_head")
        self.final_norm = get("model.norm")
        self.frequencies = inverse_frequencies(config).to(device)
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            base = f"model.layers.{index}"
            attention, mlp = f"{base}.self_attn", f"{base}.mlp"
            self.layers.append(
                Layer(
                    get(f"{base}.input_layernorm"),
                    get(*(f"{attention}.{name}_proj" for name in "qkv")),
                    get(f"{attention}.o_proj"),
                    get(f"{base}.post_attention_layernorm"),
                    get(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    get(f"{mlp}.down_proj"),
                )
            )
        self._layer = torch.compile(_dense_layer) if device.type == "cuda" else _dense_layer

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] token ids, on any device, to [N, H]."""
        return self.embedding[token_ids.to(self.device)]

    @torch.no_grad()
    def encode(self, token_ids: Tensor) -> Tensor:
        """Final hidden states [B, T, H] of ``token_ids`` [B, T]."""
        config = self.config
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        positions = torch.arange(token_ids.shape[1], device=self.device)
        cos, signed_sin = rotation(positions, self.frequencies, self.dtype)
        x = self.embedding[token_ids.long()]
        for layer in self.layers:
            x = self._layer(x, layer, cos, signed_sin, sizes, config.rms_norm_eps)
        return F.rms_norm(x, x.shape[-1:], self.final_norm, config.rms_norm_eps)
