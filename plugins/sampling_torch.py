"""The operations of ``sampling_ops`` in plain torch, on any device: what the kernels have to compute.

Invariants: shapes are static and nothing is read back, so that a graph can capture them too; sums that
decide a draw are taken in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.plugins.sampling_laws import Laws, Verdict, scale_of

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def row_statistics(logits: Tensor, temperature: Tensor, vocab_size: int) -> Laws:
    """As ``sampling_ops.row_statistics``."""
    values = _values(logits, vocab_size)
    maximum = values.amax(-1)
    scale = scale_of(temperature, maximum)
    cut = torch.full_like(maximum, -torch.inf)
    laws = Laws(logits, vocab_size, values.argmax(-1), maximum, scale, cut, cut)
    return _with_cut(laws, cut)


def cut_thresholds(laws: Laws, top_k: Tensor, top_p: Tensor) -> Laws:
    """As ``sampling_ops.cut_thresholds``, by sorting."""
    width = laws.vocab_size
    ordered = _values(laws.logits, width).sort(-1, descending=True).values
    kth = ordered.gather(-1, (top_k.long() - 1).clamp(0, width - 1)[:, None])
    uses_k = ((top_k > 0) & (top_k < width))[:, None]
    cut = torch.where(uses_k, kth, -torch.inf)
    mass = _mass(ordered, laws.maximum[:, None], laws.scale[:, None], cut)
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    end = top_p.double()[:, None] * cumulative[:, -1:]
    last = (cumulative < end).sum(-1, keepdim=True).clamp(max=width - 1)
    nucleus = torch.where((top_p < 1.0)[:, None], ordered.gather(-1, last), -torch.inf)
    return _with_cut(laws, torch.maximum(cut, nucleus)[:, 0])


def probability(laws: Laws, rows: Tensor, tokens: Tensor) -> Tensor:
    """As ``sampling_ops.probability``."""
    values = laws.logits[rows, tokens].float()
    mass = _mass(values, laws.maximum[rows], laws.scale[rows], laws.cut[rows])
    at_point = (tokens == laws.point[rows]).float()
    return torch.where(laws.scale[rows] == 0.0, at_point, mass / laws.total[rows])


def draw(laws: Laws, uniforms: Tensor) -> Tensor:
    """As ``sampling_ops.draw``."""
    return torch.where(laws.scale == 0.0, laws.point, _inverse_cdf(_table(laws), uniforms))


def accept(
    target: Laws,
    first_rows: Tensor,
    drafts: Laws,
    draft_tokens: Tensor,
    draft_lens: Tensor,
    verify_lens: Tensor,
    uniforms: Tensor,
    target_to_draft: Tensor | None,
) -> Verdict:
    """As ``sampling_ops.accept``."""
    num_rows, num_positions = draft_tokens.shape
    position = torch.arange(num_positions, device=draft_tokens.device)
    is_verified = position < verify_lens[:, None]
    # Columns that hold no draft may hold anything; read them as token 0 and drop the result.
    tokens = torch.where(is_verified, draft_tokens.long(), 0)
    target_rows = (first_rows.long()[:, None] + position).clamp(0, len(target) - 1)
    draft_rows = torch.arange(num_rows, device=position.device)[:, None] * num_positions + position
    p = probability(target, target_rows, tokens)
    q = _draft_probability(drafts, draft_rows, tokens, target_to_draft)
    is_accepted = is_verified & (uniforms * q.double() < p.double())
    accepted = (~is_accepted).int().cumsum(-1).eq(0).sum(-1)
    last = num_positions - 1
    has_draft = accepted < draft_lens
    return Verdict(
        accepted_lens=accepted.int(),
        rows=(first_rows.long() + accepted).clamp(0, len(target) - 1),
        draft_rows=torch.where(has_draft, draft_rows[:, 0] + accepted.clamp(max=last), -1),
        is_rejected=accepted < verify_lens,
    )


def draw_next(
    target: Laws, drafts: Laws, verdict: Verdict, uniforms: Tensor, target_to_draft: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As ``sampling_ops.draw_next``."""
    p = _table(_select(target, verdict.rows))
    has_draft = verdict.draft_rows >= 0
    q = _table(_select(drafts, verdict.draft_rows.clamp(min=0)))
    if target_to_draft is not None:
        columns = target_to_draft.long()
        q = torch.where(columns >= 0, q[:, columns.clamp(min=0)], 0.0)
    excess = (p - q).clamp(min=0.0)
    is_left = excess.sum(-1) > 0.0
    is_residual = verdict.is_rejected & is_left
    drawn = _inverse_cdf(torch.where(is_residual[:, None], excess, p), uniforms)
    point = target.point[verdict.rows]
    overlap = torch.minimum(p, q).sum(-1)
    return (
        torch.where(target.scale[verdict.rows] == 0.0, point, drawn),
        torch.where(has_draft & ~verdict.is_rejected, overlap, torch.nan),
    )


def keyed_uniforms(
    seeds: Tensor, requests: Tensor, rounds: Tensor, positions: Tensor, purpose: Tensor | int
) -> Tensor:
    """As ``sampling_ops.keyed_uniforms``: Philox-4x32-10 in wrapping 64-bit integers."""
    seeds, requests = seeds.long(), requests.long()
    place = (positions.long() << 2) | purpose
    key = [seeds & _WORD, (seeds >> 32) & _WORD]
    a, b = rounds.long() & _WORD, place & _WORD
    c, d = requests & _WORD, (requests >> 32) & _WORD
    for turn in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        k0, k1 = ((key[i] + (turn * _WEYL[i] & _WORD)) & _WORD for i in range(2))
        a, b, c, d = (
            ((right >> 32) & _WORD) ^ b ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ d ^ k1,
            left & _WORD,
        )
    bits = (((a << 32) | b) >> 11) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53


def _values(logits: Tensor, vocab_size: int) -> Tensor:
    """The logits that count as float32, NaN as −inf."""
    values = logits[:, :vocab_size].float()
    return torch.where(values.isnan(), -torch.inf, values)


def _mass(values: Tensor, maximum: Tensor, scale: Tensor, cut: Tensor) -> Tensor:
    """Unnormalised probability of float32 logits; NaN, −inf and what lies below the cut have none."""
    is_kept = (values >= cut) & (values > -torch.inf)
    return torch.where(is_kept, torch.exp2((values - maximum) * scale), 0.0)


def _with_cut(laws: Laws, cut: Tensor) -> Laws:
    """``laws`` with this cut and the total that it leaves; one-hot rows have total 1."""
    values = laws.logits[:, : laws.vocab_size].float()
    mass = _mass(values, laws.maximum[:, None], laws.scale[:, None], cut[:, None])
    total = torch.where(laws.scale == 0.0, 1.0, mass.sum(-1))
    return Laws(laws.logits, laws.vocab_size, laws.point, laws.maximum, laws.scale, cut, total)


def _select(laws: Laws, rows: Tensor) -> Laws:
    numbers = [number[rows] for number in laws.row_numbers]
    return Laws(laws.logits[rows], laws.vocab_size, *numbers)


def _table(laws: Laws) -> Tensor:
    """[N, vocab_size] f32 probabilities."""
    values = laws.logits[:, : laws.vocab_size].float()
    mass = _mass(values, laws.maximum[:, None], laws.scale[:, None], laws.cut[:, None])
    columns = torch.arange(laws.vocab_size, device=values.device)
    one_hot = (columns == laws.point[:, None]).float()
    return torch.where((laws.scale == 0.0)[:, None], one_hot, mass / laws.total[:, None])


def _draft_probability(
    drafts: Laws, rows: Tensor, tokens: Tensor, target_to_draft: Tensor | None
) -> Tensor:
    """Probability of target tokens under laws over the drafter's vocabulary."""
    if target_to_draft is None:
        return probability(drafts, rows, tokens)
    columns = target_to_draft[tokens].long()
    return torch.where(columns >= 0, probability(drafts, rows, columns.clamp(min=0)), 0.0)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[N] int64: first column whose cumulative weight exceeds u times the row's sum."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniforms.double() * cumulative[:, -1]
    return (cumulative > threshold[:, None]).int().argmax(-1)
