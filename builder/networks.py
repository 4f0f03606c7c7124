"""The networks of an engine as torch modules that ``torch.onnx.export`` can read.

Objective: the same mathematics as ``runtime.models``, from the same tensors and with the same norm,
rotation and head, but with plain weights (the runtime's are prepacked for one CPU) and with TensorRT's
nodes where the runtime calls its own attention and cache.

Packed layout, as in ``runtime.models.attention``: T tokens lie one after another, row b of the cache owns
the packed rows cu_q[b] … cu_q[b+1]−1, and every slot of the cache has such a range, an idle one an empty
one. Only attention is padded, to M queries a slot, right-aligned: query m of slot b sees the keys up to
kv_len[b] − M + m, so that no mask tensor is needed. Invariants: padded queries are dropped by the gather
that packs the result, whatever their value (they may see no key at all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead
from trtllm_av.runtime.models.llama import TensorReader
from trtllm_av.runtime.models.rope import inverse_frequencies, rotate, rotation


@dataclass(slots=True)
class Packing:
    """How T packed tokens lie in B slots; see ``PACKING_INPUTS`` for the shapes."""

    cu_q: Tensor
    kv_write: Tensor
    kv_len: Tensor
    pad_idx: Tensor
    pack_idx: Tensor

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads·D] of rotated q [T, heads, D], k and v [T, kv_heads, D], and both caches after it."""
        keys = _updated(k_cache, k, self.kv_write, self.cu_q)
        values = _updated(v_cache, v, self.kv_write, self.cu_q)
        num_heads, head_dim = q.shape[1:]
        scaled = (q * head_dim**-0.5).flatten(1)
        padded = F.embedding(self.pad_idx, scaled)
        queries = padded.unflatten(-1, (num_heads, head_dim)).transpose(1, 2)
        mixed = torch.onnx.ops.symbolic(
            "trt::TRT_Attention",
            (queries, keys, values, None, None, self.kv_len),
            attrs={"causal_kind": "lower_right"},
            dtype=queries.dtype,
            shape=queries.shape,
            version=1,
        )
        rows = mixed.transpose(1, 2).reshape(-1, num_heads * head_dim)
        return rows.index_select(0, self.pack_idx), keys, values


def _updated(cache: Tensor, update: Tensor, kv_write: Tensor, cu_q: Tensor) -> Tensor:
    updated: Tensor = torch.onnx.ops.symbolic(
        "trt::TRT_KVCacheUpdate",
        (cache, update, kv_write, cu_q),
        attrs={"update_form": "packed_nhd"},
        dtype=cache.dtype,
        shape=cache.shape,
        version=1,
    )
    return updated


class DecoderNetwork(nn.Module):
    """Packed tokens to logits, any number of tokens per slot: the verify pass, and one step of a drafter
    that is a decoder itself or that skips some of the target's layers."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        layers: Sequence[int] | None = None,
    ) -> None:
        """``tensors`` as ``LlamaModel`` takes them, ``layers`` those to keep, in order (None: all); raises
        CheckpointError as it does."""
        super().__init__()
        self.config = config
        self.layer_indices = range(config.num_layers) if layers is None else list(layers)
        take = TensorReader(tensors, dtype)
        width = config.hidden_size
        self.embedding = _frozen(take("model.embed_tokens.weight", config.vocab_size, width))
        # By index, so that a weight has one name in every file that holds it.
        self.layers = nn.ModuleDict({str(i): _Layer(config, take, i) for i in self.layer_indices})
        self.final_norm = _frozen(take("model.norm.weight", width))
        is_tied = config.tie_word_embeddings
        self.head = (
            self.embedding if is_tied else _frozen(take("lm_head.weight", config.vocab_size, width))
        )
        if layers is None:
            take.refuse_unread(ignored={"lm_head.weight"} if is_tied else set())
        self.register_buffer("_frequencies", inverse_frequencies(config), persistent=False)
        self._frequencies: Tensor

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_q: Tensor,
        kv_write: Tensor,
        kv_len: Tensor,
        pad_idx: Tensor,
        pack_idx: Tensor,
        logit_idx: Tensor,
        caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """logits [N, V] of the packed rows ``logit_idx``, hidden [T, H] after the final norm, and the
        caches k, v of each kept layer in turn, as they came in."""
        packing = Packing(cu_q, kv_write, kv_len, pad_idx, pack_idx)
        x = F.embedding(input_ids, self.embedding)
        cos, signed_sin = rotation(position_ids, self._frequencies, x.dtype)
        updated: list[Tensor] = []
        for place, layer in enumerate(self.layers.values()):
            k_cache, v_cache = caches[2 * place : 2 * place + 2]
            x, keys, values = layer(x, cos, signed_sin, packing, k_cache, v_cache)
            updated += [keys, values]
        hidden = F.rms_norm(
            x, (self.config.hidden_size,), self.final_norm, self.config.rms_norm_eps
        )
        logits = F.linear(hidden.index_select(0, logit_idx), self.head)
        return (logits, hidden, *updated)


class _Layer(nn.Module):
    """One decoder layer. Projections stay apart: joining them would copy memory-mapped weights."""

    def __init__(self, config: LlamaConfig, take: TensorReader, index: int) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        width, inner = config.hidden_size, config.intermediate_size
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self.attention_norm = _frozen(take(prefix + "input_layernorm.weight", width))
        self.mlp_norm = _frozen(take(prefix + "post_attention_layernorm.weight", width))
        self.q = _Projection(take, attention + "q_proj", heads, width, config.qkv_bias)
        self.k = _Projection(take, attention + "k_proj", kv_heads, width, config.qkv_bias)
        self.v = _Projection(take, attention + "v_proj", kv_heads, width, config.qkv_bias)
        self.output = _Projection(take, attention + "o_proj", width, heads, config.output_bias)
        self.gate = _Projection(take, mlp + "gate_proj", inner, width, config.mlp_bias)
        self.up = _Projection(take, mlp + "up_proj", inner, width, config.mlp_bias)
        self.down = _Projection(take, mlp + "down_proj", width, inner, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        packing: Packing,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        width, eps, per_head = (config.hidden_size,), config.rms_norm_eps, (-1, config.head_dim)
        normed = F.rms_norm(x, width, self.attention_norm, eps)
        q, k, v = (one(normed).unflatten(-1, per_head) for one in (self.q, self.k, self.v))
        mixed, keys, values = packing.attend(
            rotate(q, cos, signed_sin), rotate(k, cos, signed_sin), v, k_cache, v_cache
        )
        x = x + self.output(mixed)
        normed = F.rms_norm(x, width, self.mlp_norm, eps)
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x, keys, values


class _Projection(nn.Module):
    def __init__(
        self, take: TensorReader, name: str, outputs: int, inputs: int, has_bias: bool
    ) -> None:
        super().__init__()
        self.weight = _frozen(take(f"{name}.weight", outputs, inputs))
        self.bias = _frozen(take(f"{name}.bias", outputs)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class HeadStepNetwork(nn.Module):
    """One step of the EAGLE head.

    ``embedding`` [V, H] of the target; ``output`` [V_d, H], its output layer at the draft vocabulary.
    """

    def __init__(self, head: EagleHead, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.head = head
        self.embedding = _frozen(embedding)
        self.output = _frozen(output)

    def forward(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        cu_q: Tensor,
        kv_write: Tensor,
        kv_len: Tensor,
        pad_idx: Tensor,
        pack_idx: Tensor,
        logit_idx: Tensor,
        caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """logits [N, V_d] of the rows ``logit_idx``, state [T, H] and both caches.

        ``input_ids`` are the tokens one position on and ``hidden`` [T, H] the states of the entries'
        own tokens, as ``EagleHead`` wants them.
        """
        packing = Packing(cu_q, kv_write, kv_len, pad_idx, pack_idx)
        embedded = F.embedding(input_ids, self.embedding)
        return self._step(embedded, hidden, position_ids, packing, logit_idx, caches)

    def _step(
        self,
        embedded: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        packing: Packing,
        logit_idx: Tensor,
        caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        residual, q, k, v = self.head.before_attention(embedded, hidden, position_ids)
        mixed, keys, values = packing.attend(q, k, v, *caches)
        state = self.head.after_attention(residual, mixed)
        return F.linear(state.index_select(0, logit_idx), self.output), state, keys, values


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
