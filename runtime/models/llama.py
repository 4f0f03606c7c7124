"""The Llama-family decoder as a packed, ragged forward pass.

Objective: one function that serves prefill chunks, decode rows, verification of 1 … K+1 tokens per row
and, with some of its layers, a drafter. Invariants: dense layers run on T packed tokens without padding;
a row's logits depend on its own slot only; logits equal the reference implementation's to f32 rounding.
Prefill chunks and decode rows go in separate calls, because attention pads every row to the longest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.attention import plan_attention
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.models.rope import inverse_frequencies, rotate, rotation


@dataclass(slots=True)
class ForwardOutput:
    """``logits`` [N, V] of the selected packed rows; ``hidden`` [T, H] after the final norm."""

    logits: Tensor
    hidden: Tensor


@dataclass(slots=True)
class DecoderLayer:
    """Weights of one decoder layer; ``qkv`` and ``gate_up`` are fused along their outputs."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights and forward pass; the KV state lives in the KVCache that the caller passes."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take the tensors of a Hugging Face state dict, converted to ``dtype``.

        Raises CheckpointError naming a tensor that is missing, unknown or of the wrong shape.
        """
        self.config = config
        self.dtype = dtype
        take = TensorReader(tensors, dtype)
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        width, inner = config.hidden_size, config.intermediate_size
        self._embedding = take("model.embed_tokens.weight", config.vocab_size, width)
        self._layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
            gate_up = {"gate_proj": inner, "up_proj": inner}
            self._layers.append(
                DecoderLayer(
                    attention_norm=take(prefix + "input_layernorm.weight", width),
                    qkv=take.fused(attention, qkv, width, config.qkv_bias),
                    output=take.fused(attention, {"o_proj": width}, heads, config.output_bias),
                    mlp_norm=take(prefix + "post_attention_layernorm.weight", width),
                    gate_up=take.fused(mlp, gate_up, width, config.mlp_bias),
                    down=take.fused(mlp, {"down_proj": width}, inner, config.mlp_bias),
                )
            )
        self._final_norm = take("model.norm.weight", width)
        is_tied = config.tie_word_embeddings
        head = self._embedding if is_tied else take("lm_head.weight", config.vocab_size, width)
        self._head = Linear(head)
        take.refuse_unread(ignored={"lm_head.weight"} if is_tied else set())
        self._frequencies = inverse_frequencies(config)

    @torch.inference_mode()
    def forward(
        self,
        batch: PackedBatch,
        cache: KVCache,
        *,
        layers: Sequence[int] | None = None,
        logit_rows: Tensor | None = None,
    ) -> ForwardOutput:
        """Run T packed tokens, writing their keys and values into ``cache``.

        ``layers`` runs these layers only, in the given order, each on its own cache layer (None: all).
        ``logit_rows`` [N] int64 selects the packed tokens whose logits are computed (None: all T).
        Raises ValueError if a row leaves the cache or two rows share a slot.
        """
        config = self.config
        if batch.token_ids.numel() == 0:
            return ForwardOutput(
                torch.empty(0, config.vocab_size, dtype=self.dtype),
                torch.empty(0, config.hidden_size, dtype=self.dtype),
            )
        plan = plan_attention(batch, config, cache)
        cos, signed_sin = rotation(batch.positions, self._frequencies, self.dtype)
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        all_heads = num_heads + 2 * num_kv_heads
        width, inner = (config.hidden_size,), config.intermediate_size
        eps = config.rms_norm_eps
        x = self.embed(batch.token_ids)
        for index in range(config.num_layers) if layers is None else layers:
            layer = self._layers[index]
            normed = F.rms_norm(x, width, layer.attention_norm, eps)
            qkv = layer.qkv(normed).view(-1, all_heads, config.head_dim)
            rotated = rotate(qkv[:, : num_heads + num_kv_heads], cos, signed_sin)
            cache.write(
                index,
                plan.token_slots,
                batch.positions,
                rotated[:, num_heads:],
                qkv[:, num_heads + num_kv_heads :],
            )
            keys, values = cache.read(index, plan.rows, plan.reach)
            x = x + layer.output(plan.attend(rotated[:, :num_heads], keys, values))
            gate_up = layer.gate_up(F.rms_norm(x, width, layer.mlp_norm, eps))
            x = x + layer.down(F.silu(gate_up[:, :inner]) * gate_up[:, inner:])
        hidden = F.rms_norm(x, width, self._final_norm, eps)
        selected = hidden if logit_rows is None else hidden.index_select(0, logit_rows)
        return ForwardOutput(self.logits(selected), hidden)

    __call__ = forward

    def parts(self) -> tuple[Tensor, list[DecoderLayer], Tensor, Linear]:
        """Embedding [V, H], layers, final norm [H] and output layer, for an executor that runs them itself."""
        return self._embedding, self._layers, self._final_norm, self._head

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 → [T, H], what the first layer reads."""
        return F.embedding(token_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] states after the final norm → [N, V]."""
        return self._head(hidden)


class TensorReader:
    """Hands out tensors by name with their shape checked, and knows which were never asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._read: set[str] = set()

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"checkpoint lacks tensor {name!r}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        self._read.add(name)
        return tensor.to(self._dtype)

    def fused(self, prefix: str, outputs: Mapping[str, int], inputs: int, has_bias: bool) -> Linear:
        """The named projections of one input as a single Linear, in the given order."""
        weights = [self(f"{prefix}{name}.weight", size, inputs) for name, size in outputs.items()]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if not has_bias:
            return Linear(weight)
        biases = [self(f"{prefix}{name}.bias", size) for name, size in outputs.items()]
        return Linear(weight, torch.cat(biases))

    def refuse_unread(self, ignored: set[str]) -> None:
        """Raise CheckpointError on a tensor that the model would silently leave out."""
        for name in sorted(set(self._tensors) - self._read - ignored):
            # Old checkpoints carry these buffers; they follow from the configuration.
            if not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(
                    f"checkpoint holds tensor {name!r}, which config.json does not imply"
                )
