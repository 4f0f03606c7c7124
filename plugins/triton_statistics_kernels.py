"""Kernels of ``sampling_ops.row_statistics``: a program for each block of a row's columns, then one a row.

Invariants: one float32 expression (``probability_of``) gives the probability of a token wherever it is
drawn or judged; sums are taken in an order that depends on shapes alone.
"""

from __future__ import annotations

from trtllm_av.plugins.sampling_laws import LARGEST_SCALE, LOG2_E
from trtllm_av.plugins.triton_language import jit, tl

LARGEST = tl.constexpr(LARGEST_SCALE)
LOG2E = tl.constexpr(LOG2_E)
NO_COLUMN = tl.constexpr(2**31 - 1)


@jit
def mass_of(value: tl.tensor, maximum: tl.tensor, scale: tl.tensor, cut: tl.tensor) -> tl.tensor:
    """Unnormalised probability of float32 logits; NaN, −inf and what lies below the cut have none."""
    is_kept = (value >= cut) & (value > float("-inf"))
    return tl.where(is_kept, tl.exp2((value - maximum) * scale), 0.0)


@jit
def probability_of(
    value: tl.tensor,
    column: tl.tensor,
    point: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """Probability of the tokens ``column`` from their float32 logits; −inf for none."""
    mass = mass_of(value, maximum, scale, cut) * (1.0 / total)
    return tl.where(scale == 0.0, tl.where(column == point, 1.0, 0.0), mass)


@jit
def block_statistics_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    points: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (block, row): the block's maximum, its first column, and the mass relative to it."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(
        logits + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
    ).to(tl.float32)
    t = tl.load(temperature + row).to(tl.float32)
    slope = tl.where(t > 0.0, tl.minimum(LOG2E / t, LARGEST), 0.0)
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, 0)
    # Without a finite maximum the block's mass means nothing.
    shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    place = row * tl.num_programs(0) + block
    tl.store(tops + place, top)
    tl.store(points + place, tl.min(tl.where(value == top, column, NO_COLUMN), 0))
    tl.store(masses + place, tl.sum(tl.exp2((value - shift) * slope), 0))


@jit
def row_statistics_kernel(
    tops: tl.tensor,
    masses: tl.tensor,
    points: tl.tensor,
    num_blocks: tl.tensor,
    temperature: tl.tensor,
    point: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    total: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Program (row): the row's numbers; ``masses`` become relative to the row's maximum."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    exists = block < num_blocks
    place = row * num_blocks + block
    tops_here = tl.load(tops + place, mask=exists, other=float("-inf"))
    mass = tl.load(masses + place, mask=exists, other=0.0)
    columns = tl.load(points + place, mask=exists, other=NO_COLUMN)
    t = tl.load(temperature + row).to(tl.float32)
    slope = tl.where(t > 0.0, tl.minimum(LOG2E / t, LARGEST), 0.0)
    top = tl.max(tops_here, 0)
    is_sampled = (slope > 0.0) & (tl.abs(top) < float("inf"))
    slope = tl.where(is_sampled, slope, 0.0)
    mass = mass * mass_of(tops_here, top, slope, float("-inf"))
    tl.store(masses + place, mass, mask=exists)
    first = tl.min(tl.where(tops_here == top, columns, NO_COLUMN), 0)
    tl.store(point + row, first.to(tl.int64))
    tl.store(maximum + row, top)
    tl.store(scale + row, slope)
    tl.store(cut + row, float("-inf"))
    tl.store(total + row, tl.where(is_sampled, tl.sum(mass, 0), 1.0))


@jit
def block_mass_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    cut: tl.tensor,
    masses: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (block, row): the mass at or above the row's cut."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(
        logits + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
    ).to(tl.float32)
    mass = mass_of(value, tl.load(maximum + row), tl.load(scale + row), tl.load(cut + row))
    tl.store(masses + row * tl.num_programs(0) + block, tl.sum(mass, 0))
