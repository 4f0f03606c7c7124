"""Sampling text from the target: many rows in lockstep, one captured graph per decode step.

Invariants: all rows stand at the same position; a row's forced tokens (≥ 0) win over sampled ones;
text of the assistant is sampled at temperature 1, text of the user at ``user_temperature``, because an
unconditioned user turn at temperature 1 soon stops resembling a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_av.runtime.models.rope import rotate, rotation

from .target import FrozenTarget, after_attention, before_attention


@dataclass(slots=True, frozen=True)
class ChatMarks:
    """Token ids that open and close a turn; ``assistant`` is the first of the speaker's name."""

    turn_start: int
    turn_end: int
    assistant: int
    name_length: int


class Decoder:
    """A lockstep sampler of ``batch`` rows and ``capacity`` positions."""

    def __init__(
        self,
        target: FrozenTarget,
        marks: ChatMarks,
        *,
        batch: int,
        capacity: int,
        user_temperature: float,
        seed: int,
    ) -> None:
        config, device = target.config, target.device
        self._target, self._marks, self._capacity = target, marks, capacity
        self._user_scale = 1.0 / user_temperature
        cache = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        self._keys = torch.zeros(cache, dtype=target.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        angle = torch.arange(capacity, device=device).float()[:, None] * target.frequencies
        self._table = torch.stack([angle.cos(), angle.sin()], 1)
        self._forced = torch.full((batch, capacity), -1, dtype=torch.int64, device=device)
        self._text = torch.zeros_like(self._forced)
        self._token = torch.zeros(batch, dtype=torch.int64, device=device)
        self._is_assistant = torch.zeros(batch, dtype=torch.bool, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._seed = torch.full((1,), seed, dtype=torch.int64, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._graph: torch.cuda.CUDAGraph | None = None
        if target.device.type == "cuda":
            self._before = torch.compile(before_attention)
            self._after = torch.compile(after_attention)
            self._capture()
        else:
            self._before, self._after = before_attention, after_attention

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            self._step()
            self._step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph), torch.no_grad():
            self._step()

    @torch.no_grad()
    def generate(self, forced: Tensor) -> Tensor:
        """Text [batch, capacity] int64 that continues ``forced`` [batch, capacity] (−1 = sample)."""
        self._forced.copy_(forced)
        self._token.copy_(self._forced[:, 0])
        self._text[:, 0] = self._token
        self._is_assistant.zero_()
        self._position.zero_()
        for _ in range(self._capacity - 1):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
        return self._text

    def _step(self) -> None:
        """Take the token at ``_position``, write the one behind it."""
        target, eps = self._target, self._target.config.rms_norm_eps
        x = target.embedding[self._token]
        for index, layer in enumerate(target.layers):
            qkv = self._before(x, layer, eps)
            x = self._after(x, self._attend(index, qkv), layer, eps)
        hidden = F.rms_norm(x, x.shape[-1:], target.final_norm, eps)
        scale = torch.where(self._is_assistant, 1.0, self._user_scale)
        sampled = self._draw(hidden @ target.output_rows.T, scale)
        self._position.add_(1).clamp_(max=self._capacity - 1)
        forced = self._forced.index_select(1, self._position)[:, 0]
        token = torch.where(forced >= 0, forced, sampled)
        is_speaker = self._token == self._marks.turn_start
        self._is_assistant.copy_(
            torch.where(is_speaker, token == self._marks.assistant, self._is_assistant)
        )
        self._token.copy_(token)
        self._text.index_copy_(1, self._position, token[:, None])

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        """Attention output [batch, heads·D] at the current position; writes the cache."""
        config, keys, values = self._target.config, self._keys[index], self._values[index]
        batch, heads, kv_heads = qkv.shape[0], config.num_heads, config.num_kv_heads
        head_dim, group = config.head_dim, heads // kv_heads
        if qkv.is_cuda:
            import triton

            from .kernels import decode_attention, rotate_and_store

            q = torch.empty(batch, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
            out = torch.empty_like(q)
            rotate_and_store[(batch,)](
                qkv, self._table, self._position, q, keys, values, self._capacity,
                NUM_HEADS=heads, NUM_KV_HEADS=kv_heads,
                HALF=head_dim // 2,
                BLOCK=triton.next_power_of_2(heads + 2 * kv_heads),
                num_warps=2,
            )  # fmt: skip
            decode_attention[(batch * kv_heads,)](
                q, keys, values, out, self._position, self._capacity, head_dim**-0.5,
                GROUP=group, D=head_dim, BLOCK=64, num_warps=2, num_stages=3,
            )  # fmt: skip
            return out
        parts = qkv.unflatten(-1, (-1, head_dim))
        cos, signed_sin = rotation(self._position, self._target.frequencies, qkv.dtype)
        q, k, v = parts.split((heads, kv_heads, kv_heads), -2)
        q, k = rotate(q, cos, signed_sin), rotate(k, cos, signed_sin)
        keys.index_copy_(2, self._position, k[:, :, None])
        values.index_copy_(2, self._position, v[:, :, None])
        live = int(self._position) + 1
        grouped = q.reshape(batch, kv_heads, group, head_dim)
        attention = F.scaled_dot_product_attention(grouped, keys[:, :, :live], values[:, :, :live])
        return attention.reshape(batch, -1)

    def _draw(self, logits: Tensor, scale: Tensor) -> Tensor:
        if logits.is_cuda:
            from .kernels import gumbel_argmax

            out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
            self._seed.add_(1)
            gumbel_argmax[(logits.shape[0],)](
                logits, scale, self._seed, out, logits.shape[1], BLOCK=1024, num_warps=4
            )
            return out
        probabilities = (logits.float() * scale[:, None]).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]
