"""``sampling_ops`` with kernels in the Triton language; logits are read in their own type.

Invariants: as in ``sampling_ops``; a row is never written out as probabilities; sums are taken in an order
that depends on shapes alone. Rows are cut into blocks of columns, so that a few rows fill the GPU too;
the mass of each block stays with the laws, and a draw then reads one block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_av.plugins.sampling_laws import CUT_CANDIDATES, Laws, Verdict
from trtllm_av.plugins.triton_accept_kernels import accept_kernel, uniforms_kernel
from trtllm_av.plugins.triton_cut_kernels import cut_kernel
from trtllm_av.plugins.triton_draw_kernels import draw_kernel, residual_kernel
from trtllm_av.plugins.triton_language import triton
from trtllm_av.plugins.triton_statistics_kernels import (
    block_mass_kernel,
    block_statistics_kernel,
    row_statistics_kernel,
)
from trtllm_av.runtime.errors import UsageError

_BLOCK = 4096  # columns whose mass is kept together
_WARPS = 8
#: Last bits that are 0 in every value of a type as float32, an even number of them.
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 0}


def row_statistics(logits: Tensor, temperature: Tensor, vocab_size: int) -> Laws:
    """As ``sampling_ops.row_statistics``."""
    _check_logits(logits)
    num_rows, blocks = logits.shape[0], _num_blocks(vocab_size)
    tops, masses = _floats(logits, 2, num_rows, blocks)
    points = torch.empty(num_rows, blocks, dtype=torch.int32, device=logits.device)
    point = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    numbers = _floats(logits, 4, num_rows)
    if num_rows:
        with torch.cuda.device_of(logits):
            block_statistics_kernel[(blocks, num_rows)](
                logits, logits.stride(0), temperature, vocab_size, tops, masses, points, _BLOCK,
                num_warps=_WARPS,
            )  # fmt: skip
            row_statistics_kernel[(num_rows,)](
                tops, masses, points, blocks, temperature, point, *numbers,
                triton.next_power_of_2(blocks), num_warps=1,
            )  # fmt: skip
    maximum, scale, cut, total = numbers
    return Laws(logits, vocab_size, point, maximum, scale, cut, total, masses)


def cut_thresholds(laws: Laws, top_k: Tensor, top_p: Tensor) -> Laws:
    """As ``sampling_ops.cut_thresholds``."""
    logits = laws.logits
    cut = _floats(logits, len(laws))
    if len(laws):
        with torch.cuda.device_of(logits):
            cut_kernel[(len(laws),)](
                logits, logits.stride(0), laws.vocab_size, laws.maximum, laws.scale, laws.total,
                top_k, top_p, _floats(logits, len(laws), CUT_CANDIDATES), cut,
                _LOW_BITS[logits.dtype], CUT_CANDIDATES, num_warps=_WARPS,
            )  # fmt: skip
    kept = replace(laws, cut=cut, masses=None)
    masses = _masses(kept)
    total = torch.where(laws.scale == 0.0, 1.0, masses.sum(-1))
    return replace(kept, total=total, masses=masses)


def draw(laws: Laws, uniforms: Tensor) -> Tensor:
    """As ``sampling_ops.draw``."""
    tokens = torch.empty_like(laws.point)
    blocks = _num_blocks(laws.vocab_size)
    if len(laws):
        masses = _masses(laws)
        target = (laws.logits, laws.logits.stride(0), *laws.row_numbers)
        # Without drafts the kernel never touches what belongs to them: any pointer of its kind will do.
        with torch.cuda.device_of(tokens):
            draw_kernel[(len(laws),)](
                *target, masses, laws.vocab_size, blocks, uniforms.contiguous(), tokens,
                *target, laws.vocab_size, tokens, tokens, tokens, masses, masses, tokens, masses,
                False, False, _BLOCK, triton.next_power_of_2(blocks), num_warps=_WARPS,
            )  # fmt: skip
    return tokens


def draw_next(
    target: Laws, drafts: Laws, verdict: Verdict, uniforms: Tensor, target_to_draft: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As ``sampling_ops.draw_next``."""
    _check_logits(drafts.logits)
    rows, draft_rows = verdict.rows, verdict.draft_rows
    num_rows, blocks = rows.numel(), _num_blocks(target.vocab_size)
    tokens = torch.empty_like(rows)
    overlap = _floats(rows, num_rows)
    if num_rows == 0:
        return tokens, overlap
    masses = _masses(target)
    excess, shared = _floats(rows, 2, num_rows, blocks)
    p = (target.logits, target.logits.stride(0), *target.row_numbers)
    q = (drafts.logits, drafts.logits.stride(0), *drafts.row_numbers, drafts.vocab_size)
    has_map = target_to_draft is not None
    columns = rows if target_to_draft is None else target_to_draft
    with torch.cuda.device_of(rows):
        residual_kernel[(blocks, num_rows)](
            *p, target.vocab_size, rows, *q, draft_rows, columns, excess, shared, has_map, _BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
        draw_kernel[(num_rows,)](
            *p, masses, target.vocab_size, blocks, uniforms.contiguous(), rows, *q, draft_rows,
            verdict.is_rejected, columns, excess, shared, tokens, overlap,
            True, has_map, _BLOCK, triton.next_power_of_2(blocks), num_warps=_WARPS,
        )  # fmt: skip
    return tokens, overlap


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
    _check_logits(target.logits)
    _check_logits(drafts.logits)
    num_rows, num_positions = draft_tokens.shape
    rows, draft_rows = torch.empty(2, num_rows, dtype=torch.int64, device=draft_tokens.device)
    accepted_lens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    is_rejected = torch.empty(num_rows, dtype=torch.bool, device=rows.device)
    if num_rows:
        with torch.cuda.device_of(rows):
            accept_kernel[(num_rows,)](
                target.logits, target.logits.stride(0), *target.row_numbers, len(target), first_rows,
                drafts.logits, drafts.logits.stride(0), *drafts.row_numbers,
                draft_tokens, draft_tokens.stride(0), draft_lens, verify_lens, uniforms.contiguous(),
                rows if target_to_draft is None else target_to_draft,
                accepted_lens, rows, draft_rows, is_rejected, num_positions,
                target_to_draft is not None, max(2, triton.next_power_of_2(num_positions)), num_warps=1,
            )  # fmt: skip
    return Verdict(accepted_lens, rows, draft_rows, is_rejected)


def keyed_uniforms(
    seeds: Tensor, requests: Tensor, rounds: Tensor, positions: Tensor, purpose: Tensor | int
) -> Tensor:
    """As ``sampling_ops.keyed_uniforms``, for keys of at most two dimensions."""
    fixed = purpose if isinstance(purpose, int) else 0
    arrays = [seeds, requests, rounds, positions]
    arrays.append(seeds if isinstance(purpose, int) else purpose)
    arrays = list(torch.broadcast_tensors(*arrays))
    shape = arrays[0].shape
    if len(shape) > 2:
        raise UsageError(f"keys of shape {tuple(shape)}; pass at most two dimensions")
    result = torch.empty(shape, dtype=torch.float64, device=seeds.device)
    matrices = [array[None] if array.ndim == 1 else array for array in arrays]
    strides = [stride for matrix in matrices for stride in matrix.stride()]
    if result.numel():
        with torch.cuda.device_of(seeds):
            uniforms_kernel[(triton.cdiv(result.numel(), 256),)](
                *matrices, result, *strides, result.numel(), matrices[0].shape[1], int(fixed),
                not isinstance(purpose, int), 256,
            )  # fmt: skip
    return result


def _masses(laws: Laws) -> Tensor:
    """[N, B] mass of each block of columns, summed now if the laws came without."""
    if laws.masses is not None:
        return laws.masses
    logits = laws.logits
    _check_logits(logits)
    blocks = _num_blocks(laws.vocab_size)
    masses = _floats(logits, len(laws), blocks)
    if len(laws) == 0:
        return masses
    with torch.cuda.device_of(logits):
        block_mass_kernel[(blocks, len(laws))](
            logits, logits.stride(0), laws.vocab_size, laws.maximum, laws.scale, laws.cut, masses,
            _BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return masses


def _num_blocks(vocab_size: int) -> int:
    return -(-vocab_size // _BLOCK)


def _floats(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised f32 on the device of ``like``."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _check_logits(logits: Tensor) -> None:
    if logits.dtype == torch.float64 or logits.stride(1) != 1:
        raise UsageError(
            f"logits are {logits.dtype} with strides {logits.stride()}; pass bf16, f16 or f32, contiguous "
            "along the vocabulary"
        )
