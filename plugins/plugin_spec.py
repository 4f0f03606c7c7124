"""What the TensorRT plugins take and give: one description for the Python form, the C++ form and the tests.

The C++ tables are generated from it (``plugin_build``), so that both forms know the same. Inputs and
outputs are those of the ONNX nodes of the same names; ``ScoreLevel`` and ``TrimTree`` are for TensorRT-LLM's
networks, where budget and coefficients come from the control block.

A dimension is a product of factors "name+number", "name-number" or a number alone: "R*K+1" is R·(K+1). A
name takes its value from the first input that has it alone as a dimension. Invariants: all tensors are
linear (no vectorised layout); only the last input can be optional; no output's type depends on an input's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trtllm_av.plugins.control_block import MAX_LEVELS

NAMESPACE = "trtllm_av"
VERSION = "1"

DType = Literal["f32", "f16", "bf16", "i32", "bool"]
#: In the order of the C++ enumeration.
DTYPES: tuple[DType, ...] = ("f32", "f16", "bf16", "i32", "bool")
ITEM_BYTES: dict[DType, int] = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "bool": 1}
LOGITS: tuple[DType, ...] = ("f32", "f16", "bf16")


class Factor(NamedTuple):
    """``name`` plus ``plus``; "" stands for 0."""

    name: str
    plus: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """``dims`` as the module's docstring says, separated by spaces."""

    name: str
    dtypes: tuple[DType, ...]
    dims: str
    is_optional: bool = False

    @property
    def shape(self) -> tuple[tuple[Factor, ...], ...]:
        """The factors of each dimension."""
        return tuple(tuple(map(_parse_factor, dim.split("*"))) for dim in self.dims.split())


def _parse_factor(text: str) -> Factor:
    match = re.fullmatch(r"([A-Z]?)([+-]?\d+)?", text)
    assert match is not None, text
    return Factor(match[1], int(match[2] or 0))


@dataclass(frozen=True, slots=True)
class Field:
    """An attribute of the node; it is required if it has no ``default``."""

    name: str
    dtype: Literal["i32", "f32"]
    least: float
    most: float
    default: float | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """The greatest value of a dimension that the kernels take."""

    name: str
    most: int


@dataclass(frozen=True, slots=True)
class PluginSpec:
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    fields: tuple[Field, ...] = ()
    limits: tuple[Limit, ...] = ()

    @property
    def num_required(self) -> int:
        """Inputs without the optional one."""
        return sum(not tensor.is_optional for tensor in self.inputs)


def _ints(name: str, dims: str) -> Tensor:
    return Tensor(name, ("i32",), dims)


def _floats(name: str, dims: str) -> Tensor:
    return Tensor(name, ("f32",), dims)


_MOST = 2**31 - 1
_FEATURE_BOUND = Field("feature_bound", "f32", 1e-3, 80, 15)
_VOCAB_SIZE = Field("vocab_size", "i32", 1, _MOST)

PLUGINS = {
    spec.name: spec
    for spec in (
        PluginSpec(
            "ScoreDrafts",
            (
                Tensor("draft_logits", LOGITS, "R P V"),
                _floats("temperature", "R"),
                _floats("coefficients", "C"),
                _ints("position", "1"),
                _ints("draft_lens", "R"),
                Tensor("allowed_mask", ("bool",), "R V", is_optional=True),
            ),
            (_floats("features", "R P 1"), _floats("confidence", "R P")),
            (_VOCAB_SIZE, _FEATURE_BOUND, Field("temperature_floor", "f32", 1e-3, 100, 0.5)),
            (Limit("R", 65535), Limit("P", 65535)),
        ),
        PluginSpec(
            "TrimDrafts",
            (
                _floats("confidence", "R K"),
                _ints("draft_lens", "R"),
                _ints("base_lens", "R"),
                _ints("min_verify_lens", "R"),
                _ints("draft_budget", "1"),
            ),
            (
                _floats("survival", "R K"),
                _ints("verify_lens", "R"),
                _ints("cu_seqlens", "R+1"),
                _ints("pack_index", "R*K+1"),
            ),
            (),
            (Limit("R", 1024), Limit("K", 16)),
        ),
        PluginSpec(
            "ScoreLevel",
            (
                Tensor("logits", LOGITS, "M V"),
                _ints("num_rows", ""),
                _ints("paths", "R N D"),
                _ints("next_draft_lens", "R"),
            ),
            (_floats("features", "R N-1"), _ints("passed_draft_lens", "R")),
            (
                Field("level", "i32", 0, MAX_LEVELS - 1),
                Field("vocab_size", "i32", 1, 262144),
                Field("max_non_leaves", "i32", 1, 256),
                _FEATURE_BOUND,
            ),
            (Limit("R", 512), Limit("N", 257), Limit("D", MAX_LEVELS + 1)),
        ),
        PluginSpec(
            "TrimTree",
            (
                _floats("features", "R K"),
                _ints("next_draft_lens", "R"),
                _ints("paths", "R N D"),
                _ints("draft_lens", "R"),
                _ints("num_accepted_tokens", "R"),
                _ints("accepted_paths", "R"),
            ),
            (_ints("trimmed_draft_lens", "R"), _floats("av_trace", "R K+8")),
            (
                Field("min_draft_len", "i32", 1, 256, 1),
                Field("total_multiple", "i32", 1, 4096, 8),
            ),
            (Limit("R", 512), Limit("K", 256), Limit("D", MAX_LEVELS + 1)),
        ),
    )
}
