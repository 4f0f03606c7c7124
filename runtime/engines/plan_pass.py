"""A packed batch through a plan: from rows in any order to the index inputs that an exported network takes.

Packed layout of a plan: T tokens in the order of the cache's slots; slot b owns the packed rows
cu_q[b] … cu_q[b+1] − 1, an idle slot none. Attention alone is padded, to M queries a slot, right-aligned.
Invariants: a batch that would leave the cache is refused, because an engine ignores such a write silently;
tokens that only pad T belong to no slot, and their logits and states are never returned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_av.runtime.engines.plan import PassSizes, Plan
from trtllm_av.runtime.models.batch import PackedBatch


class PlanPass:
    """Logits and states of ``plan``, whose outputs are ``logits`` [N, V] and ``state_name`` [T, H]."""

    def __init__(self, plan: Plan, *, state_name: str = "hidden") -> None:
        self.plan = plan
        self._outputs = ["logits", state_name]

    def __call__(
        self,
        batch: PackedBatch,
        logit_rows: Tensor | None = None,
        per_token: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, V] of the packed rows ``logit_rows`` [N] int64 (None: all T) and states [T, H].

        ``per_token``: further inputs [T, …] by name, such as the target's ``hidden`` states. Raises
        ValueError if a row leaves the cache or two rows share a slot.
        """
        extra = per_token or {}
        num_tokens = batch.token_ids.numel()
        rows = torch.arange(num_tokens) if logit_rows is None else logit_rows
        limit = self.plan.max_row_tokens
        if limit is not None and num_tokens > limit and batch.num_rows == 1:
            return self._in_pieces(batch, rows, extra, limit)
        layout = SlotLayout(batch, self.plan.num_slots, self.plan.max_len)
        # No engine takes a size of 0.
        sizes = self.plan.sizes(PassSizes(num_tokens, layout.width, max(rows.numel(), 1)))
        feed = layout.feed(sizes) | {
            "input_ids": _padded(batch.token_ids[layout.order], sizes.num_tokens),
            "logit_idx": _padded(layout.place[rows], sizes.num_logits),
        }
        for name, value in extra.items():
            feed[name] = _padded(value[layout.order], sizes.num_tokens)
        logits, states = self.plan.run(feed, self._outputs)
        return logits[: rows.numel()], states[layout.place]

    def _in_pieces(
        self, batch: PackedBatch, rows: Tensor, per_token: Mapping[str, Tensor], limit: int
    ) -> tuple[Tensor, Tensor]:
        """A prompt that a drafter catches up with at once, ``limit`` tokens a pass; ``rows`` ascending."""
        logits: list[Tensor] = []
        states: list[Tensor] = []
        for begin in range(0, batch.token_ids.numel(), limit):
            tokens = batch.token_ids[begin : begin + limit]
            length = torch.tensor([tokens.numel()])
            piece = PackedBatch.pack(tokens, batch.slots, batch.kv_lens + begin, length)
            inside = rows[(rows >= begin) & (rows < begin + limit)] - begin
            part = {name: value[begin : begin + limit] for name, value in per_token.items()}
            piece_logits, piece_states = self(piece, inside, part)
            logits.append(piece_logits)
            states.append(piece_states)
        return torch.cat(logits), torch.cat(states)


class SlotLayout:
    """A batch in the order of the cache's slots.

    ``order`` [T] int64 names the batch's token at each packed row, ``place`` [T] is its inverse; ``width`` is
    the longest row.
    """

    def __init__(self, batch: PackedBatch, num_slots: int, max_len: int) -> None:
        """Raises ValueError if a row leaves the cache or two rows share a slot."""
        slots, lengths = batch.slots, batch.lengths
        reach = int((batch.kv_lens + lengths).max())
        if reach > max_len:
            raise ValueError(f"a row reaches {reach} tokens, but the KV cache holds {max_len}")
        is_inside = bool(((slots >= 0) & (slots < num_slots)).all())
        if not is_inside or slots.unique().numel() != slots.numel():
            raise ValueError(
                f"slots {slots.tolist()} must be distinct and below num_slots={num_slots}"
            )
        rows = slots.argsort()
        row_of_token = rows.repeat_interleave(lengths[rows])
        first = lengths[rows].cumsum(0) - lengths[rows]
        offset = torch.arange(row_of_token.numel()) - first.repeat_interleave(lengths[rows])
        self.order = batch.cu_seqlens[row_of_token] + offset
        self.place = self.order.argsort()
        self._positions = batch.positions[self.order]
        self._lengths = torch.zeros(num_slots, dtype=torch.int64).index_copy(0, slots, lengths)
        self._starts = torch.zeros(num_slots, dtype=torch.int64).index_copy(0, slots, batch.kv_lens)
        self._token_slots = slots[row_of_token]
        self.width = int(self._lengths.max())

    def feed(self, sizes: PassSizes) -> dict[str, Tensor]:
        """``position_ids``, ``cu_q``, ``kv_write``, ``kv_len``, ``pad_idx`` and ``pack_idx``."""
        ends = self._lengths.cumsum(0)
        width = sizes.width
        pad = (ends[:, None] - width + torch.arange(width)).clamp_min(0)
        from_end = ends[self._token_slots] - torch.arange(self.order.numel())
        pack = (self._token_slots + 1) * width - from_end
        return {
            "cu_q": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
            "kv_write": self._starts.int(),
            "kv_len": (self._starts + self._lengths).int(),
            "position_ids": _padded(self._positions, sizes.num_tokens),
            "pad_idx": pad,
            "pack_idx": _padded(pack, sizes.num_tokens),
        }


def _padded(values: Tensor, length: int) -> Tensor:
    """``values`` [n, …] with zeros up to [length, …]."""
    missing = length - values.shape[0]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
