"""The operations as torch operators ``torch.ops.trtllm_av.*``, usable under torch.compile.

This module owns the operators' schemas (those of the CPU implementations), their shape rules (also the
fake implementations) and the registration of the CPU; another device registers its own kernels under
the same names. What each operation means, argument by argument, is defined in ``reference``; float64
inputs compute in float64, all others in float32; lengths, budget, position and indices are int32.

Invariants: no operator takes a drawn token, mutates an argument, or returns memory of one; an argument
of a wrong shape or integer type raises ValueError before anything is read. There is no gradient: pass
tensors that require none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from trtllm_av.plugins import cpu_score, cpu_training, cpu_trim
from trtllm_av.plugins.cpu_score import arithmetic_dtype
from trtllm_av.plugins.reference import num_statistics

_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def _require(name: str, value: Tensor, shape: tuple[int, ...], *, is_int: bool = False) -> None:
    """Refuse an argument whose shape or integer type would be misread."""
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; pass {shape}")
    if is_int and value.dtype != torch.int32:
        raise ValueError(f"{name} is {value.dtype}; pass torch.int32")


def _score_drafts_shapes(
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
    rows, scored, columns = draft_logits.shape
    _require("temperature", temperature, (rows,))
    _require("position", position, (1,), is_int=True)
    if allowed_mask is not None:
        _require("allowed_mask", allowed_mask, (rows, columns))
    if draft_lens is not None:
        _require("draft_lens", draft_lens, (rows,), is_int=True)
    dtype = arithmetic_dtype(draft_logits)
    features = draft_logits.new_empty((rows, scored, 1), dtype=dtype)
    return features, draft_logits.new_empty((rows, scored), dtype=dtype)


def _score_features_shapes(features: Tensor, coefficients: Tensor, position: Tensor) -> Tensor:
    _require("position", position, (1,), is_int=True)
    return features.new_empty(features.shape[:2], dtype=arithmetic_dtype(features))


def _law_features_shapes(
    draft_logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    feature_bound: float = 15.0,
    temperature_floor: float = 0.5,
) -> Tensor:
    rows, scored, _ = draft_logits.shape
    _require("temperature", temperature, (rows,))
    return draft_logits.new_empty((rows, scored, 2), dtype=arithmetic_dtype(draft_logits))


def _check_trim_drafts(
    confidence: Tensor,
    draft_lens: Tensor,
    base_lens: Tensor,
    min_verify_lens: Tensor,
    draft_budget: Tensor,
) -> None:
    rows = confidence.shape[0]
    _require("draft_lens", draft_lens, (rows,), is_int=True)
    _require("base_lens", base_lens, (rows,), is_int=True)
    _require("min_verify_lens", min_verify_lens, (rows,), is_int=True)
    _require("draft_budget", draft_budget, (1,), is_int=True)


def _trim_drafts_shapes(
    confidence: Tensor,
    draft_lens: Tensor,
    base_lens: Tensor,
    min_verify_lens: Tensor,
    draft_budget: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_trim_drafts(confidence, draft_lens, base_lens, min_verify_lens, draft_budget)
    rows = confidence.shape[0]
    survival = confidence.new_empty(confidence.shape)
    return survival, draft_lens.new_empty((rows,)), draft_lens.new_empty((rows + 1,))


def _pack_drafts_shapes(
    base_lens: Tensor, verify_lens: Tensor, *, stride: int, capacity: int
) -> Tensor:
    _require("base_lens", base_lens, (base_lens.numel(),), is_int=True)
    _require("verify_lens", verify_lens, (base_lens.numel(),), is_int=True)
    return base_lens.new_empty((capacity,))


def _label_drafts_shapes(
    draft_lens: Tensor,
    verify_lens: Tensor,
    accepted_lens: Tensor,
    trainable_lens: Tensor,
    overlap: Tensor,
    *,
    num_positions: int,
    confidence: Tensor | None = None,
) -> Tensor:
    rows = overlap.numel()
    _require("overlap", overlap, (rows,))
    _require("draft_lens", draft_lens, (rows,), is_int=True)
    _require("verify_lens", verify_lens, (rows,), is_int=True)
    _require("accepted_lens", accepted_lens, (rows,), is_int=True)
    _require("trainable_lens", trainable_lens, (rows,), is_int=True)
    if confidence is not None:
        _require("confidence", confidence, (rows, num_positions))
    return overlap.new_empty((rows, num_positions))


def _accumulate_statistics_shapes(features: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    rows, positions = labels.shape
    num_features = features.shape[2]
    _require("features", features, (rows, positions, num_features))
    _require("coefficients", coefficients, (num_features + positions,))
    return features.new_empty((positions, num_statistics(num_features)), dtype=torch.float64)


def _register(
    cpu: _Operation, shapes: _Operation, check: Callable[..., None] | None = None
) -> _Operation:
    """Define ``trtllm_av::<name of cpu>`` and return it, callable like ``cpu``.

    ``check`` is the part of ``shapes`` that allocates nothing, for an operator that a round waits for.
    """
    refuse: Callable[..., Any] = check or shapes

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        refuse(*args, **kwargs)
        return cpu(*args, **kwargs)

    name = f"trtllm_av::{cpu.__name__}"
    schema = torch.library.infer_schema(cpu, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "cpu")(on_cpu)
    torch.library.register_fake(name)(shapes)
    return cast(_Operation, getattr(torch.ops.trtllm_av, cpu.__name__).default)


score_drafts = _register(cpu_score.score_drafts, _score_drafts_shapes)
score_features = _register(cpu_score.score_features, _score_features_shapes)
law_features = _register(cpu_score.law_features, _law_features_shapes)
trim_drafts = _register(cpu_trim.trim_drafts, _trim_drafts_shapes, _check_trim_drafts)
pack_drafts = _register(cpu_trim.pack_drafts, _pack_drafts_shapes)
label_drafts = _register(cpu_training.label_drafts, _label_drafts_shapes)
accumulate_statistics = _register(cpu_training.accumulate_statistics, _accumulate_statistics_shapes)
