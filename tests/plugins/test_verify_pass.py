"""The input of the next verify pass and the overlap, on the CPU: against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trtllm_av.plugins import reference, torch_ops, verify_pass

STRIDE, SLOT_STRIDE, PAD = 9, 512, 4095


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(
    rows: int, positions: int, seed: int, dtype: torch.dtype = torch.int64
) -> dict[str, Tensor]:
    """Random arguments of ``trim_and_pack``, dead rows and floors included."""
    g = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=g)

    return {
        "confidence": torch.rand(rows, positions, generator=g),
        "draft_lens": integers(positions + 1, rows).int(),
        "base_lens": (integers(5, rows) > 0).int(),
        "min_verify_lens": (integers(3, rows) * (integers(4, rows) == 0)).int(),
        "draft_budget": integers(rows * positions + 1, 1).int(),
        "last_tokens": integers(1000, rows).to(dtype),
        "draft_tokens": integers(1000, rows, positions).to(dtype),
        "kv_lens": integers(500, rows).to(dtype),
        "slots": torch.randperm(rows, generator=g).to(dtype),
    }


def pack(arguments: dict[str, Tensor], capacity: int) -> tuple[Tensor, ...]:
    results: Any = verify_pass.trim_and_pack(
        **arguments, stride=STRIDE, capacity=capacity, slot_stride=SLOT_STRIDE, pad_offset=PAD
    )
    return tuple(results)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "positions"), [(1, 1), (5, 3), (33, 8), (0, 4)])
def test_rows_of_the_next_pass(rows: int, positions: int, dtype: torch.dtype) -> None:
    """Guards against: a draft fed to another request, or written over another's cache."""
    for seed in range(5):
        given = batch(rows, positions, seed, dtype)
        trim = list(given.values())[:5]
        survival, verify_lens, cu_seqlens, *packed = pack(given, rows * STRIDE + 3)
        expected = reference.trim_drafts(*(value.numpy() for value in trim))
        np.testing.assert_array_equal(survival, expected[0])
        np.testing.assert_array_equal(verify_lens, expected[1])
        np.testing.assert_array_equal(cu_seqlens, expected[2])
        rows_of_pass = []
        for r in range(rows):
            base = int(given["base_lens"][r])
            tokens = [int(given["last_tokens"][r])] * base + given["draft_tokens"][r].tolist()
            for offset in range(base + int(verify_lens[r])):
                position = int(given["kv_lens"][r]) + offset
                write = int(given["slots"][r]) * SLOT_STRIDE + position
                rows_of_pass.append((r * STRIDE + offset, tokens[offset], position, write))
        tail = [(-1, 0, 0, PAD)] * (rows * STRIDE + 3 - len(rows_of_pass))
        assert list(zip(*(p.tolist() for p in packed), strict=True)) == rows_of_pass + tail


def test_tokens_never_change_what_is_verified() -> None:
    """Guards against: an operator that sees the drafts and trims by what they are (lossy)."""
    given = batch(16, 7, 0)
    before = pack(given, 200)
    given["draft_tokens"] = given["draft_tokens"].flip(0, 1)
    given["last_tokens"] = given["last_tokens"].flip(0)
    after = pack(given, 200)
    for k in (0, 1, 2, 3, 5, 6):
        assert torch.equal(before[k], after[k])
    assert not torch.equal(before[4], after[4])


def test_overflow_is_refused() -> None:
    """Guards against: packed rows lost without a word."""
    with pytest.raises(ValueError, match=r"exceed capacity=3"):
        pack(batch(16, 7, 0), 3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slots", torch.zeros(3, dtype=torch.int64), r"slots has shape \(3,\)"),
        ("kv_lens", torch.zeros(4, dtype=torch.int32), r"last_tokens is torch.int64|all as"),
        ("draft_tokens", torch.zeros(4, 2, dtype=torch.int64), r"draft_tokens has shape \(4, 2\)"),
    ],
)
def test_misread_arguments_are_refused(name: str, value: Tensor, message: str) -> None:
    """Guards against: int32 lengths read as int64, two requests at a time."""
    with pytest.raises(ValueError, match=message):
        pack({**batch(4, 3, 0), name: value}, 40)


def test_overlap_of_chosen_rows() -> None:
    """Guards against: an overlap of two other rows, or a number where none is wanted."""
    g = torch.Generator().manual_seed(0)
    target = torch.rand(5, 13, generator=g).softmax(-1)
    draft = torch.rand(3, 13, generator=g).softmax(-1)
    overlap = verify_pass.overlap_mass(target, draft, int32(4, -1, 0, 2), int32(0, 1, -1, 2))
    assert overlap[0].item() == pytest.approx(
        float(np.minimum(target[4].numpy(), draft[0].numpy()).sum())
    )
    assert overlap.isnan().tolist() == [False, True, True, False]
    assert float(verify_pass.overlap_mass(target, target, int32(1), int32(1))) == pytest.approx(1)


def test_operators_are_well_formed() -> None:
    """Guards against: schemas, fake shapes or aliasing that torch.compile would act on wrongly."""
    given = batch(6, 4, 1)
    torch.library.opcheck(
        verify_pass.trim_and_pack,
        tuple(given.values()),
        {"stride": STRIDE, "capacity": 60, "slot_stride": SLOT_STRIDE, "pad_offset": PAD},
    )
    rows = int32(0, 1)  # all wanted: opcheck takes NaN for a difference
    p = torch.rand(2, 8)
    torch.library.opcheck(verify_pass.overlap_mass, (p, p, rows, rows))
    assert torch_ops.trim_drafts is torch.ops.trtllm_av.trim_drafts.default
