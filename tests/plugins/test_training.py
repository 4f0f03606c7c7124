"""Labels and statistics: what a round may teach the estimator, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_av.plugins import reference, torch_ops

NAN = math.nan


def labels_of(
    drafted: Any,
    verified: Any,
    accepted: Any,
    *,
    trainable: Any = None,
    overlap: Any = None,
    num_positions: int = 4,
    confidence: Any = None,
    dtype: torch.dtype = torch.float32,
) -> np.ndarray:
    """The operator's labels, after they were compared with the reference."""
    rows = len(drafted)
    trainable = [num_positions] * rows if trainable is None else trainable
    lens = [torch.tensor(n, dtype=torch.int32) for n in (drafted, verified, accepted, trainable)]
    soft = torch.tensor([NAN] * rows if overlap is None else overlap, dtype=dtype)
    scores = (
        None
        if confidence is None
        else torch.tensor(confidence, dtype=dtype).reshape(rows, num_positions)
    )
    labels = torch_ops.label_drafts(
        *lens, soft, num_positions=num_positions, confidence=scores
    ).numpy()
    expected = reference.label_drafts(
        *lens, soft, num_positions=num_positions, confidence=scores, dtype=labels.dtype
    )
    np.testing.assert_array_equal(labels, expected)
    return labels


@pytest.mark.parametrize(
    ("drafted", "verified", "accepted", "expected"),
    [
        (4, 4, 4, [1, 1, 1, 1]),
        (4, 4, 2, [1, 1, 0, NAN]),
        (4, 4, 0, [0, NAN, NAN, NAN]),
        (4, 2, 2, [1, 1, 0.25, NAN]),
        (4, 2, 1, [1, 0, NAN, NAN]),
        (4, 0, 0, [0.25, NAN, NAN, NAN]),
        (2, 2, 2, [1, 1, NAN, NAN]),
        (0, 0, 0, [NAN, NAN, NAN, NAN]),
    ],
)
def test_labels_of_one_request(
    drafted: int, verified: int, accepted: int, expected: list[float]
) -> None:
    """Guards against: trimmed drafts labelled as rejected, and a soft label after a rejection."""
    labels = labels_of([drafted], [verified], [accepted], overlap=[0.25])
    np.testing.assert_array_equal(labels[0], np.float32(expected))


def test_rows_that_may_not_train_have_no_labels() -> None:
    """Guards against: constrained rows, and what lies behind a stop, teaching the shared estimator."""
    labels = labels_of(
        [4] * 4, [4, 4, 2, 2], [4, 1, 2, 2], trainable=[2, 0, 3, 2], overlap=[0.5] * 4
    )
    expected = [[1, 1, NAN, NAN], [NAN] * 4, [1, 1, 0.5, NAN], [1, 1, NAN, NAN]]
    np.testing.assert_array_equal(labels, np.float32(expected))


def test_unscored_drafts_have_no_labels() -> None:
    """Guards against: the feature 0 of a NaN or all −inf row moving an intercept; end to end, from the
    logits to the statistics."""
    logits = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    logits[0, 0] = -math.inf
    logits[1, 1, 3] = NAN
    coefficients = torch.tensor([0.5, -0.2, -0.2])
    first = torch.tensor([0], dtype=torch.int32)
    features, confidence = torch_ops.score_drafts(
        logits, torch.ones(3), coefficients, first, vocab_size=8
    )
    labels = labels_of([2] * 3, [2] * 3, [1, 2, 0], num_positions=2, confidence=confidence.tolist())
    np.testing.assert_array_equal(labels, np.float32([[NAN, 0], [1, NAN], [0, NAN]]))
    statistics = torch_ops.accumulate_statistics(features, torch.from_numpy(labels), coefficients)
    assert statistics[:, 5].tolist() == [2, 1]


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_label_operator_and_reference_agree(data: st.DataObject) -> None:
    """Guards against: two answers to one question; ``labels_of`` compares them."""
    positions = data.draw(st.integers(1, 5))
    rows = data.draw(st.integers(0, 5))
    drafted = [data.draw(st.integers(0, positions)) for _ in range(rows)]
    verified = [data.draw(st.integers(0, n)) for n in drafted]
    accepted = [data.draw(st.integers(0, n)) for n in verified]
    labels = labels_of(
        drafted,
        verified,
        accepted,
        trainable=[data.draw(st.integers(0, positions)) for _ in range(rows)],
        overlap=[data.draw(st.sampled_from([NAN, 0.0, 0.3, 1.0])) for _ in range(rows)],
        num_positions=positions,
        confidence=data.draw(
            st.none() | st.just([[data.draw(st.sampled_from([0.0, NAN, 0.5]))] * positions] * rows)
        ),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float64])),
    )
    known = np.isfinite(labels)
    assert (known.sum(axis=1) <= np.minimum(np.array(verified, int) + 1, drafted)).all()


def a_round(rows: int, positions: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Features [R, K, 1], labels [R, K] with gaps, and coefficients [1 + K]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, positions, 1, generator=generator) * 4
    labels = torch.rand(rows, positions, generator=generator).round()
    labels[torch.rand(rows, positions, generator=generator) < 0.3] = NAN
    coefficients = torch.randn(1 + positions, generator=generator) * 0.5
    return features, labels, coefficients


@pytest.mark.parametrize(("rows", "positions"), [(1, 1), (1000, 1), (33, 7), (512, 8)])
def test_statistics_match_their_definition(rows: int, positions: int) -> None:
    """Guards against: a wrong column order, a missing curvature floor, and confidences that are not of
    the coefficients given."""
    features, labels, coefficients = a_round(rows, positions, rows)
    statistics = torch_ops.accumulate_statistics(features, labels, coefficients)
    assert statistics.dtype == torch.float64
    truth = np.zeros((positions, 6))
    slope, *intercepts = coefficients.double().tolist()
    for k in range(positions):
        for f, y in zip(features[:, k, 0].tolist(), labels[:, k].tolist(), strict=True):
            if not math.isnan(y):
                p = 1 / (1 + math.exp(-(slope * f + intercepts[k])))
                w = max(p * (1 - p), 0.125)
                truth[k] += [w * f * f, w * f, w, (y - p) * f, y - p, 1]
    np.testing.assert_allclose(statistics.numpy(), truth, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(
        reference.accumulate_statistics(features, labels, coefficients),
        truth,
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("positions", [1, 2, 7])
@pytest.mark.parametrize("module", [torch_ops, reference], ids=["torch", "reference"])
def test_requests_are_added_one_after_another(module: Any, positions: int) -> None:
    """Guards against: pairwise or threaded sums, by which equal rounds give unequal coefficients."""
    features, labels, coefficients = a_round(500, positions, 1)
    whole = np.asarray(module.accumulate_statistics(features, labels, coefficients))
    folded = np.zeros((positions, 6))
    for row in range(500):
        one = slice(row, row + 1)
        folded += np.asarray(module.accumulate_statistics(features[one], labels[one], coefficients))
    assert whole.tobytes() == folded.tobytes()


@pytest.mark.parametrize("module", [torch_ops, reference], ids=["torch", "reference"])
def test_what_is_not_finite_adds_nothing(module: Any) -> None:
    """Guards against: one broken row that turns the coefficients of all requests into NaN."""
    features, labels, coefficients = a_round(40, 3, 2)
    before = np.asarray(module.accumulate_statistics(features, labels, coefficients))
    broken = torch.tensor([NAN, math.inf, -math.inf]).reshape(1, 3, 1)
    features = torch.cat([features, broken, torch.ones(1, 3, 1)])
    labels = torch.cat([labels, torch.ones(1, 3), torch.tensor([[NAN, math.inf, -math.inf]])])
    after = np.asarray(module.accumulate_statistics(features, labels, coefficients))
    assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("module", [torch_ops, reference], ids=["torch", "reference"])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_saturated_rows_keep_curvature(module: Any, label: float) -> None:
    """Guards against: w = p(1−p) → 0, whose Newton step throws the intercepts (and a warning for the
    overflow of an exponential)."""
    features = torch.tensor([[[15.0]], [[-3e4]], [[3e4]]])
    statistics = np.asarray(
        module.accumulate_statistics(features, torch.full((3, 1), label), torch.tensor([1.0, 5.0]))
    )
    assert np.isfinite(statistics).all()
    assert statistics[0, 2] == 3 * reference.CURVATURE_FLOOR


def test_no_requests_give_zero_statistics() -> None:
    """Guards against: a drained batch that raises."""
    empty = torch_ops.accumulate_statistics(torch.zeros(0, 3, 1), torch.zeros(0, 3), torch.zeros(4))
    assert empty.tolist() == [[0.0] * 6] * 3


@pytest.mark.parametrize("num_features", [2, 3])
def test_statistics_of_several_features_match_the_reference(num_features: int) -> None:
    """Guards against a column of another feature, and against a slot where one of them is no number."""
    rng = np.random.default_rng(5)
    features = rng.normal(2.0, 2.0, (20, 4, num_features)).astype(np.float32)
    labels = rng.integers(0, 2, (20, 4)).astype(np.float32)
    features[3, 1, -1], features[4, 2, 0], labels[5, 0] = np.nan, np.inf, np.nan
    coefficients = rng.normal(0.0, 0.5, num_features + 4).astype(np.float32)
    arrays = [features, labels, coefficients]
    found = torch_ops.accumulate_statistics(*map(torch.from_numpy, arrays)).numpy()
    np.testing.assert_allclose(found, reference.accumulate_statistics(*arrays), rtol=1e-12)
    assert found[:, -1].tolist() == [19, 19, 19, 20]
