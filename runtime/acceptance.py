"""Lossless acceptance: which drafts the target takes, and the token it adds.

Rejection sampling after Leviathan et al., "Fast inference from transformers via speculative decoding",
2023, and Chen et al., "Accelerating large language model decoding with speculative sampling", 2023: a
draft x drawn from q is accepted iff u·q(x) < p(x); the first rejected one is replaced by a draw from
norm(max(0, p − q)); if none is rejected, the row behind the last verified draft gives one token more.

Invariants: only verified drafts are judged, and a draft is judged by its probabilities alone, whatever
token it is: p(x) = 0 rejects. A trimmed draft is forgotten. p and q are read from the tensors that the
draft was drawn from, in their precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_av.runtime.random_source import KeyMaker, Purpose, RandomSource
from trtllm_av.runtime.sampling import Distribution


@dataclass(slots=True)
class Acceptance:
    """Outcome of one verification, R rows.

    ``accepted_lens`` [R] int64 ≤ ``verify_lens``; ``next_tokens`` [R] int64, the token behind the
    accepted drafts; ``overlap`` [R], in the dtype of the target's laws: Σ min(p, q) at the first trimmed
    position where all verified drafts were accepted and some were trimmed, NaN elsewhere; ``overlaps``
    [R, K]: the same at every judged position (those up to the first rejection), NaN elsewhere; None unless
    asked for.
    """

    accepted_lens: Tensor
    next_tokens: Tensor
    overlap: Tensor
    overlaps: Tensor | None = None


def accept_drafts(
    target: Distribution,
    cu_seqlens: Tensor,
    draft_tokens: Tensor,
    drafts: Sequence[Distribution],
    draft_lens: Tensor,
    verify_lens: Tensor,
    keys: KeyMaker,
    source: RandomSource,
    *,
    has_overlaps: bool = False,
) -> Acceptance:
    """Judge the verified drafts of R live rows.

    ``target``: T packed rows, of which row ``cu_seqlens[r] + j`` judges draft j of row r and row
    ``cu_seqlens[r] + verify_lens[r]`` gives the bonus token; ``cu_seqlens`` [R+1]; ``draft_tokens``
    [R, K] (entries behind ``draft_lens`` are ignored); ``drafts``: per drafted position the R laws that
    its tokens were drawn from; ``draft_lens``, ``verify_lens`` [R], at most ``len(drafts)``; ``keys``
    makes the random keys of given rows and positions of this round; ``has_overlaps`` asks for those.

    Only live rows that sample may be passed (``base_lens`` 1): a dead row owns no packed row and would
    read its neighbour's. ValueError if ``cu_seqlens`` does not hold ``verify_lens + 1`` rows each.
    """
    start, verify_lens, draft_lens = cu_seqlens[:-1].long(), verify_lens.long(), draft_lens.long()
    if not torch.equal(cu_seqlens[1:] - start, verify_lens + 1):
        raise ValueError(
            f"cu_seqlens {cu_seqlens.tolist()} must give each row verify_lens + 1 = "
            f"{(verify_lens + 1).tolist()} packed rows; leave dead and prefilling rows out"
        )
    accepted_lens = _count_accepted(
        target, start, draft_tokens.long(), drafts, verify_lens, keys, source
    )
    decisive = target.rows(start + accepted_lens)  # judged the rejected draft, or gives the bonus
    next_tokens = torch.empty_like(accepted_lens)
    is_full = accepted_lens == verify_lens
    full = torch.nonzero(is_full).flatten()
    if full.numel():
        bonus_keys = keys(full, accepted_lens[full], Purpose.BONUS)
        next_tokens[full] = decisive.rows(full).draw(source, bonus_keys)
    rejected = torch.nonzero(~is_full).flatten()
    if rejected.numel():
        position = accepted_lens[rejected]
        law = residual(decisive.rows(rejected), drafts, rejected, position)
        residual_keys = keys(rejected, position, Purpose.RESIDUAL)
        next_tokens[rejected] = law.draw(source, residual_keys)
    overlap = torch.full(start.shape, torch.nan, dtype=target.dtype, device=start.device)
    trimmed = torch.nonzero(is_full & (verify_lens < draft_lens)).flatten()
    if trimmed.numel():
        overlap[trimmed] = overlap_mass(
            decisive.rows(trimmed), drafts, trimmed, verify_lens[trimmed]
        )
    overlaps = None
    if has_overlaps:
        overlaps = overlap.new_full(draft_tokens.shape, torch.nan)
        is_judged = torch.arange(draft_tokens.shape[1]) < torch.minimum(
            accepted_lens + 1, verify_lens
        ).unsqueeze(1)
        row, position = torch.nonzero(is_judged, as_tuple=True)
        if row.numel():
            judges = target.rows(start[row] + position)
            overlaps[row, position] = overlap_mass(judges, drafts, row, position)
    return Acceptance(accepted_lens, next_tokens, overlap, overlaps)


def _count_accepted(
    target: Distribution,
    start: Tensor,
    draft_tokens: Tensor,
    drafts: Sequence[Distribution],
    verify_lens: Tensor,
    keys: KeyMaker,
    source: RandomSource,
) -> Tensor:
    """[R] int64, length of each row's accepted prefix."""
    depth = len(drafts)
    if depth == 0:
        return torch.zeros_like(verify_lens)
    is_verified = torch.arange(depth, device=start.device) < verify_lens[:, None]
    row, position = torch.nonzero(is_verified, as_tuple=True)
    # Columns that hold no draft may hold anything; read them as token 0 and drop the result.
    tokens = draft_tokens[:, :depth].where(is_verified, 0)
    q = torch.stack([law.probability(tokens[:, i]) for i, law in enumerate(drafts)], dim=1)
    q = q[row, position]
    p = target.rows(start[row] + position).probability(tokens[row, position])
    is_accepted = p > 0.0
    # Chance decides only where p < q: u·q < p holds for every u < 1 otherwise.
    undecided = torch.nonzero(is_accepted & (p < q)).flatten()
    if undecided.numel():
        accept_keys = keys(row[undecided], position[undecided], Purpose.ACCEPT)
        is_accepted[undecided] = source.accept(p[undecided], q[undecided], accept_keys)
    accepted = torch.zeros_like(is_verified)
    accepted[row, position] = is_accepted
    return ((~accepted).cumsum(1) == 0).sum(1)


def residual(
    target: Distribution, drafts: Sequence[Distribution], rows: Tensor, positions: Tensor
) -> Distribution:
    """norm(max(0, p − q)) of N rejected drafts; p itself where rounding leaves nothing.

    ``target``: N laws p; q of entry n is row ``rows[n]`` of ``drafts[positions[n]]``. A one-hot p is
    its own residual: a rejected draft was another token.
    """
    index = torch.nonzero(target.dense_row >= 0).flatten()
    if index.numel() == 0:
        return target
    # Row by row, each pass in the processor's cache: 3× faster than [N, V] at a time.
    mass = target.dense.new_empty((index.numel(), target.vocab_size))
    for out, entry in zip(mass, index.tolist(), strict=True):
        p = target.dense[target.dense_row[entry]]
        law, row = drafts[int(positions[entry])], rows[entry]
        place = int(law.dense_row[row])
        if place >= 0:
            torch.sub(p, law.dense[place], out=out).clamp_(min=0.0)
        else:
            out.copy_(p)[law.point[row]] = 0.0  # q = 1 there
        total = out.sum()
        if total > 0.0:
            out.div_(total)
        else:
            out.copy_(p)
    dense_row = torch.full_like(target.dense_row, -1)
    dense_row[index] = torch.arange(index.numel(), device=index.device)
    return Distribution(target.point, mass, dense_row)


def overlap_mass(
    target: Distribution, drafts: Sequence[Distribution], rows: Tensor, positions: Tensor
) -> Tensor:
    """[N] Σ min(p, q), the probability that a draft is accepted; arguments as in ``residual``."""
    mass = torch.empty(len(target), dtype=target.dtype, device=rows.device)
    for position in sorted(set(positions.tolist())):
        here = torch.nonzero(positions == position).flatten()
        p, q = target.rows(here), drafts[position].rows(rows[here])
        p_dense, q_dense = p.dense_row >= 0, q.dense_row >= 0
        # One-hot on a side: Σ min(p, q) is the other's probability of that token.
        value = torch.where(q_dense, q.probability(p.point), p.probability(q.point))
        both = p_dense & q_dense
        if both.any():
            smaller = torch.minimum(p.dense[p.dense_row[both]], q.dense[q.dense_row[both]])
            value[both] = smaller.sum(-1)
        mass[here] = value
    return mass
