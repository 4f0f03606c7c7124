"""The operators as citizens of torch: schemas, fake tensors, compilation and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trtllm_av.plugins import torch_ops

R, K, V = 3, 2, 11


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(
    dtype: torch.dtype = torch.float32,
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Valid arguments of each operator: (positional, by keyword)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(R, K, V, generator=generator).to(dtype)
    floats = torch.float64 if dtype == torch.float64 else torch.float32
    confidence = torch.rand(R, K, generator=generator).to(floats)
    coefficients = torch.tensor([0.5, -0.2, -0.1])
    lens = int32(2, 1, 2)
    return {
        "score_drafts": (
            (logits, torch.ones(R), coefficients, int32(0)),
            {"vocab_size": V - 1, "draft_lens": lens},
        ),
        "score_features": ((confidence[..., None], coefficients, int32(0)), {}),
        "law_features": ((logits, torch.ones(R)), {"vocab_size": V - 1}),
        "trim_drafts": ((confidence, lens, int32(1, 1, 1), int32(0, 0, 1), int32(3)), {}),
        "pack_drafts": ((int32(1, 1, 1), int32(2, 0, 1)), {"stride": 3, "capacity": 8}),
        "label_drafts": (  # every position labelled: opcheck takes NaN for a difference
            (
                int32(2, 2, 2),
                int32(2, 1, 2),
                int32(2, 1, 1),
                int32(2, 2, 2),
                confidence[:, 0].clone(),
            ),
            {"num_positions": K},
        ),
        "accumulate_statistics": (
            (
                confidence[..., None].expand(-1, -1, 2).clone(),
                confidence.round(),
                torch.cat([coefficients[:1], coefficients]),
            ),
            {},
        ),
    }


NAMES = list(arguments())


def operator(name: str) -> Callable[..., Any]:
    return getattr(torch_ops, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake_tell_the_truth(name: str, dtype: torch.dtype) -> None:
    """Guards against: a graph compiled for shapes, strides or types that the kernel does not return, and
    an operator that writes into or returns its arguments."""
    args, kwargs = arguments(dtype)[name]
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(name), args, kwargs, test_utils=utilities)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_graphs_do_not_break(name: str) -> None:
    """Guards against: an operator that compiles only by falling back to Python."""
    args, kwargs = arguments()[name]
    eager = operator(name)(*args, **kwargs)
    compiled = torch.compile(operator(name), fullgraph=True, backend="aot_eager")(*args, **kwargs)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["score_drafts", "score_features", "law_features", "trim_drafts"])
def test_no_decision_sees_a_drawn_token(name: str) -> None:
    """Guards against: a score of the drawn token or a trim by what a draft is, both of which change the
    law of the emitted tokens."""
    given = {
        argument.name for argument in getattr(torch.ops.trtllm_av, name).default._schema.arguments
    }
    allowed = {
        *("draft_logits", "features", "confidence", "temperature", "coefficients", "position"),
        *("vocab_size", "allowed_mask", "feature_bound", "temperature_floor"),
        *("draft_lens", "base_lens", "min_verify_lens", "draft_budget"),
    }
    assert given <= allowed


@pytest.mark.parametrize(
    ("name", "index", "wrong", "message"),
    [
        ("score_drafts", 1, torch.ones(R + 1), r"temperature has shape \(4,\); pass \(3,\)"),
        ("score_drafts", 3, torch.tensor([0]), r"position is torch.int64; pass torch.int32"),
        ("score_features", 2, int32(0, 1), r"position has shape \(2,\); pass \(1,\)"),
        ("trim_drafts", 1, int32(2, 1), r"draft_lens has shape \(2,\); pass \(3,\)"),
        ("trim_drafts", 4, torch.tensor([3]), r"draft_budget is torch.int64; pass torch.int32"),
        ("pack_drafts", 1, int32(2), r"verify_lens has shape \(1,\); pass \(3,\)"),
        ("label_drafts", 3, int32(2), r"trainable_lens has shape \(1,\); pass \(3,\)"),
        ("accumulate_statistics", 2, torch.ones(5), r"coefficients has shape \(5,\); pass \(4,\)"),
    ],
)
def test_a_misread_argument_is_refused(name: str, index: int, wrong: Tensor, message: str) -> None:
    """Guards against: arrays broadcast or reinterpreted into lengths that nobody decided."""
    args, kwargs = arguments()[name]
    with pytest.raises(ValueError, match=message):
        operator(name)(*args[:index], wrong, *args[index + 1 :], **kwargs)
