"""Drawing and judging on the device: laws of drafts and of the target, acceptance, the next token.

Invariants: the meaning is that of ``runtime.acceptance`` with the random numbers of
``runtime.random_source``; a draft is judged by the logits and numbers that it was drawn from; where all
rows of a batch are greedy no vocabulary is read twice.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from trtllm_av.plugins import sampling_ops
from trtllm_av.plugins.sampling_laws import Laws, Verdict
from trtllm_av.runtime.engines.cuda.buffers import RoundBuffers
from trtllm_av.runtime.engines.cuda.round_ops import Rows
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.random_source import Purpose


class Sampling(Enum):
    """How the rows of a batch draw: all greedy, some with a temperature, some with top-k or top-p too."""

    GREEDY = "greedy"
    PLAIN = "plain"
    CUT = "cut"


class RoundSampler:
    """``draft_to_target`` [V_d] names the target ids of a drafter, None without one; ``is_greedy_draft``:
    drafts are its likeliest tokens whatever the temperature."""

    def __init__(
        self,
        vocab_size: int,
        draft_to_target: Tensor | None,
        num_positions: int,
        *,
        device: torch.device,
        is_greedy_draft: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_positions = num_positions
        self._is_greedy_draft = is_greedy_draft
        self._draft_to_target = draft_to_target
        self._target_to_draft: Tensor | None = None
        if draft_to_target is not None:
            self._target_to_draft = sampling_ops.inverse_map(draft_to_target, vocab_size)
        self._columns = torch.arange(num_positions, device=device)

    def draft(
        self, logits: Tensor, rows: Rows, position: Tensor, sampling: Sampling
    ) -> tuple[Laws, Tensor, bool]:
        """Laws of ``logits`` [R, V_d], tokens [R] drawn for ``position`` [1], and whether the laws are needed
        to judge them: greedy drafts need their first maximum only."""
        is_greedy = self._is_greedy_draft or sampling is Sampling.GREEDY
        temperature = torch.zeros_like(rows.temperature) if is_greedy else rows.temperature
        laws = sampling_ops.row_statistics(logits, temperature, logits.shape[1])
        if is_greedy:
            return laws, laws.point, False
        if sampling is Sampling.CUT:
            laws = sampling_ops.cut_thresholds(laws, rows[Field.TOP_K], rows.top_p)
        return laws, sampling_ops.draw(laws, self._uniforms(rows, position, Purpose.DRAFT)), True

    def _uniforms(self, rows: Rows, positions: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """Random numbers of this round; ``positions`` broadcasts against the rows' last dimension."""
        return sampling_ops.keyed_uniforms(
            rows[Field.SEED],
            rows[Field.REQUEST],
            rows[Field.ROUNDS],
            positions,
            int(purpose) if isinstance(purpose, Purpose) else purpose,
        )

    def target_laws(
        self, logits: Tensor, rows: Rows, pack_index: Tensor, sampling: Sampling
    ) -> Laws:
        """The laws of all packed rows, ``logits`` [T, V]; those behind the batch's end mean nothing."""
        row_of_token = self._row_of_token(pack_index)
        temperature = rows.temperature.index_select(0, row_of_token)
        laws = sampling_ops.row_statistics(logits, temperature, self._vocab_size)
        if sampling is Sampling.CUT:
            top_k = rows[Field.TOP_K].index_select(0, row_of_token)
            top_p = rows.top_p.index_select(0, row_of_token)
            laws = sampling_ops.cut_thresholds(laws, top_k, top_p)
        return laws

    def _row_of_token(self, pack_index: Tensor) -> Tensor:
        """[T] int64 row of each packed token, 0 behind the batch's end."""
        return (pack_index.clamp(min=0) // (1 + self._num_positions)).long()

    def next_tokens(
        self,
        rows: Rows,
        laws: Laws,
        pack_index: Tensor,
        cu_seqlens: Tensor,
        sampling: Sampling,
    ) -> tuple[Verdict, Tensor, Tensor]:
        """As ``judge`` where nothing is ever drafted."""
        verdict = _nothing_drafted(cu_seqlens, len(laws))
        tokens = laws.point
        if sampling is not Sampling.GREEDY:
            uniforms = self._uniforms(rows, verdict.accepted_lens, Purpose.BONUS)
            tokens = sampling_ops.draw(
                laws, uniforms.index_select(0, self._row_of_token(pack_index))
            )
        overlap = torch.full(verdict.rows.shape, torch.nan, device=tokens.device)
        return verdict, tokens.index_select(0, verdict.rows), overlap

    def judge(
        self,
        buffers: RoundBuffers,
        rows: Rows,
        laws: Laws,
        cu_seqlens: Tensor,
        verify_lens: Tensor,
        sampling: Sampling,
    ) -> tuple[Verdict, Tensor, Tensor]:
        """The verdict, the next token of each row [R] and the overlap [R]."""
        is_greedy = sampling is Sampling.GREEDY
        draft_laws = self._draft_laws(buffers, is_greedy=is_greedy or self._is_greedy_draft)
        if is_greedy:
            uniforms = torch.zeros(
                draft_laws.point.view(-1, self._num_positions).shape,
                dtype=torch.float64,
                device=laws.point.device,
            )
        else:
            uniforms = sampling_ops.keyed_uniforms(
                rows[Field.SEED][:, None],
                rows[Field.REQUEST][:, None],
                rows[Field.ROUNDS][:, None],
                self._columns,
                int(Purpose.ACCEPT),
            )
        verdict = sampling_ops.accept(
            laws,
            cu_seqlens[:-1],
            draft_laws,
            buffers.scratch["draft_tokens"],
            rows.draft_lens,
            verify_lens,
            uniforms,
            self._target_to_draft,
        )
        if is_greedy:
            tokens, overlap = self._greedy_next(laws, draft_laws, verdict)
        else:
            purpose = torch.where(verdict.is_rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))
            tokens, overlap = sampling_ops.draw_next(
                laws,
                draft_laws,
                verdict,
                self._uniforms(rows, verdict.accepted_lens, purpose),
                self._target_to_draft,
            )
        return verdict, tokens, overlap

    def _draft_laws(self, buffers: RoundBuffers, *, is_greedy: bool) -> Laws:
        """The laws that this round's drafts were drawn from, row r·K + i for draft i."""
        scratch = buffers.scratch
        points = scratch["points"].view(-1)
        columns = scratch["logits"].shape[-1]
        logits = scratch["logits"].view(points.numel(), columns)
        if is_greedy:
            zeros = torch.zeros(points.shape, device=points.device)
            return Laws(logits, columns, points, zeros, zeros, zeros, zeros + 1.0)
        return Laws(logits, columns, points, *scratch["laws"].view(4, -1).unbind())

    def _greedy_next(self, laws: Laws, draft_laws: Laws, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """``draw_next`` where all laws are one-hot: no vocabulary is read."""
        assert self._draft_to_target is not None
        tokens = laws.point.index_select(0, verdict.rows)
        is_known = (verdict.draft_rows >= 0) & ~verdict.is_rejected
        points = draft_laws.point.index_select(0, verdict.draft_rows.clamp(min=0))
        # Where nothing was drafted the memory holds anything.
        drafted = torch.where(is_known, points, 0)
        is_same = self._draft_to_target[drafted] == tokens
        return tokens, torch.where(is_known, is_same.float(), torch.nan)


def _nothing_drafted(cu_seqlens: Tensor, num_tokens: int) -> Verdict:
    """The verdict of a pass without drafts: the token behind each row's only one."""
    rows = cu_seqlens[:-1].long().clamp(max=num_tokens - 1)
    none = torch.full_like(rows, -1)
    return Verdict(torch.zeros_like(rows, dtype=torch.int32), rows, none, none >= 0)
