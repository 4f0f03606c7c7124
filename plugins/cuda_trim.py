"""Trim and pack on CUDA: launches of ``kernels/trim_pack.cu``, one an operator.

Invariants: at most MAX_ROWS requests of MAX_POSITIONS drafts; packed rows behind ``capacity`` are
dropped and never written, since the host does not know the lengths.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_longlong, c_void_p

from torch import Tensor

from trtllm_av.plugins import torch_ops, verify_pass
from trtllm_av.plugins.cuda_launch import common_device, floats, kernels, pointer
from trtllm_av.runtime.errors import UsageError

MAX_ROWS = 1024
MAX_POSITIONS = 16
#: COUNTING_THREADS of trim_pack.cu; those without a request help to write the packed rows.
_MIN_THREADS = 256
_WARP = 32


class Gather(ctypes.Structure):
    """``Gather`` of trim_pack.cu; all zero gathers nothing."""

    _fields_ = (
        ("last_tokens", c_void_p),
        ("draft_tokens", c_void_p),
        ("kv_lens", c_void_p),
        ("slots", c_void_p),
        ("draft_tokens_stride", c_longlong),
        ("slot_stride", c_longlong),
        ("pad_offset", c_longlong),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("write_offsets", c_void_p),
        ("wide", c_int),
    )


def trim_drafts(
    confidence: Tensor,
    draft_lens: Tensor,
    base_lens: Tensor,
    min_verify_lens: Tensor,
    draft_budget: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``cpu_trim.trim_drafts``."""
    trimmed = torch_ops._trim_drafts_shapes(
        confidence, draft_lens, base_lens, min_verify_lens, draft_budget
    )
    inputs = (confidence, draft_lens, base_lens, min_verify_lens, draft_budget)
    _launch(inputs, trimmed, None, 0, Gather())
    return trimmed


def trim_and_pack(
    confidence: Tensor,
    draft_lens: Tensor,
    base_lens: Tensor,
    min_verify_lens: Tensor,
    draft_budget: Tensor,
    last_tokens: Tensor,
    draft_tokens: Tensor,
    kv_lens: Tensor,
    slots: Tensor,
    *,
    stride: int,
    capacity: int,
    slot_stride: int,
    pad_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``cpu_verify_pass.trim_and_pack``."""
    results = verify_pass.trim_and_pack_shapes(
        confidence,
        draft_lens,
        base_lens,
        min_verify_lens,
        draft_budget,
        last_tokens,
        draft_tokens,
        kv_lens,
        slots,
        stride=stride,
        capacity=capacity,
        slot_stride=slot_stride,
        pad_offset=pad_offset,
    )
    common_device(
        confidence=confidence,
        last_tokens=last_tokens,
        draft_tokens=draft_tokens,
        kv_lens=kv_lens,
        slots=slots,
    )
    if draft_tokens.stride(1) != 1 and draft_tokens.shape[1] > 1:
        raise UsageError(
            f"draft_tokens has strides {draft_tokens.stride()}; one request's must be contiguous"
        )
    sources = [tensor.contiguous() for tensor in (last_tokens, kv_lens, slots)]
    gather = Gather(
        sources[0].data_ptr(),
        draft_tokens.data_ptr(),
        sources[1].data_ptr(),
        sources[2].data_ptr(),
        draft_tokens.stride(0),
        slot_stride,
        pad_offset,
        *(result.data_ptr() for result in results[4:]),
        slots.element_size() == 8,
    )
    inputs = (confidence, draft_lens, base_lens, min_verify_lens, draft_budget)
    _launch(inputs, results[:3], results[3], stride, gather)
    return results


def pack_drafts(base_lens: Tensor, verify_lens: Tensor, *, stride: int, capacity: int) -> Tensor:
    """As ``cpu_trim.pack_drafts``, unchecked."""
    device = common_device(base_lens=base_lens, verify_lens=verify_lens)
    pack_index = torch_ops._pack_drafts_shapes(
        base_lens, verify_lens, stride=stride, capacity=capacity
    )
    rows = base_lens.numel()
    base_lens, verify_lens = base_lens.contiguous(), verify_lens.contiguous()
    kernels("trim_pack", device)["pack_lengths"].launch(
        (1, 1, 1),
        num_threads(rows),
        (
            pointer(base_lens),
            pointer(verify_lens),
            c_int(rows),
            c_int(stride),
            c_int(capacity),
            pointer(pack_index),
        ),
    )
    return pack_index


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    trimmed: tuple[Tensor, Tensor, Tensor],
    pack_index: Tensor | None,
    stride: int,
    gather: Gather,
) -> None:
    """Trim ``inputs`` (arguments of ``trim_drafts``) and pack if there is a ``pack_index``."""
    names = ("confidence", "draft_lens", "base_lens", "min_verify_lens", "draft_budget")
    device = common_device(**dict(zip(names, inputs, strict=True)))
    rows, positions = inputs[0].shape
    if positions > MAX_POSITIONS:
        raise UsageError(f"{positions} draft positions exceed {MAX_POSITIONS}, the most on CUDA")
    arguments = [floats(inputs[0]), *(tensor.contiguous() for tensor in inputs[1:])]
    kernels("trim_pack", device)[kernel_name(positions)].launch(
        (1, 1, 1),
        num_threads(rows),
        (
            *map(pointer, arguments),
            c_int(rows),
            c_int(positions),
            *map(pointer, trimmed),
            pointer(pack_index),
            c_int(stride),
            c_int(0 if pack_index is None else pack_index.numel()),
            gather,
        ),
    )


def kernel_name(positions: int) -> str:
    """The kernel whose loops are unrolled for so many positions."""
    return f"trim_pack_{next(size for size in (4, 8, 16) if positions <= size)}"


def num_threads(rows: int) -> int:
    """A thread a request, in whole warps; UsageError for more requests than one block holds."""
    if rows > MAX_ROWS:
        raise UsageError(f"{rows} requests exceed {MAX_ROWS}, the most of one batch on CUDA")
    return max(-(-rows // _WARP) * _WARP, _MIN_THREADS)
