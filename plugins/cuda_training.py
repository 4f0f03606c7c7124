"""Labels, statistics and overlap on CUDA: launches of ``kernels/training.cu``.

Invariants: sums are taken in an order that depends on shapes alone: equal inputs give equal bits.
"""

from __future__ import annotations

from ctypes import c_int, c_longlong

import torch
from torch import Tensor

from trtllm_av.plugins import torch_ops, verify_pass
from trtllm_av.plugins.cuda_launch import common_device, floats, kernels, pointer
from trtllm_av.plugins.cuda_score import num_splits
from trtllm_av.plugins.cuda_scratch import mailboxes
from trtllm_av.runtime.errors import UsageError

_THREADS = 256


def label_drafts(
    draft_lens: Tensor,
    verify_lens: Tensor,
    accepted_lens: Tensor,
    trainable_lens: Tensor,
    overlap: Tensor,
    *,
    num_positions: int,
    confidence: Tensor | None = None,
) -> Tensor:
    """As ``cpu_training.label_drafts``."""
    device = common_device(
        draft_lens=draft_lens,
        verify_lens=verify_lens,
        accepted_lens=accepted_lens,
        trainable_lens=trainable_lens,
        overlap=overlap,
        confidence=confidence,
    )
    lens = (draft_lens, verify_lens, accepted_lens, trainable_lens)
    overlap = floats(overlap)
    labels = torch_ops._label_drafts_shapes(
        *lens, overlap, num_positions=num_positions, confidence=confidence
    )
    if labels.numel() == 0:
        return labels
    arguments = [tensor.contiguous() for tensor in lens]
    confidence = None if confidence is None else floats(confidence)
    kernels("training", device)["label_drafts"].launch(
        (-(-labels.numel() // _THREADS), 1, 1),
        _THREADS,
        (
            *map(pointer, arguments),
            pointer(overlap),
            pointer(confidence),
            c_int(labels.numel()),
            c_int(num_positions),
            pointer(labels),
        ),
    )
    return labels


def accumulate_statistics(features: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    """As ``cpu_training.accumulate_statistics`` for one feature, summed in another fixed order."""
    device = common_device(features=features, labels=labels, coefficients=coefficients)
    if features.shape[2] != 1:
        raise UsageError(
            f"features has {features.shape[2]} values a draft, and the CUDA kernel sums one; leave "
            "extra_features out, or sum on the CPU"
        )
    statistics = torch_ops._accumulate_statistics_shapes(features, labels, coefficients)
    rows, positions = labels.shape
    if positions == 0:
        return statistics
    arguments = [floats(tensor) for tensor in (features, labels, coefficients)]
    kernels("training", device)["accumulate_statistics"].launch(
        (positions, 1, 1),
        _THREADS,
        (*map(pointer, arguments), c_int(rows), c_int(positions), pointer(statistics)),
    )
    return statistics


def overlap_mass(target: Tensor, draft: Tensor, target_rows: Tensor, draft_rows: Tensor) -> Tensor:
    """As ``cpu_verify_pass.overlap_mass``, for float32."""
    device = common_device(
        target=target, draft=draft, target_rows=target_rows, draft_rows=draft_rows
    )
    overlap = verify_pass.overlap_mass_shapes(target, draft, target_rows, draft_rows)
    if target.dtype != torch.float32 or target.stride(1) != 1 or draft.stride(1) != 1:
        raise UsageError(
            f"target is {target.dtype} with strides {target.stride()}; pass float32 probabilities, "
            "contiguous along the vocabulary"
        )
    rows, columns = overlap.numel(), target.shape[1]
    if rows == 0:
        return overlap
    splits = num_splits(rows, columns // 4, device)
    words = mailboxes(rows, splits, device)
    arguments = [tensor.contiguous() for tensor in (target_rows, draft_rows)]
    kernels("training", device)["overlap_mass"].launch(
        (splits, rows, 1),
        _THREADS,
        (
            pointer(target),
            pointer(draft),
            *map(pointer, arguments),
            c_longlong(target.stride(0)),
            c_longlong(draft.stride(0)),
            c_int(columns),
            pointer(words),
            pointer(overlap),
        ),
    )
    return overlap
