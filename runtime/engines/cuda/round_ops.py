"""The bookkeeping of a round, each step as one operation: read rows, record a draft, finish.

Objective: a round of a small model is bound by the number of kernels. Invariants: a row touches its own
slot only, equal slots are the scratch slot; nothing synchronises. On CUDA the kernels of ``round_triton``
run; the plain torch forms here define what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_av.plugins.sampling_laws import Laws, Verdict
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.step import NO_TOKEN


@dataclass(frozen=True, slots=True)
class Rows:
    """The state of R rows as a round reads it, in memory that stays where it is.

    ``integers`` [7, R] int64 (``Field``), ``floats`` [2, R] f32 (temperature, top-p), and int32 [R]:
    ``kv_lens``, ``base_lens`` (0 for dead rows) and ``draft_lens``, the planned ones within what remains.
    """

    integers: Tensor
    floats: Tensor
    kv_lens: Tensor
    base_lens: Tensor
    draft_lens: Tensor

    def __getitem__(self, field: Field) -> Tensor:
        """[R] int64."""
        return self.integers[field]

    @property
    def temperature(self) -> Tensor:
        return self.floats[0]

    @property
    def top_p(self) -> Tensor:
        return self.floats[1]


def read_rows(
    integers: Tensor, floats: Tensor, slots: Tensor, planned_lens: Tensor, rows: Rows
) -> None:
    """Fill ``rows`` from the tables [7, S+1] and [2, S+1] at ``slots`` [R]; ``planned_lens`` [R] int32."""
    if slots.is_cuda:
        from trtllm_av.runtime.engines.cuda import round_triton

        round_triton.read_rows(integers, floats, slots, planned_lens, rows)
        return
    rows.integers.copy_(integers.index_select(1, slots))
    rows.floats.copy_(floats.index_select(1, slots))
    rows.kv_lens.copy_(rows[Field.KV_LEN])
    remaining = rows[Field.REMAINING]
    rows.base_lens.copy_(remaining > 0)
    rows.draft_lens.copy_(torch.minimum(planned_lens, (remaining - 1).clamp(min=0)))


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """Where the drafts of a round are kept, [R, K, …] each; see ``RoundShape``."""

    draft_tokens: Tensor
    points: Tensor
    laws: Tensor
    logits: Tensor
    token: Tensor
    state: Tensor


def record_draft(
    record: DraftRecord,
    position: Tensor,
    laws: Laws,
    tokens: Tensor,
    draft_to_target: Tensor,
    state: Tensor,
    *,
    keeps_law: bool,
) -> None:
    """Keep the draft at ``position`` [1] int32 of all rows.

    ``tokens`` [R] are draft ids, ``state`` [R, H] what they were drawn from. ``keeps_law``: logits and
    numbers of the law too, for drafts that were sampled or are to be scored.
    """
    if tokens.is_cuda:
        from trtllm_av.runtime.engines.cuda import round_triton

        round_triton.record_draft(
            record, position, laws, tokens, draft_to_target, state, keeps_law=keeps_law
        )
        return
    at = int(position)
    target_tokens = draft_to_target[tokens]
    record.draft_tokens[:, at] = target_tokens
    record.points[:, at] = laws.point
    record.token.copy_(target_tokens)
    record.state.copy_(state)
    if keeps_law:
        record.logits[:, at] = laws.logits
        record.laws[:, :, at] = torch.stack(laws.row_numbers[1:])


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """``next_ids`` [T] int64: the token behind each packed token that is committed now, 0 elsewhere;
    ``last_positions`` [R] int32: position of the last committed token that the pass has seen."""

    next_ids: Tensor
    last_positions: Tensor


def finish_round(
    integers: Tensor,
    slots: Tensor,
    rows: Rows,
    cu_seqlens: Tensor,
    verify_lens: Tensor,
    draft_tokens: Tensor,
    laws: Laws,
    verdict: Verdict,
    tokens: Tensor,
    overlap: Tensor,
    score: tuple[Tensor, Tensor] | None,
    results: dict[str, Tensor],
) -> RoundEnd:
    """Commit a round to the table ``integers`` [7, S+1] and report it in ``results``.

    ``tokens`` [R] were drawn behind the accepted drafts of each row; NO_TOKEN is reported where the law in
    ``laws`` that they come from allows none. ``score`` are features [R, K, 1] and confidence [R, K] of the
    drafts, None if nobody asked for them. Dead rows commit nothing and emit nothing.
    """
    if slots.is_cuda:
        from trtllm_av.runtime.engines.cuda import round_triton

        return round_triton.finish_round(
            integers, slots, rows, cu_seqlens, verify_lens, draft_tokens, laws, verdict, tokens,
            overlap, score, results,
        )  # fmt: skip
    accepted_lens = verdict.accepted_lens
    is_empty = laws.maximum.index_select(0, verdict.rows) == -torch.inf
    tokens = torch.where(is_empty, NO_TOKEN, tokens)
    valid = tokens.clamp(min=0)
    emitted = (accepted_lens + 1) * rows.base_lens
    updated = rows.integers.clone()
    updated[Field.KV_LEN] += emitted
    updated[Field.LAST_TOKEN] = torch.where(rows.base_lens > 0, valid, updated[Field.LAST_TOKEN])
    updated[Field.REMAINING] -= emitted
    updated[Field.ROUNDS] += rows.base_lens
    integers.index_copy_(1, slots, updated)
    results["overlap"].copy_(overlap)
    if score is not None:
        results["features"].copy_(score[0])
        results["confidence"].copy_(score[1])
    torch.stack((rows.draft_lens, verify_lens, accepted_lens, emitted), out=results["lens"])
    results["tokens"][:, :-1] = draft_tokens
    results["tokens"][:, -1] = tokens
    next_ids = laws.point.new_zeros(laws.point.numel())
    for r in range(slots.numel()):
        length = int(rows.base_lens[r]) * (int(accepted_lens[r]) + 1)
        first = int(cu_seqlens[r])
        behind = torch.cat((draft_tokens[r, : max(length - 1, 0)], valid[r : r + 1]))
        next_ids[first : first + length] = behind[:length]
    return RoundEnd(next_ids, rows.kv_lens + accepted_lens)
