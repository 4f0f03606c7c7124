"""Drafting with a one-layer head on the target's hidden state, whose weights are in ``eagle_head``.

Sources: EAGLE (Li et al., 2024) and, for chained training and the reduced draft vocabulary, EAGLE-3
(Li et al., 2025); ``eagle_head`` says what is not taken over.

Entry t of a slot stands for the committed tokens t and t + 1: it takes the target's final hidden state of
token t and the embedding of token t + 1, and its output predicts token t + 2. Invariants: entries of
committed tokens are computed from the target's hidden states, also where a draft of the same token was
computed from the head's own before; entries written while drafting are overwritten by the next round;
the target's hidden states are kept for every position, so that a slot may stay behind for any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.models.attention import plan_attention
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, load_head, target_fingerprint
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.params import SpeculativeConfig

# Longest pass of one row that catches up: bounds the attention mask.
_CHUNK = 512
#: Heads that come with this package, by the fingerprint of their target.
PACKAGED_HEADS = {"9645f96f8a509d86": "smollm2-135m-instruct-eagle.safetensors"}


class EagleDrafter:
    """See the module docstring; ``num_slots`` and ``max_len`` are those of the target's cache."""

    name = "eagle"
    is_block = False
    reads_hidden = True

    def __init__(
        self,
        head: EagleHead,
        draft_to_target: Tensor,
        target: LoadedModel,
        *,
        num_slots: int,
        max_len: int,
        max_draft_len: int,
    ) -> None:
        """``draft_to_target`` [V_d] int64 names the target token of each row of the output layer."""
        self.max_draft_len = max_draft_len
        sizes = (head.config.num_heads, head.config.intermediate_size, draft_to_target.numel())
        self.cost_key = f"{self.name} {','.join(map(str, sizes))}"
        self.draft_to_target: Tensor | None = draft_to_target
        self._head, self._layer, self._model = head, head.config.as_layer(), target.model
        self._output = Linear(_output_rows(target, draft_to_target))
        self._cache = KVCache(self._layer, num_slots, max_len, target.dtype)
        self._hidden = torch.zeros(num_slots, max_len, head.config.hidden_size, dtype=target.dtype)
        self._held_lens = torch.zeros(num_slots, dtype=torch.int64)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._first_position = torch.empty(0, dtype=torch.int64)
        self._state = torch.empty(0)

    def reset(self, slot: int) -> None:
        self._held_lens[slot] = 0

    def observe(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        self._hidden[slots.repeat_interleave(lengths), _positions(starts, lengths)] = hidden

    def lag(self, context: DraftContext) -> Tensor:
        # One entry less than tokens: the last token's entry needs the one after it.
        return (context.lens - 1 - self._held_lens[context.slots]).clamp_min(0)

    def refresh(self, context: DraftContext) -> None:
        rows = (self.lag(context) > 0).nonzero().view(-1)
        if rows.numel():
            self._catch_up(DraftContext(context.slots[rows], context.lens[rows], context.history))

    def start(self, context: DraftContext) -> Tensor:
        self._slots, self._first_position = context.slots, context.lens - 1
        self._state = self._catch_up(context)
        return self._output(self._state)

    def step(self, position: int, tokens: Tensor) -> Tensor:
        batch = PackedBatch.pack(
            tokens,
            self._slots,
            self._first_position + (position - 1),
            torch.ones_like(self._slots),
        )
        self._state = self._feed(batch, self._state)
        return self._output(self._state)

    def _catch_up(self, context: DraftContext) -> Tensor:
        """Compute the entries that are missing; head states [R, H] of each row's last one.

        The last entry is computed in any case, because drafting starts from its state.
        """
        ends = context.lens - 1
        starts = self._held_lens[context.slots].minimum(ends - 1)
        state = self._state
        for rows, first, last in _passes(starts, ends, self.max_draft_len + 1):
            slots, lengths = context.slots[rows], last - first
            token_slots, positions = slots.repeat_interleave(lengths), _positions(first, lengths)
            batch = PackedBatch.pack(
                context.history[token_slots, positions + 1], slots, first, lengths
            )
            state = self._feed(batch, self._hidden[token_slots, positions])
            state = state[batch.cu_seqlens[1:] - 1]
        self._held_lens[context.slots] = ends
        return state

    @torch.inference_mode()
    def _feed(self, batch: PackedBatch, hidden: Tensor) -> Tensor:
        """Head states [T, H] of the entries of ``batch``, whose token ids are those one position on."""
        plan = plan_attention(batch, self._layer, self._cache)
        residual, q, k, v = self._head.before_attention(
            self._model.embed(batch.token_ids), hidden, batch.positions
        )
        self._cache.write(0, plan.token_slots, batch.positions, k, v)
        keys, values = self._cache.read(0, plan.rows, plan.reach)
        return self._head.after_attention(residual, plan.attend(q, keys, values))


def _positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """[T] int64: ``lengths[r]`` positions from ``starts[r]`` on, row after row."""
    ends = lengths.cumsum(0)
    offsets = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + offsets


def _passes(starts: Tensor, ends: Tensor, longest: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Split gaps [R] into passes (rows, starts, ends): long ones row by row, then all rows together.

    Attention pads rows to the longest, so a gap beyond ``longest`` is fed in chunks of its own, except
    for its last entry.
    """
    starts = starts.clone()
    for row in (ends - starts > longest).nonzero().view(-1):
        rest = ends[row] - 1
        while starts[row] < rest:
            end = torch.minimum(starts[row] + _CHUNK, rest)
            yield row[None], starts[row][None].clone(), end[None]
            starts[row] = end
    yield torch.arange(starts.numel()), starts, ends


def _output_rows(target: LoadedModel, draft_to_target: Tensor) -> Tensor:
    """Rows [V_d, H] of the target's output layer."""
    if target.config.tie_word_embeddings:
        return target.model.embed(draft_to_target)
    unit = torch.eye(target.config.hidden_size, dtype=target.dtype)
    return target.model.logits(unit).T[draft_to_target].contiguous()


def has_packaged_head(target: LoadedModel) -> bool:
    """True if this package ships weights that were trained for ``target``."""
    return target_fingerprint(target.model.embed, target.config.vocab_size) in PACKAGED_HEADS


def create_eagle(config: SpeculativeConfig, target: LoadedModel, cache: KVCache) -> EagleDrafter:
    """Factory for method ``eagle``; ``model`` is a file of weights, None the packaged ones.

    Raises UsageError for a setting that it cannot honour or if no packaged head fits the target,
    CheckpointError for weights that cannot be read or were trained for another target.
    """
    if config.skip_layers is not None:
        raise UsageError(
            f"skip_layers={config.skip_layers}: only method 'layer_skip' has it; remove it"
        )
    fingerprint = target_fingerprint(target.model.embed, target.config.vocab_size)
    if config.model is not None:
        head, draft_to_target = load_head(Path(config.model), target.dtype)
        if head.config.target_fingerprint != fingerprint:
            raise CheckpointError(
                f"{config.model!r} was trained for another target; train a head for this one with "
                "benchmarks/train_drafter.py"
            )
    elif fingerprint in PACKAGED_HEADS:
        folder = Path(__file__).with_name("weights")
        head, draft_to_target = load_head(folder / PACKAGED_HEADS[fingerprint], target.dtype)
    else:
        raise UsageError(
            "method 'eagle' has no packaged head for this target; set model to a file of weights"
        )
    head.prepack()
    return EagleDrafter(
        head,
        draft_to_target,
        target,
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        max_draft_len=config.num_speculative_tokens,
    )
