"""Kernel of ``sampling_ops.cut_thresholds``: top-k and top-p without a sort.

A token survives top-k if fewer than k logits lie above its own, and top-p if the tokens above its own
hold less than the share; both fall along the order of floats. So the smallest surviving float is found by
its bits, two in each pass over the row. Invariants: what ties with a survivor survives; counts are exact
and masses are summed in float64, so that a share met exactly is not missed by a rounding error.
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
def smallest_survivor(
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
        low, middle, high = key + step - 1, key + 2 * step - 1, key + 3 * step - 1
        above_low, above_middle, above_high = weight_above(
            logits, vocab_size, float_of(low), float_of(middle), float_of(high),
            maximum, scale, cut, BY_MASS, BLOCK,
        )  # fmt: skip
        # Everything lies above the keys below that of −inf, whose floats are NaN.
        key += tl.where((above_low >= limit) | (low < KEY_OF_MINUS_INFINITY), step, 0)
        key += tl.where((above_middle >= limit) | (middle < KEY_OF_MINUS_INFINITY), step, 0)
        key += tl.where((above_high >= limit) | (high < KEY_OF_MINUS_INFINITY), step, 0)
    return float_of(tl.where(key >= MIDDLE, key, key + ((1 << LOW_BITS) - 1)))


@jit
def cut_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    maxima: tl.tensor,
    scales: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    cuts: tl.tensor,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    maximum, scale = tl.load(maxima + row), tl.load(scales + row)
    k = tl.load(top_k + row).to(tl.int64)
    share = tl.load(top_p + row).to(tl.float64)
    cut = tl.full([], float("-inf"), tl.float32)
    if scale == 0.0:
        tl.store(cuts + row, cut)
        return
    if (k > 0) & (k < vocab_size):
        cut = smallest_survivor(
            logits, vocab_size, k.to(tl.float32), maximum, scale, cut, False, LOW_BITS, BLOCK
        )
    if share < 1.0:
        nothing = tl.full([], float("-inf"), tl.float32)
        total, _, _ = weight_above(
            logits, vocab_size, nothing, nothing, nothing, maximum, scale, cut, True, BLOCK
        )
        limit = tl.maximum(share * total, 1e-300)  # the maximum always survives
        nucleus = smallest_survivor(
            logits, vocab_size, limit, maximum, scale, cut, True, LOW_BITS, BLOCK
        )
        cut = tl.maximum(cut, nucleus)
    tl.store(cuts + row, cut)
