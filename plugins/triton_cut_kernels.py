"""Kernel of ``sampling_ops.cut_thresholds``: top-k and top-p without a sort.

A token survives top-k if fewer than k logits lie above its own, and top-p if the tokens above its own
hold less than the share; both fall along the order of floats. So the smallest surviving float is found by
its bits, two in each step, among the few tokens that can be it. Invariants: what ties with a survivor
survives; counts are exact and masses are summed in float64, so that a share met exactly is not missed by
a rounding error.
"""

from __future__ import annotations

from trtllm_av.plugins.triton_language import jit, tl
from trtllm_av.plugins.triton_statistics_kernels import mass_of

#: Keys order like the floats: the bits of a positive one above the middle, of a negative one flipped.
MIDDLE = tl.constexpr(0x80000000)
KEY_OF_MINUS_INFINITY = tl.constexpr(0x007FFFFF)


@jit
def float_of(key: tl.tensor) -> tl.tensor:
    """The float32 of an int64 key."""
    bits = tl.where(key >= MIDDLE, key - MIDDLE, 0xFFFFFFFF - key)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@jit
def weight_above(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    middle: tl.tensor,
    high: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Number, or mass, of the tokens with greater logits than each of three floats; 0 above NaN."""
    lane = tl.arange(0, BLOCK)
    above_low = tl.zeros([BLOCK], tl.float64 if BY_MASS else tl.float32)
    above_middle = above_low
    above_high = above_low
    for first in tl.range(0, vocab_size, BLOCK):
        column = first + lane
        value = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        value = value.to(tl.float32)
        if BY_MASS:
            weight = mass_of(value, maximum, scale, cut).to(tl.float64)
        else:
            weight = tl.full([BLOCK], 1.0, tl.float32)
        above_low += tl.where(value > low, weight, 0.0)
        above_middle += tl.where(value > middle, weight, 0.0)
        above_high += tl.where(value > high, weight, 0.0)
    return tl.sum(above_low, 0), tl.sum(above_middle, 0), tl.sum(above_high, 0)


@jit
def raise_key(
    key: tl.tensor,
    step: tl.tensor,
    above_low: tl.tensor,
    above_middle: tl.tensor,
    above_high: tl.tensor,
    limit: tl.tensor,
) -> tl.tensor:
    """``key`` with its next two bits, from what lies above the three keys before their places."""
    # Everything lies above the keys below that of −inf, whose floats are NaN.
    first = (above_low >= limit) | (key + step <= KEY_OF_MINUS_INFINITY)
    second = (above_middle >= limit) | (key + 2 * step <= KEY_OF_MINUS_INFINITY)
    third = (above_high >= limit) | (key + 3 * step <= KEY_OF_MINUS_INFINITY)
    return key + step * (first.to(tl.int64) + second.to(tl.int64) + third.to(tl.int64))


@jit
def survivor_of_row(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    limit: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    BY_MASS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest float with less than ``limit`` above it; ``LOW_BITS`` last bits are 0 in every logit."""
    key = tl.full([], 0, tl.int64)
    for turn in tl.range(0, (32 - LOW_BITS) // 2):
        step = tl.full([], 1, tl.int64) << (30 - 2 * turn)
        above_low, above_middle, above_high = weight_above(
            logits, vocab_size, float_of(key + step - 1), float_of(key + 2 * step - 1),
            float_of(key + 3 * step - 1), maximum, scale, cut, BY_MASS, BLOCK,
        )  # fmt: skip
        key = raise_key(key, step, above_low, above_middle, above_high, limit)
    return last_float(key, LOW_BITS)


@jit
def survivor_among(
    values: tl.tensor, weights: tl.tensor, limit: tl.tensor, LOW_BITS: tl.constexpr
) -> tl.tensor:
    """As ``survivor_of_row``, among values in registers."""
    key = tl.full([], 0, tl.int64)
    for turn in tl.range(0, (32 - LOW_BITS) // 2):
        step = tl.full([], 1, tl.int64) << (30 - 2 * turn)
        key = raise_key(
            key,
            step,
            tl.sum(tl.where(values > float_of(key + step - 1), weights, 0.0), 0),
            tl.sum(tl.where(values > float_of(key + 2 * step - 1), weights, 0.0), 0),
            tl.sum(tl.where(values > float_of(key + 3 * step - 1), weights, 0.0), 0),
            limit,
        )
    return last_float(key, LOW_BITS)


@jit
def last_float(key: tl.tensor, LOW_BITS: tl.constexpr) -> tl.tensor:
    """The one value of a type whose key has the upper bits of ``key``."""
    return float_of(tl.where(key >= MIDDLE, key, key + ((1 << LOW_BITS) - 1)))


@jit
def lane_maxima(logits: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """[BLOCK] greatest logits of each lane's columns; NaN counts as −inf."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, vocab_size, BLOCK):
        column = first + lane
        value = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        value = value.to(tl.float32)
        best = tl.where(value > best, value, best)
    return best


@jit
def cut_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    maxima: tl.tensor,
    scales: tl.tensor,
    totals: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    scratch: tl.tensor,
    cuts: tl.tensor,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row). ``scratch`` [rows, BLOCK] f32 takes the tokens among which both cuts must lie.

    The k-th greatest of the lanes' maxima is a lower bound of the k-th greatest logit. All tokens that are
    lighter than (1 − p) / V of the mass hold less than 1 − p together, so the nucleus ends above them.
    Where more than BLOCK tokens remain the search reads the whole row at every step.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    scratch += row * BLOCK
    maximum, scale = tl.load(maxima + row), tl.load(scales + row)
    k = tl.load(top_k + row).to(tl.int64)
    share = tl.load(top_p + row).to(tl.float64)
    uses_k = (k > 0) & (k < vocab_size)
    cut = tl.full([], float("-inf"), tl.float32)
    if (scale == 0.0) | ((share >= 1.0) & (uses_k == 0)):
        tl.store(cuts + row, cut)
        return
    lane = tl.arange(0, BLOCK)
    one = tl.full([BLOCK], 1.0, tl.float32)
    count_limit = k.to(tl.float32)
    lowest = cut
    if uses_k & (k <= BLOCK):
        lowest = survivor_among(lane_maxima(logits, vocab_size, BLOCK), one, count_limit, LOW_BITS)
    # A margin for the rounding of total and bound.
    lightest = (0.98 * (1.0 - share) * tl.load(totals + row) / vocab_size).to(tl.float32)
    num_candidates = tl.full([], 0, tl.int32)
    row_mass = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, vocab_size, BLOCK):
        column = first + lane
        value = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        value = value.to(tl.float32)
        mass = mass_of(value, maximum, scale, cut)
        row_mass += mass.to(tl.float64)
        is_candidate = tl.where(uses_k, value >= lowest, mass >= lightest)
        is_candidate = is_candidate & (value > float("-inf"))
        one_each = is_candidate.to(tl.int32)
        place = num_candidates + tl.cumsum(one_each, 0) - one_each
        tl.store(scratch + place, value, mask=is_candidate & (place < BLOCK))
        num_candidates += tl.sum(one_each, 0)
    tl.debug_barrier()  # what one thread has stored, another loads
    if num_candidates <= BLOCK:
        value = tl.load(scratch + lane, mask=lane < num_candidates, other=float("-inf"))
        if uses_k:
            cut = survivor_among(value, one, count_limit, LOW_BITS)
        if share < 1.0:
            weight = mass_of(value, maximum, scale, cut).to(tl.float64)
            total = tl.where(uses_k, tl.sum(weight, 0), tl.sum(row_mass, 0))
            limit = tl.maximum(share * total, 1e-300)  # the maximum always survives
            cut = tl.maximum(cut, survivor_among(value, weight, limit, LOW_BITS))
    else:
        if uses_k:
            cut = survivor_of_row(
                logits, vocab_size, count_limit, maximum, scale, cut, False, LOW_BITS, BLOCK
            )
        if share < 1.0:
            total, _, _ = weight_above(
                logits, vocab_size, float("-inf"), float("-inf"), float("-inf"), maximum, scale, cut,
                True, BLOCK,
            )  # fmt: skip
            limit = tl.maximum(share * total, 1e-300)
            nucleus = survivor_of_row(
                logits, vocab_size, limit, maximum, scale, cut, True, LOW_BITS, BLOCK
            )
            cut = tl.maximum(cut, nucleus)
    tl.store(cuts + row, cut)
