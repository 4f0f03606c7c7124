"""Score on CUDA: launches of ``kernels/score.cu`` with the arguments and results of ``cpu_score``.

Invariants: logits are read once, in their own type and with any strides between rows; scratch is O(R·P).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong

import torch
from torch import Tensor

from trtllm_av.plugins import torch_ops
from trtllm_av.plugins.cuda_launch import common_device, floats, kernels, pointer
from trtllm_av.plugins.cuda_scratch import mailboxes
from trtllm_av.plugins.reference import check_vocabulary
from trtllm_av.runtime.errors import UsageError

#: Of score.cu: threads, 16-byte loads of each at once, and blocks that one multiprocessor holds.
THREADS = 256
_UNROLL = 4
RESIDENT_BLOCKS = 5
MAX_SPLITS = 32
VECTOR_BYTES = 16
_FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


class Shape(ctypes.Structure):
    """``Shape`` of score.cu."""

    _fields_ = (
        ("row_stride", c_longlong),
        ("column_stride", c_longlong),
        ("mask_stride", c_longlong),
        ("columns", c_int),
        ("positions", c_int),
        ("vocab_size", c_int),
        ("vectors_per_split", c_int),
    )


def num_splits(num_rows: int, num_vectors: int, device: int) -> int:
    """Blocks that share one row of 16-byte vectors on ``device``."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return splits_of_row(num_rows, num_vectors, processors)


def splits_of_row(num_rows: int, num_vectors: int, num_processors: int) -> int:
    """Blocks that share one row: as many as the GPU holds at once, all loads of each in use."""
    most = max(1, min(RESIDENT_BLOCKS * num_processors // num_rows, MAX_SPLITS))
    turns = max(1, -(-num_vectors // (most * THREADS * _UNROLL)))
    return max(1, -(-num_vectors // (turns * THREADS * _UNROLL)))


def score_drafts(
    draft_logits: Tensor,
    temperature: Tensor,
    coefficients: Tensor,
    position: Tensor,
    *,
    vocab_size: int,
    allowed_mask: Tensor | None = None,
    draft_lens: Tensor | None = None,
    feature_bound: float = 15.0,
    temperature_floor: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """As ``cpu_score.score_drafts``; a position behind the coefficients reads the last intercept."""
    device = common_device(
        draft_logits=draft_logits,
        temperature=temperature,
        coefficients=coefficients,
        position=position,
        allowed_mask=allowed_mask,
        draft_lens=draft_lens,
    )
    features, confidence = torch_ops._score_drafts_shapes(
        draft_logits,
        temperature,
        coefficients,
        position,
        vocab_size=vocab_size,
        allowed_mask=allowed_mask,
        draft_lens=draft_lens,
    )
    rows, columns, width = draft_logits.shape
    check_vocabulary(vocab_size, width)
    if draft_logits.stride(2) != 1 or (allowed_mask is not None and allowed_mask.stride(1) != 1):
        raise UsageError(
            f"draft_logits has strides {draft_logits.stride()}; the vocabulary of logits and mask must "
            "be contiguous"
        )
    if confidence.numel() == 0:
        return features, confidence
    vectors = vocab_size * draft_logits.element_size() // VECTOR_BYTES
    splits = num_splits(rows * columns, vectors, device)
    words = mailboxes(rows * columns, splits, device)
    temperature, coefficients = floats(temperature), floats(coefficients)
    draft_lens = None if draft_lens is None else draft_lens.contiguous()
    shape = Shape(
        draft_logits.stride(0),
        draft_logits.stride(1),
        0 if allowed_mask is None else allowed_mask.stride(0),
        columns,
        coefficients.numel() - 1,
        vocab_size,
        -(-vectors // splits),
    )
    masked = "" if allowed_mask is None else "masked_"
    kernels("score", device)[f"score_{masked}{_FORMATS[draft_logits.dtype]}"].launch(
        (splits, columns, rows),
        THREADS,
        (
            pointer(draft_logits),
            shape,
            pointer(temperature),
            c_float(temperature_floor),
            pointer(coefficients),
            c_float(feature_bound),
            pointer(position),
            pointer(allowed_mask),
            pointer(draft_lens),
            pointer(words),
            pointer(features),
            pointer(confidence),
        ),
    )
    return features, confidence


def score_features(features: Tensor, coefficients: Tensor, position: Tensor) -> Tensor:
    """As ``cpu_score.score_features``; a position behind the coefficients reads the last intercept."""
    device = common_device(features=features, coefficients=coefficients, position=position)
    confidence = torch_ops._score_features_shapes(features, coefficients, position)
    slots, num_features = confidence.numel(), features.shape[2]
    if slots == 0:
        return confidence
    features, coefficients = floats(features), floats(coefficients)
    kernels("score", device)["score_features"].launch(
        (-(-slots // THREADS), 1, 1),
        THREADS,
        (
            pointer(features),
            pointer(coefficients),
            pointer(position),
            c_int(slots),
            c_int(features.shape[1]),
            c_int(num_features),
            c_int(coefficients.numel() - num_features),
            pointer(confidence),
        ),
    )
    return confidence
