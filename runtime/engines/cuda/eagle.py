"""The one-layer drafting head on the device: its entries follow the target's verify passes.

Entry t takes the target's hidden state of token t and the embedding of token t + 1, as in
``runtime.models.drafters.eagle``. Every verify pass is followed by ``follow``, which computes keys and
values of the entries that became known from the pass's own hidden states; so the head's cache never lags,
no hidden state is kept, and a draft starts with the state that ``follow`` left. Only the entry that the
next draft starts from goes through the rest of the layer.

Invariants: entries of committed tokens come from the target's hidden states; what ``follow`` writes for
rejected tokens, and what drafting writes, is overwritten before anything reads it; static shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.plugins import attention
from trtllm_av.runtime.engines.cuda.fused import (
    add_rms_norm,
    join_norms,
    rotate_and_store,
    rotation_table,
    silu_and_multiply,
)
from trtllm_av.runtime.engines.cuda.target import DeviceTarget, PackedTokens, SlotCache
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead
from trtllm_av.runtime.models.rope import inverse_frequencies

_MAX_ROWS = 1 << 16  # of one pass: prompts of a prefill pass are rows too


class DeviceEagle:
    """``head`` drafts ids of ``draft_to_target`` [V_d] for ``target``; cache and state per slot are here."""

    name = "eagle"

    def __init__(self, head: EagleHead, draft_to_target: Tensor, target: DeviceTarget) -> None:
        device, dtype = target.device, target.dtype
        config = head.config
        layer = config.as_layer()
        num_slots, max_len = target.cache.num_slots, target.cache.max_len
        self.draft_to_target = draft_to_target.to(device)
        self.cost_key = (
            f"{self.name} {config.num_heads},{config.intermediate_size},{draft_to_target.numel()}"
        )
        self._target = target
        self._eps = config.rms_norm_eps
        self._weights = {
            name: value.detach().to(device, dtype).contiguous()
            for name, value in head.named_parameters()
        }
        self._output = target.weights.head.weight[self.draft_to_target].contiguous()
        self._cache = SlotCache(layer, num_slots, max_len, device, dtype)
        self._table = rotation_table(max_len, inverse_frequencies(layer).to(device), dtype)
        # One query a row, also where a request bucket is larger than the cache.
        self._each = torch.arange(_MAX_ROWS + 1, device=device, dtype=torch.int32)
        self.states = torch.zeros(num_slots + 1, config.hidden_size, device=device, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        """Columns of the draft logits."""
        return self._output.shape[0]

    def logits(self, state: Tensor) -> Tensor:
        """Draft logits [R, V_d] of the token behind the entries of ``state`` [R, H]."""
        return F.linear(state, self._output)

    def follow(
        self,
        batch: PackedTokens,
        hidden: Tensor,
        next_ids: Tensor,
        last_rows: Tensor,
        last_positions: Tensor,
    ) -> None:
        """Take over a target pass: ``hidden`` [T, H] of ``batch`` and the tokens behind, ``next_ids`` [T].

        ``last_rows`` [R] int64: each row's last packed token that is committed, and ``last_positions`` [R]
        int32 its position; the entry there becomes the state that the row's next draft starts from.
        """
        residual, queries = self._before_attention(
            next_ids, hidden, batch.positions, batch.write_offsets
        )
        state = self._after_attention(
            residual.index_select(0, last_rows),
            queries.index_select(0, last_rows),
            batch.slots,
            last_positions,
        )
        self.states.index_copy_(0, batch.slots, state)

    def step(
        self, tokens: Tensor, state: Tensor, slots: Tensor, kv_lens: Tensor, offset: Tensor
    ) -> Tensor:
        """State [R, H] after one more drafted token of each row.

        ``tokens`` [R] int64 drafted last, ``state`` [R, H] that they were drawn from, ``kv_lens`` [R]
        int32 of the target, ``offset`` [1] int32: how many of this round's drafts came before.
        """
        at = kv_lens + offset
        positions = at.long()
        residual, queries = self._before_attention(
            tokens, state, positions, slots * self._cache.max_len + positions
        )
        return self._after_attention(residual, queries, slots, at)

    def _before_attention(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, write_offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Residual [T, H] and rotated queries [T, heads, D]; stores keys and values."""
        weights = self._weights
        joined = join_norms(
            token_ids,
            self._target.weights.embedding,
            hidden,
            (weights["embedding_norm"], weights["hidden_norm"]),
            self._eps,
        )
        residual = F.linear(joined, weights["fuse"])
        normed = add_rms_norm(residual, None, weights["input_norm"], self._eps)[1]
        qkv = F.linear(normed, weights["qkv"])
        queries = rotate_and_store(
            qkv,
            self._table,
            positions,
            write_offsets,
            self._cache.keys[0],
            self._cache.values[0],
        )
        return residual, queries

    def _after_attention(
        self, residual: Tensor, queries: Tensor, slots: Tensor, positions: Tensor
    ) -> Tensor:
        """State [R, H] of one entry a row, at ``positions`` [R] int32."""
        weights = self._weights
        mixed = torch.empty_like(queries)
        attention.attend(
            queries,
            self._cache.keys[0],
            self._cache.values[0],
            slots,
            positions,
            self._each[: slots.numel() + 1],
            1,
            mixed,
        )
        attended = F.linear(mixed.flatten(1), weights["output"])
        x, normed = add_rms_norm(residual, attended, weights["mlp_norm"], self._eps)
        inner = silu_and_multiply(F.linear(normed, weights["gate_up"]))
        return add_rms_norm(x, F.linear(inner, weights["down"]), weights["final_norm"], self._eps)[
            1
        ]
