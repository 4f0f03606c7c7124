"""Drafting with one module per depth, whose weights are in ``mtp_head``.

Source: multi-token prediction of DeepSeek-V3 (DeepSeek-AI, 2024); ``mtp_head`` says what is taken over and
what is not.

Invariants: an entry that is held was computed from committed tokens and the target's hidden states only;
module k runs behind module k − 1 in the same round, so what it reads of it is never of a rejected draft;
a module that no round reached for a while catches up when it is reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import DraftContext, NoConfidenceHead
from trtllm_av.runtime.models.drafters.catch_up import catch_up_passes
from trtllm_av.runtime.models.drafters.head_file import open_head
from trtllm_av.runtime.models.drafters.head_pass import head_pass
from trtllm_av.runtime.models.drafters.hidden_states import HiddenStates, packed_positions
from trtllm_av.runtime.models.drafters.mtp_head import MTPHead, load_mtp_head
from trtllm_av.runtime.models.drafters.reduced_vocabulary import output_rows
from trtllm_av.runtime.models.drafters.state_drafter import StateDrafter
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.linear import Linear
from trtllm_av.runtime.params import SpeculativeConfig


class MTPDrafter(NoConfidenceHead, StateDrafter):
    """See the module docstring; ``num_slots`` and ``max_len`` are those of the target's cache.

    The states of every module are kept for every position, [num_slots, max_len, H] a module.
    """

    name = "mtp"
    is_block = False

    _context = DraftContext(torch.empty(0), torch.empty(0), torch.empty(0))
    _drafts = torch.empty(0, dtype=torch.int64)

    def __init__(
        self,
        head: MTPHead,
        draft_to_target: Tensor,
        target: LoadedModel,
        *,
        num_slots: int,
        max_len: int,
        max_draft_len: int,
    ) -> None:
        """``draft_to_target`` [V_d] int64 names the target token of each row of the output layer."""
        layer = head.config.layer
        super().__init__(
            layer,
            draft_to_target,
            target.dtype,
            num_slots=num_slots,
            max_len=max_len,
            max_draft_len=max_draft_len,
            num_modules=max_draft_len,
        )
        self._head, self._layer, self._model = head, layer.as_layer(), target.model
        self._output = Linear(output_rows(target, draft_to_target))
        self._caches = [
            KVCache(self._layer, num_slots, max_len, target.dtype) for _ in range(max_draft_len)
        ]
        #: What module k reads; the first is the target's.
        self._inputs = [self._hidden] + [
            HiddenStates(num_slots, max_len, layer.hidden_size, target.dtype)
            for _ in range(max_draft_len - 1)
        ]

    def start(self, context: DraftContext) -> Tensor:
        self._context = context
        self._drafts = torch.empty(context.slots.numel(), 0, dtype=torch.int64)
        return self._output(self._run(context, 0, context.lens - 1, self._drafts))

    def step(self, position: int, tokens: Tensor) -> Tensor:
        self._drafts = torch.cat([self._drafts, tokens[:, None]], 1)
        context = self._context
        return self._output(self._run(context, position, context.lens - 1, self._drafts))

    def _hold(self, context: DraftContext) -> None:
        no_drafts = torch.empty(context.slots.numel(), 0, dtype=torch.int64)
        for depth, ends in enumerate(self._committed(context.lens)):
            rows = (ends > self._held[depth, context.slots]).nonzero().view(-1)
            if rows.numel():
                part = DraftContext(context.slots[rows], context.lens[rows], context.history)
                self._run(part, depth, ends[rows], no_drafts[rows])

    def _run(self, context: DraftContext, depth: int, ends: Tensor, drafts: Tensor) -> Tensor:
        """Compute module ``depth`` up to ``ends`` [R]; states [R, H] of the last entries.

        ``drafts`` [R, depth] are the tokens behind the committed ones that these entries take.
        """
        committed = self._committed(context.lens)[depth]
        starts = self._held[depth, context.slots].minimum(ends - 1)
        state, last_rows = torch.empty(0), torch.empty(0)
        for rows, first, last in catch_up_passes(starts, ends, self.max_draft_len + depth + 1):
            slots, lengths = context.slots[rows], last - first
            row_of = rows.repeat_interleave(lengths)
            at = packed_positions(first, lengths)
            taken, lens = at + 1 + depth, context.lens[row_of]
            tokens = context.history[context.slots[row_of], taken.minimum(lens - 1)]
            mine = (taken >= lens).nonzero().view(-1)
            tokens[mine] = drafts[row_of[mine], (taken - lens)[mine]]
            batch = PackedBatch.pack(tokens, slots, first, lengths)
            hidden = self._inputs[depth].read(context.slots[row_of], at)
            state = head_pass(
                self._head.at_depth(depth),
                self._layer,
                self._caches[depth],
                batch,
                self._model.embed(tokens),
                hidden,
            )
            if depth + 1 < self.max_draft_len:
                self._inputs[depth + 1].store(slots, first, batch.cu_seqlens, state)
            last_rows = batch.cu_seqlens[1:] - 1
        self._held[depth, context.slots] = committed.minimum(ends)
        return state[last_rows]


def create_mtp(config: SpeculativeConfig, target: LoadedModel, cache: KVCache) -> MTPDrafter:
    """Factory for method ``mtp``; ``model`` is a file of weights, none are packaged.

    Raises UsageError for a setting that it cannot honour, CheckpointError for weights that cannot be
    read or were trained for another target.
    """
    head, draft_to_target = open_head(config, target, MTPDrafter.name, {}, load_mtp_head)
    if config.num_speculative_tokens > head.config.num_modules:
        raise UsageError(
            f"num_speculative_tokens={config.num_speculative_tokens}: this head has "
            f"{head.config.num_modules} modules, one per position; lower it"
        )
    head.prepack()
    return MTPDrafter(
        head,
        draft_to_target,
        target,
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        max_draft_len=config.num_speculative_tokens,
    )
