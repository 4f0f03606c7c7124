"""Drafting with a second, smaller checkpoint of the same vocabulary.

Source: Leviathan et al. 2023, Chen et al. 2023 (speculative sampling with a draft model).
Invariants: the drafter's own KV cache holds, per slot, a known token sequence; what of it still agrees
with the committed tokens is kept, the rest is overwritten, so rejected and trimmed drafts cost nothing
and accepted ones are not computed twice. Catching up feeds several tokens of a row in one ragged pass;
a long gap (a new prompt) is a pass of its own, because attention pads rows to the longest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig

# Longest prefill pass: bounds the attention mask, [chunk, context] floats per query head of a group.
_CHUNK = 512


class DraftModel(NoConfidenceHead, ABC):
    """See the module docstring; ``num_slots`` and ``max_len`` are those of the target's cache, ``digest``
    names the checkpoint. Subclasses run it."""

    name = "draft_model"
    is_block = False
    reads_hidden = False
    draft_to_target: Tensor | None = None

    def __init__(self, digest: str, *, num_slots: int, max_len: int, max_draft_len: int) -> None:
        self.max_draft_len = max_draft_len
        self.cost_key = f"{self.name} {digest}"
        self._max_len = max_len
        self._held_tokens = torch.zeros(num_slots, max_len, dtype=torch.int64)
        self._held_lens = torch.zeros(num_slots, dtype=torch.int64)
        self._slots = torch.empty(0, dtype=torch.int64)

    def reset(self, slot: int) -> None:
        self._held_lens[slot] = 0

    def observe(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        """Hidden states are not read."""

    def lag(self, context: DraftContext) -> Tensor:
        return context.lens - self._agreed_lens(context)

    def refresh(self, context: DraftContext) -> None:
        rows = (self.lag(context) > 0).nonzero().view(-1)
        if rows.numel():
            behind = DraftContext(context.slots[rows], context.lens[rows], context.history)
            self._catch_up(behind, torch.empty(0, dtype=torch.int64))

    def start(self, context: DraftContext) -> Tensor:
        self._slots = context.slots
        return self._catch_up(context, None)

    def step(self, position: int, tokens: Tensor) -> Tensor:
        lens = self._held_lens[self._slots]
        return self._feed(
            PackedBatch.pack(tokens, self._slots, lens, torch.ones_like(lens)), logit_rows=None
        )

    def _agreed_lens(self, context: DraftContext) -> Tensor:
        """[R] int64, length of the held sequence up to its first token that is not committed."""
        held_lens = self._held_lens[context.slots]
        # All but the drafts of the last round was committed when it was fed.
        window = torch.arange(-self.max_draft_len, 0)
        positions = (held_lens[:, None] + window).clamp_min_(0)
        slots = context.slots[:, None]
        differs = self._held_tokens[slots, positions] != context.history[slots, positions]
        differs |= positions >= context.lens[:, None]
        end = held_lens[:, None]
        return torch.where(differs, positions, end).amin(1, keepdim=True).minimum(end).view(-1)

    def _catch_up(self, context: DraftContext, logit_rows: Tensor | None) -> Tensor:
        """Feed what is missing up to ``lens``; logits of each row's last token if logit_rows is None.

        At least the last token is fed, since its logits are what drafting starts from.
        """
        starts = self._agreed_lens(context).minimum(context.lens - 1)
        for row in (context.lens - starts > self.max_draft_len + 1).nonzero().view(-1).tolist():
            last = int(context.lens[row]) - 1
            for begin in range(int(starts[row]), last, _CHUNK):
                end = min(begin + _CHUNK, last)
                tokens = context.history[context.slots[row], begin:end]
                self._feed(
                    PackedBatch.pack(
                        tokens,
                        context.slots[row : row + 1],
                        torch.tensor([begin]),
                        torch.tensor([end - begin]),
                    ),
                    logit_rows=torch.empty(0, dtype=torch.int64),
                )
            starts[row] = last
        lengths = context.lens - starts
        positions = starts[:, None] + torch.arange(int(lengths.max()))
        is_missing = positions < context.lens[:, None]
        history = context.history[context.slots[:, None], positions.clamp_max_(self._max_len - 1)]
        batch = PackedBatch.pack(history[is_missing], context.slots, starts, lengths)
        if logit_rows is None:
            logit_rows = batch.cu_seqlens[1:] - 1
        return self._feed(batch, logit_rows)

    def _feed(self, batch: PackedBatch, logit_rows: Tensor | None) -> Tensor:
        """Run the draft model and note what its cache now holds."""
        slots = batch.slots.repeat_interleave(batch.lengths)
        self._held_tokens[slots, batch.positions] = batch.token_ids
        self._held_lens[batch.slots] = batch.kv_lens + batch.lengths
        return self._forward(batch, logit_rows)

    @abstractmethod
    def _forward(self, batch: PackedBatch, logit_rows: Tensor | None) -> Tensor:
        """Logits [N, V] of the packed rows ``logit_rows`` [N] (None: all), after writing the cache."""


class DraftModelDrafter(DraftModel):
    """The family on a torch module."""

    def __init__(
        self, draft: LoadedModel, *, num_slots: int, max_len: int, max_draft_len: int
    ) -> None:
        super().__init__(
            draft.digest, num_slots=num_slots, max_len=max_len, max_draft_len=max_draft_len
        )
        self._model = draft.model
        self._cache = KVCache(draft.config, num_slots, max_len, draft.dtype)

    def _forward(self, batch: PackedBatch, logit_rows: Tensor | None) -> Tensor:
        return self._model.forward(batch, self._cache, logit_rows=logit_rows).logits


def create_draft_model(
    config: SpeculativeConfig, target: LoadedModel, cache: KVCache
) -> DraftModelDrafter:
    """Factory for method ``draft_model``.

    Raises UsageError for a setting that it cannot honour, CheckpointError if the second checkpoint
    cannot be loaded or counts its tokens differently from the target.
    """
    if config.model is None:
        raise UsageError("method 'draft_model' needs model: the folder of the draft checkpoint")
    if config.skip_layers is not None:
        raise UsageError(
            f"skip_layers={config.skip_layers}: only method 'layer_skip' has it; remove it"
        )
    draft = load_checkpoint(config.model, target.dtype)
    check_vocabulary(
        draft.config.vocab_size, target.config.vocab_size, draft.tokenizer, target.tokenizer
    )
    return DraftModelDrafter(
        draft,
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        max_draft_len=config.num_speculative_tokens,
    )


def check_vocabulary(
    draft_size: int, target_size: int, draft_tokenizer: Any, target_tokenizer: Any
) -> None:
    """Raise CheckpointError unless both models mean the same by every token id, as far as is known:
    by the sizes of their vocabularies and, where both have one, their Hugging Face tokenizers."""
    if draft_size != target_size:
        raise CheckpointError(
            f"draft model has a vocabulary of {draft_size} tokens, the target of {target_size}; "
            "they must be the same"
        )
    if draft_tokenizer is None or target_tokenizer is None:
        return
    ours, theirs = draft_tokenizer.get_vocab(), target_tokenizer.get_vocab()
    if ours != theirs:
        pairs = set(ours.items()) ^ set(theirs.items())
        token, index = min(pairs, key=lambda pair: pair[1])
        raise CheckpointError(
            f"draft model and target have different tokenizers: token {index} ({token!r}) is in one "
            "of them only"
        )
