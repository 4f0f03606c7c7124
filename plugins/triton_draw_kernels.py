"""Kernels of ``sampling_ops.draw`` and ``draw_next``.

Invariants: a draw reads the masses of a row's blocks and then the logits of one block; what it draws has
probability; running sums are float64.
"""

from __future__ import annotations

from trtllm_av.plugins.triton_language import jit, tl
from trtllm_av.plugins.triton_statistics_kernels import mass_of, probability_of


@jit
def probabilities(
    column: tl.tensor,
    vocab_size: tl.tensor,
    logits: tl.tensor,
    point: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """Probabilities of these columns of one row; ``column`` −1 has none."""
    exists = (column >= 0) & (column < vocab_size)
    value = tl.load(logits + column, mask=exists, other=float("-inf")).to(tl.float32)
    return probability_of(value, column, point, maximum, scale, cut, total)


@jit
def draft_probabilities(
    column: tl.tensor,
    vocab_size: tl.tensor,
    target_to_draft: tl.tensor,
    logits: tl.tensor,
    draft_vocab_size: tl.tensor,
    point: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    total: tl.tensor,
    HAS_MAP: tl.constexpr,
) -> tl.tensor:
    """Probabilities that a draft's law gives these columns of the target."""
    own = column
    if HAS_MAP:
        own = tl.load(target_to_draft + column, mask=column < vocab_size, other=-1)
    q = probabilities(own, draft_vocab_size, logits, point, maximum, scale, cut, total)
    return tl.where(column < vocab_size, q, 0.0)


@jit
def pick_token(
    weight: tl.tensor,
    before: tl.tensor,
    threshold: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """First column of a block whose running sum, begun at ``before``, exceeds the threshold."""
    lane = tl.arange(0, BLOCK)
    running = tl.cumsum(weight.to(tl.float64), 0)
    # The block's sum and its running sum may round differently: then its last token with probability.
    is_behind = (before + running > threshold) & (weight > 0.0)
    chosen = tl.min(tl.where(is_behind, lane, BLOCK), 0)
    last = tl.max(tl.where(weight > 0.0, lane, 0), 0)
    return first + tl.where(chosen < BLOCK, chosen, last)


@jit
def residual_kernel(
    target: tl.tensor,
    target_stride: tl.tensor,
    p_point: tl.tensor,
    p_maximum: tl.tensor,
    p_scale: tl.tensor,
    p_cut: tl.tensor,
    p_total: tl.tensor,
    vocab_size: tl.tensor,
    rows: tl.tensor,
    drafts: tl.tensor,
    draft_stride: tl.tensor,
    q_point: tl.tensor,
    q_maximum: tl.tensor,
    q_scale: tl.tensor,
    q_cut: tl.tensor,
    q_total: tl.tensor,
    draft_vocab_size: tl.tensor,
    draft_rows: tl.tensor,
    target_to_draft: tl.tensor,
    excess: tl.tensor,
    shared: tl.tensor,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (block, row): Σ max(0, p − q) and Σ min(p, q) of rows that have a draft at their end."""
    block = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    draft = tl.load(draft_rows + place).to(tl.int64)
    if draft < 0:
        return
    row = tl.load(rows + place).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    p = probabilities(
        column, vocab_size, target + row * target_stride, tl.load(p_point + row),
        tl.load(p_maximum + row), tl.load(p_scale + row), tl.load(p_cut + row), tl.load(p_total + row),
    )  # fmt: skip
    q = draft_probabilities(
        column, vocab_size, target_to_draft, drafts + draft * draft_stride, draft_vocab_size,
        tl.load(q_point + draft), tl.load(q_maximum + draft), tl.load(q_scale + draft),
        tl.load(q_cut + draft), tl.load(q_total + draft), HAS_MAP,
    )  # fmt: skip
    out = place * tl.num_programs(0) + block
    tl.store(excess + out, tl.sum(tl.maximum(p - q, 0.0), 0))
    tl.store(shared + out, tl.sum(tl.minimum(p, q), 0))


@jit
def draw_kernel(
    target: tl.tensor,
    target_stride: tl.tensor,
    p_point: tl.tensor,
    p_maximum: tl.tensor,
    p_scale: tl.tensor,
    p_cut: tl.tensor,
    p_total: tl.tensor,
    masses: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    uniforms: tl.tensor,
    rows: tl.tensor,
    drafts: tl.tensor,
    draft_stride: tl.tensor,
    q_point: tl.tensor,
    q_maximum: tl.tensor,
    q_scale: tl.tensor,
    q_cut: tl.tensor,
    q_total: tl.tensor,
    draft_vocab_size: tl.tensor,
    draft_rows: tl.tensor,
    is_rejected: tl.tensor,
    target_to_draft: tl.tensor,
    excess: tl.tensor,
    shared: tl.tensor,
    tokens: tl.tensor,
    overlap: tl.tensor,
    HAS_DRAFTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Program (row): a draw from p, or from max(0, p − q) where a draft was rejected."""
    place = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    exists = block < num_blocks
    row = place
    if HAS_DRAFTS:
        row = tl.load(rows + place).to(tl.int64)
    point, scale = tl.load(p_point + row), tl.load(p_scale + row)
    maximum, cut, total = tl.load(p_maximum + row), tl.load(p_cut + row), tl.load(p_total + row)
    sums = tl.load(masses + row * num_blocks + block, mask=exists, other=0.0).to(tl.float64)
    is_residual = False
    draft = row
    if HAS_DRAFTS:
        draft = tl.load(draft_rows + place).to(tl.int64)
        has_draft = draft >= 0
        rejected = (tl.load(is_rejected + place) != 0) & has_draft
        at = place * num_blocks + block
        left = tl.load(excess + at, mask=exists & rejected, other=0.0).to(tl.float64)
        is_residual = tl.sum(left, 0) > 0.0
        sums = tl.where(is_residual, left, sums)
        both = tl.load(shared + at, mask=exists & has_draft, other=0.0)
        known = has_draft & (tl.load(is_rejected + place) == 0)
        tl.store(overlap + place, tl.where(known, tl.sum(both, 0), float("nan")))
    if scale == 0.0:
        tl.store(tokens + place, point)
        return
    running = tl.cumsum(sums, 0)
    end = tl.sum(tl.where(block == num_blocks - 1, running, 0.0), 0)
    threshold = tl.load(uniforms + place) * end
    chosen = tl.min(tl.where((running > threshold) & exists, block, num_blocks - 1), 0)
    before = tl.sum(tl.where(block == chosen - 1, running, 0.0), 0)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    target += row * target_stride
    value = tl.load(target + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    weight = mass_of(value, maximum, scale, cut)
    if HAS_DRAFTS:  # noqa: SIM102  (decided when compiling)
        if is_residual:
            q = draft_probabilities(
                column, vocab_size, target_to_draft, drafts + draft * draft_stride,
                draft_vocab_size, tl.load(q_point + draft), tl.load(q_maximum + draft),
                tl.load(q_scale + draft), tl.load(q_cut + draft), tl.load(q_total + draft), HAS_MAP,
            )  # fmt: skip
            p = probability_of(value, column, point, maximum, scale, cut, total)
            weight = tl.maximum(p - q, 0.0)
    tl.store(
        tokens + place, pick_token(weight, before, threshold, chosen * BLOCK, BLOCK).to(tl.int64)
    )
