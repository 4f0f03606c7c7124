"""One round on the device: draft, score, trim, verify, accept, commit, without the host.

Objective: a round is a copy of inputs, a graph per drafted position, one graph for the rest and a copy of
results. The meaning is that of ``runtime.step``, with equal random numbers for equal keys. Invariants:
what the trim reads besides live confidences arrives in the inputs or was committed by earlier rounds,
before the first draw; position i is scored from logits that existed before x_i was drawn, and from nothing
else; drafts are drawn from and judged by one set of logits and numbers; a row that has nothing remaining is
dead: it verifies, emits and trains nothing; a draft never outgrows what remains.

Sources: Leviathan et al. 2023, Chen et al. 2023; the trim, docs/method.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trtllm_av.plugins import torch_ops, verify_pass
from trtllm_av.runtime.engines.cuda.buffers import RoundBuffers
from trtllm_av.runtime.engines.cuda.eagle import DeviceEagle
from trtllm_av.runtime.engines.cuda.round_ops import finish_round, read_rows, record_draft
from trtllm_av.runtime.engines.cuda.round_sampling import RoundSampler, Sampling
from trtllm_av.runtime.engines.cuda.state import DeviceState, Field
from trtllm_av.runtime.engines.cuda.target import DeviceTarget, PackedTokens


class DeviceRound:
    """The stages of a round over ``state``; ``load`` is a second model that runs beside every verify pass.

    ``is_greedy_draft``: see ``RoundSampler``.
    ``score_arguments``: clamp and temperature floor of the score, where they are not its defaults.
    """

    def __init__(
        self,
        target: DeviceTarget,
        drafter: DeviceEagle | None,
        state: DeviceState,
        *,
        num_positions: int,
        is_greedy_draft: bool = False,
        load: DeviceTarget | None = None,
        score_arguments: Mapping[str, float] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.state = state
        self.num_positions = num_positions
        self.load = load
        self.sampler = RoundSampler(
            target.config.vocab_size,
            None if drafter is None else drafter.draft_to_target,
            num_positions,
            device=target.device,
            is_greedy_draft=is_greedy_draft,
        )
        self._first_position = torch.zeros(1, device=target.device, dtype=torch.int32)
        self._score_arguments: dict[str, Any] = dict(score_arguments or {})

    def draft_first(self, buffers: RoundBuffers, sampling: Sampling, *, is_scored: bool) -> None:
        """Draft position 0 from the state that the last verify pass left."""
        assert self.drafter is not None
        buffers.scratch["position"].zero_()
        self._read(buffers)
        state = self.drafter.states.index_select(0, buffers.inputs["slots"])
        self._draw(buffers, state, sampling, is_scored=is_scored)

    def draft_next(self, buffers: RoundBuffers, sampling: Sampling, *, is_scored: bool) -> None:
        """Draft the next position, given the token drawn at the one before."""
        assert self.drafter is not None
        scratch = buffers.scratch
        state = self.drafter.step(
            scratch["token"],
            scratch["state"],
            buffers.inputs["slots"],
            scratch["kv_lens"],
            scratch["position"],
        )
        scratch["position"].add_(1)
        self._draw(buffers, state, sampling, is_scored=is_scored)

    def verify(
        self, buffers: RoundBuffers, num_tokens: int, sampling: Sampling, *, is_scored: bool
    ) -> None:
        """Trim, verify at most ``num_tokens`` packed tokens, accept, commit, and fill in the results."""
        self._read(buffers)
        rows, slots, drafts = buffers.rows, buffers.inputs["slots"], buffers.drafts
        score = self._score(buffers) if is_scored else None
        _, verify_lens, cu_seqlens, pack_index, token_ids, positions, write_offsets = (
            verify_pass.trim_and_pack(
                buffers.results["confidence"] if score is None else score[1],
                rows.draft_lens,
                rows.base_lens,
                buffers.inputs["floors"],
                buffers.inputs["budget"],
                rows[Field.LAST_TOKEN],
                drafts.draft_tokens,
                rows[Field.KV_LEN],
                slots,
                stride=1 + self.num_positions,
                capacity=num_tokens,
                slot_stride=self.target.cache.max_len,
                pad_offset=self.target.cache.num_slots * self.target.cache.max_len,
            )
        )
        batch = PackedTokens(
            token_ids,
            positions,
            write_offsets,
            slots,
            rows.kv_lens,
            cu_seqlens,
            1 + self.num_positions,
        )
        hidden = self.target.forward(batch)
        if self.load is not None:
            self.load.logits(self.load.forward(batch))
        laws = self.sampler.target_laws(self.target.logits(hidden), rows, pack_index, sampling)
        if self.drafter is None:
            verdict, tokens, overlap = self.sampler.next_tokens(
                rows, laws, pack_index, cu_seqlens, sampling
            )
        else:
            verdict, tokens, overlap = self.sampler.judge(
                buffers, rows, laws, cu_seqlens, verify_lens, sampling
            )
        end = finish_round(
            self.state.integers,
            slots,
            rows,
            cu_seqlens,
            verify_lens,
            drafts.draft_tokens,
            laws,
            verdict,
            tokens,
            overlap,
            score,
            buffers.results,
        )
        if self.drafter is not None:
            self.drafter.follow(batch, hidden, end.next_ids, verdict.rows, end.last_positions)
        if score is not None:
            self._train(buffers, score, verify_lens, verdict.accepted_lens, overlap)

    def _read(self, buffers: RoundBuffers) -> None:
        read_rows(
            self.state.integers,
            self.state.floats,
            buffers.inputs["slots"],
            buffers.inputs["draft_lens"],
            buffers.rows,
        )

    def _draw(
        self, buffers: RoundBuffers, state: Tensor, sampling: Sampling, *, is_scored: bool
    ) -> None:
        """Draw the position that ``buffers`` counts, from the drafter's ``state`` [R, H]."""
        assert self.drafter is not None
        position = buffers.scratch["position"]
        logits = self.drafter.logits(state)
        laws, tokens, needs_law = self.sampler.draft(logits, buffers.rows, position, sampling)
        record_draft(
            buffers.drafts,
            position,
            laws,
            tokens,
            self.drafter.draft_to_target,
            state,
            keeps_law=needs_law or is_scored,
        )

    def _score(self, buffers: RoundBuffers) -> tuple[Tensor, Tensor]:
        """Features [R, K, 1] and confidence [R, K] of all drafts at once, from the logits that they were drawn
        from: each is a function of what existed before its token, whenever it is computed."""
        assert self.drafter is not None
        score: tuple[Tensor, Tensor] = torch_ops.score_drafts(
            buffers.scratch["logits"],
            buffers.rows.temperature,
            buffers.inputs["coefficients"],
            self._first_position,
            vocab_size=self.drafter.vocab_size,
            draft_lens=buffers.rows.draft_lens,
            **self._score_arguments,
        )
        return score

    def _train(
        self,
        buffers: RoundBuffers,
        score: tuple[Tensor, Tensor],
        verify_lens: Tensor,
        accepted_lens: Tensor,
        overlap: Tensor,
    ) -> None:
        """Statistics of all live rows; the host takes out what a stop leaves behind."""
        draft_lens = buffers.scratch["draft_lens"]
        features, confidence = score
        labels = torch_ops.label_drafts(
            draft_lens,
            verify_lens,
            accepted_lens,
            draft_lens,  # nothing is labelled behind them in any case
            overlap,
            num_positions=self.num_positions,
            confidence=confidence,
        )
        statistics = torch_ops.accumulate_statistics(
            features, labels, buffers.inputs["coefficients"]
        )
        buffers.results["statistics"].copy_(statistics)
