"""Kernels of ``attention`` in the Triton language.

Objective: read the live keys and values once. The query heads that share a KV head are packed with the
queries of their row into the M dimension of the matrix products, so that a verify row of eight queries
costs one pass over its keys; where rows and KV heads are too few to fill the GPU, several programs share
the keys of a row and a second kernel merges what they found. Invariants: the grid depends on shapes
alone; how far a program reads is decided by lengths on the device; no atomics, so equal inputs give
equal bits; the first call with a new shape compiles and must come before a graph capture.

Source of the split over keys: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_av.plugins.triton_attention_kernels import (
    attend_kernel,
    merge_kernel,
    write_kv_kernel,
)
from trtllm_av.plugins.triton_language import triton
from trtllm_av.runtime.errors import UsageError

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 32
_SHORT_M = 16  # the least tile of a matrix product
_LONG_REACH = 2048  # of a cache, in tokens
_MERGED_HEADS = 4  # of one program of the merge
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the work of one launch is cut: query rows and keys of a tile, programs that share a row's keys."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def choose_plan(
    num_rows: int,
    max_length: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    reach: int,
    dtype: torch.dtype,
    processors: int,
) -> Plan:
    """The plan that did well for such shapes on an H200 (``benchmarks/attention.py``)."""
    packed = max_length * group
    is_f32 = dtype == torch.float32
    # float32 products keep their operands in registers, which larger tiles would spill.
    largest_m, block_n = (32, 32) if is_f32 and head_dim <= 64 else (16, 16) if is_f32 else (64, 64)
    block_m = 16
    while block_m < min(packed, largest_m):
        block_m *= 2
    tiles = -(-packed // block_m)
    programs = num_rows * num_kv_heads * tiles
    splits = 1
    while (
        splits < _MAX_SPLITS
        and splits * programs <= processors
        and reach >= 2 * splits * 2 * block_n
    ):
        splits *= 2
    if is_f32:
        return Plan(block_m, block_n, splits, 4, 2)
    if block_m == 32 and splits == 1 and reach < _LONG_REACH:
        # Over few keys what counts is how many programs fit beside each other, not how fast one reads.
        return Plan(block_m, 32, splits, 2, 3)
    return Plan(block_m, block_n, splits, 8 if block_m * head_dim > 64 * 64 else 4, 3)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    out: Tensor,
) -> Tensor:
    """As ``attention.attend``; UsageError for tensors that the kernels would misread."""
    head_dim, num_kv_heads, reach = queries.shape[2], keys.shape[1], keys.shape[2]
    plan = choose_plan(
        slots.numel(),
        max_length,
        num_kv_heads,
        queries.shape[1] // num_kv_heads,
        head_dim,
        reach,
        queries.dtype,
        num_processors(queries.device),
    )
    return attend_with(plan, queries, keys, values, slots, kv_lens, cu_seqlens, max_length, out)


def attend_with(
    plan: Plan,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    out: Tensor,
) -> Tensor:
    """``attend`` with a given plan."""
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads, num_rows = keys.shape[1], slots.numel()
    _check_cache(keys, values)
    if queries.dtype not in _FLOATS or keys.dtype != queries.dtype or out.dtype != queries.dtype:
        raise UsageError(
            f"queries are {queries.dtype}, keys {keys.dtype}, out {out.dtype}; pass one of bf16, f16, f32"
        )
    if queries.stride(2) != 1 or out.stride(2) != 1 or num_heads % num_kv_heads:
        raise UsageError(
            f"queries have strides {queries.stride()}, out {out.stride()}, {num_heads} heads over "
            f"{num_kv_heads} KV heads; heads must be contiguous and divide evenly"
        )
    if num_tokens == 0 or num_rows == 0 or max_length == 0:
        return out
    group = num_heads // num_kv_heads
    splits = plan.num_splits
    block_d = max(16, triton.next_power_of_2(head_dim))
    partial = partial_top = out
    if splits > 1:
        shape = (num_tokens, num_heads, splits)
        partial = queries.new_empty((*shape, head_dim), dtype=torch.float32)
        partial_top = queries.new_empty(shape, dtype=torch.float32)
    tiles = -(-max_length * group // plan.block_m)
    with torch.cuda.device_of(queries):
        attend_kernel[(tiles * splits, num_kv_heads, num_rows)](
            queries, keys, values, slots, kv_lens, cu_seqlens, _LOG2_E * head_dim**-0.5,
            out, partial, partial_top,
            queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
            out.stride(0), out.stride(1),
            splits, group, head_dim, block_d, plan.block_m, min(plan.block_m, _SHORT_M), plan.block_n,
            splits > 1,
            num_warps=plan.num_warps, num_stages=plan.num_stages,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(num_tokens, -(-num_heads // _MERGED_HEADS))](
                partial, partial_top, cu_seqlens, num_rows, out, out.stride(0), out.stride(1), num_heads,
                head_dim, block_d, _MERGED_HEADS, splits,
            )  # fmt: skip
    return out


def write_kv(
    new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, write_offsets: Tensor
) -> None:
    """As ``attention.write_kv``."""
    num_tokens, num_kv_heads, head_dim = new_keys.shape
    _check_cache(keys, values)
    if new_keys.stride(2) != 1 or new_values.stride(2) != 1 or new_keys.dtype != keys.dtype:
        raise UsageError(
            f"new keys are {new_keys.dtype} with strides {new_keys.stride()}; heads must be contiguous and "
            f"of the cache's type, {keys.dtype}"
        )
    if num_tokens == 0:
        return
    with torch.cuda.device_of(keys):
        write_kv_kernel[(num_tokens,)](
            new_keys, new_values, keys, values, write_offsets, keys.shape[2],
            *new_keys.stride()[:2], *new_values.stride()[:2], *keys.stride()[:3],
            num_kv_heads, head_dim, triton.next_power_of_2(num_kv_heads * head_dim),
        )  # fmt: skip


def _check_cache(keys: Tensor, values: Tensor) -> None:
    if keys.stride() != values.stride() or keys.dtype != values.dtype or keys.stride(3) != 1:
        raise UsageError(
            f"keys are {keys.dtype} with strides {keys.stride()} and values {values.dtype} with "
            f"{values.stride()}; both must be alike, with contiguous heads"
        )
