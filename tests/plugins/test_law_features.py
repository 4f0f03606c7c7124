"""Top-2 gap and entropy of a draft law: against the reference, and at the edges of a row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_av.plugins import reference, torch_ops

INF, NAN = math.inf, math.nan


def features_of(
    logits: list[float], *, temperature: float = 1.0, vocab_size: int | None = None
) -> list[float]:
    """Gap and entropy of one row, after they were compared with the reference."""
    row = torch.tensor(logits, dtype=torch.float32).reshape(1, 1, -1)
    size = len(logits) if vocab_size is None else vocab_size
    scale = torch.tensor([temperature])
    found = torch_ops.law_features(row, scale, vocab_size=size)
    with np.errstate(invalid="ignore"):
        expected = reference.law_features(row, scale, vocab_size=size)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    return [float(value) for value in found.flatten()]


def test_gap_and_entropy_of_a_known_law() -> None:
    """Guards against bits in place of nats, and a gap between the wrong two tokens."""
    law = [0.5, 0.25, 0.25]
    gap, entropy = features_of([math.log(p) for p in law])
    assert gap == pytest.approx(math.log(2.0), rel=1e-6)
    assert entropy == pytest.approx(1.5 * math.log(2.0), rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([2.0] * 4, [0.0, math.log(4.0)]),  # uniform, tied at the top
        ([3.0, -INF, -INF], [15.0, 0.0]),  # certain: the clamp, no surprise left
        ([3.0], [15.0, 0.0]),
        ([-INF] * 3, [0.0, 0.0]),
        ([1.0, NAN, 2.0], [0.0, 0.0]),
        ([1.0, INF, 2.0], [0.0, 0.0]),
    ],
)
def test_rows_at_the_edge(logits: list[float], expected: list[float]) -> None:
    """Guards against NaN from 0·log 0, and against rows without a law that read as certain."""
    assert features_of(logits) == pytest.approx(expected, abs=1e-6)


def test_temperature_and_padding() -> None:
    """Guards against padded columns in the law, and a temperature that is not that of the score."""
    logits = [1.0, 3.0, 0.0, 99.0]
    assert features_of(logits, vocab_size=3)[0] == pytest.approx(2.0)
    assert features_of(logits, vocab_size=3, temperature=2.0)[0] == pytest.approx(1.0)
    assert features_of(logits, vocab_size=3, temperature=0.0)[0] == pytest.approx(2.0)
    assert features_of(logits, vocab_size=3, temperature=0.01)[0] == pytest.approx(4.0)  # the floor


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30.0, 30.0, width=32), min_size=2, max_size=9), st.floats(0.1, 3.0))
def test_random_rows_match_the_reference(logits: list[float], temperature: float) -> None:
    """Guards against sums in another order of magnitude than the law has."""
    gap, entropy = features_of(logits, temperature=temperature)
    assert 0.0 <= gap <= 15.0
    assert -1e-5 <= entropy <= math.log(len(logits)) + 1e-5
