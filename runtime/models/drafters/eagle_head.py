"""The weights of a one-layer autoregressive drafting head on the target's hidden state.

One decoder layer, as in EAGLE (Li et al., 2024): entry t takes the embedding of token t+1 and the
target's final hidden state of token t, joined by a linear layer, and yields a hidden state from which
the target's own output layer predicts token t+2. Taken over from EAGLE-3 (Li et al., 2025): training on
chained steps with the head's own states, and a reduced draft vocabulary. Not taken over: features of
several target layers, draft trees.

Invariants: the head owns neither embedding nor output layer, both are the target's; rotary position t
belongs to entry t; norms and softmax are computed as the target computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.drafters.head_file import load_weights, save_weights
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.models.rope import inverse_frequencies, rotate, rotation

_FAMILY = "eagle_head"


@dataclass(frozen=True)
class EagleHeadConfig:
    """Shape of a head; stored as JSON in the metadata of its safetensors file.

    ``target_fingerprint`` names the target whose states it was trained on.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    target_fingerprint: str

    def as_layer(self) -> LlamaConfig:
        """The head's layer as a one-layer decoder: what its KV cache and its attention need."""
        return LlamaConfig(
            architecture="LlamaForCausalLM",
            vocab_size=1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=None,
            max_position_embeddings=1,
            tie_word_embeddings=True,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
        )


class EagleHead(nn.Module):
    """See the module docstring. Attention itself is the caller's: a cache at run time, chained in training.

    Weights may be float32 under states of another dtype (training); results have the states' dtype.
    """

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.config = config

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns))

        def norm() -> nn.Parameter:
            return nn.Parameter(torch.ones(hidden))

        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.fuse = matrix(hidden, 2 * hidden)
        self.input_norm = norm()
        self.qkv = matrix((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, hidden)
        self.output = matrix(hidden, config.num_heads * config.head_dim)
        self.mlp_norm = norm()
        self.gate_up = matrix(2 * wide, hidden)
        self.down = matrix(hidden, wide)
        self.final_norm = norm()
        self.register_buffer(
            "_frequencies", inverse_frequencies(config.as_layer()), persistent=False
        )
        self._frequencies: Tensor
        self._packed: dict[str, Linear] = {}

    def prepack(self) -> None:
        """Lay the matrices out for small batches; packed [N, H] states only from here on."""
        matrices = {name: p.detach() for name, p in self.named_parameters() if p.ndim == 2}
        self._packed = {name: Linear(matrix) for name, matrix in matrices.items()}

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        if name in self._packed:
            return self._packed[name](x)
        matrix: Tensor = getattr(self, name)
        return F.linear(x, matrix.to(x.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self.config.rms_norm_eps)

    def before_attention(
        self, embedding: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual [..., H] and rotated q [..., heads, D], k, v [..., kv_heads, D].

        ``embedding`` and ``hidden`` [..., T, H] are of the next token and of this one; ``positions``
        [T] are the entries' own.
        """
        joined = torch.cat(
            [self._norm(embedding, self.embedding_norm), self._norm(hidden, self.hidden_norm)], -1
        )
        residual = self._multiply(joined, "fuse")
        qkv = self._multiply(self._norm(residual, self.input_norm), "qkv")
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        q, k, v = qkv.unflatten(-1, (-1, self.config.head_dim)).split(
            (heads, kv_heads, kv_heads), -2
        )
        cos, signed_sin = rotation(positions, self._frequencies, q.dtype)
        return residual, rotate(q, cos, signed_sin), rotate(k, cos, signed_sin), v

    def after_attention(self, residual: Tensor, attention: Tensor) -> Tensor:
        """Hidden state [..., H] that the output layer reads and that the next chained step takes."""
        x = residual + self._multiply(attention, "output")
        gate, up = self._multiply(self._norm(x, self.mlp_norm), "gate_up").chunk(2, -1)
        x = x + self._multiply(F.silu(gate) * up, "down")
        return self._norm(x, self.final_norm)


def save_head(path: Path, head: EagleHead, draft_to_target: Tensor) -> None:
    """Write weights and the map of draft ids [V_d]."""
    save_weights(path, _FAMILY, head.config, head, draft_to_target)


def load_head(path: Path, dtype: torch.dtype = torch.float32) -> tuple[EagleHead, Tensor]:
    """A head, frozen, and its map of draft ids (int64 [V_d]); raises as ``load_weights`` does."""
    return load_weights(path, _FAMILY, lambda config: EagleHead(EagleHeadConfig(**config)), dtype)
