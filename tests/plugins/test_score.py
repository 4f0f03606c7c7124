"""Score: the log-odds of the drafter's top token, and the confidence made of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from trtllm_av.plugins import cpu_score, reference, torch_ops

K = 7
COEFFICIENTS = torch.tensor([0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4])
FIRST = torch.tensor([0], dtype=torch.int32)
INF = math.inf


def score(logits: Tensor, temperature: Any = 1.0, **options: Any) -> tuple[Tensor, Tensor]:
    """Features [R, P] and confidence [R, P] of the operator, checked against the reference."""
    scale = torch.as_tensor(temperature, dtype=torch.float32).expand(logits.shape[0]).contiguous()
    options = {"vocab_size": logits.shape[-1], "position": FIRST, **options}
    position = options.pop("position")
    features, confidence = torch_ops.score_drafts(logits, scale, COEFFICIENTS, position, **options)
    is_double = logits.dtype == torch.float64
    expected = reference.score_drafts(
        logits.double().numpy(),
        scale,
        COEFFICIENTS,
        position,
        dtype=np.float64 if is_double else np.float32,
        **options,
    )
    tolerance = 1e-12 if is_double else 1e-5
    np.testing.assert_allclose(features.numpy(), expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(confidence.numpy(), expected[1], rtol=tolerance, atol=tolerance)
    return features[..., 0], confidence


def true_log_odds(logits: np.ndarray, temperature: float) -> float:
    """Log-odds of the top token in float64, by pairwise log-add instead of a sum of exponentials."""
    scaled = np.sort(logits.astype(np.float64)) / temperature
    return float(scaled[-1] - np.logaddexp.reduce(scaled[:-1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [2, 111, 32000, 49152])
def test_features_match_float64(dtype: torch.dtype, vocab_size: int) -> None:
    """Guards against: sums that drift with the vocabulary, padding that counts, a swapped temperature."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, 2, vocab_size + 5, generator=generator) * 4
    logits[..., vocab_size:] = 60.0  # padding, above every real token
    logits[:, :, ::7] = -INF
    logits = logits.to(dtype)
    temperature = [0.6, 1.0, 1.7]
    features, _ = score(logits, temperature, vocab_size=vocab_size, feature_bound=40.0)
    for row, scale in enumerate(temperature):
        for i in range(2):
            truth = true_log_odds(logits[row, i, :vocab_size].double().numpy(), scale)
            assert float(features[row, i]) == pytest.approx(min(truth, 40.0), abs=1e-4)


@pytest.mark.parametrize("gap", [10.0, 16.0, 17.0, 18.0, 25.0, 40.0])
def test_two_tokens_have_no_cliff(gap: float) -> None:
    """Guards against: "Σexp − 1" in float32, which reads the bound from a gap of 17 on."""
    features, _ = score(torch.tensor([[[gap, 0.0]]]), feature_bound=50.0)
    assert float(features) == pytest.approx(gap, abs=1e-5)


@pytest.mark.parametrize(
    ("row", "feature"),
    [
        ([0.0, 0.0, 0.0, 0.0], -math.log(3)),
        ([2.0, 2.0, -INF, -INF], 0.0),
        ([-INF, 1.0, -INF, -INF], 15.0),
        ([80.0, 0.0, 0.0, 0.0], 15.0),
        ([3e38, -3e38, -3e38, -3e38], 15.0),
    ],
    ids=["uniform", "tie", "one-hot", "saturated", "extreme"],
)
def test_special_rows(row: list[float], feature: float) -> None:
    """Guards against: a tie counted as certain, and infinities where a clamp belongs."""
    features, confidence = score(torch.tensor([[row]]))
    assert float(features) == pytest.approx(feature, abs=1e-6)
    assert float(confidence) == pytest.approx(1 / (1 + math.exp(0.2 - feature / 2)), abs=1e-6)


@pytest.mark.parametrize(
    "row", [[-INF] * 3, [1.0, math.nan, 2.0], [math.nan] * 3, [INF, 1.0, 2.0], [INF, INF, 0.0]]
)
def test_a_row_that_cannot_be_scored_has_confidence_zero(row: list[float]) -> None:
    """Guards against: NaN reaching the survival of the batch, or the sort that trims it."""
    good = [3.0, 1.0, 0.0]
    features, confidence = score(torch.tensor([[good], [row], [good]]))
    assert features[1] == 0 and confidence[1] == 0
    alone = score(torch.tensor([[good]]))
    assert torch.equal(features[[0, 2]], alone[0].expand(2, 1))
    assert torch.equal(confidence[[0, 2]], alone[1].expand(2, 1))


def test_a_temperature_that_is_no_number_has_confidence_zero() -> None:
    """Guards against: a NaN temperature becoming a NaN confidence."""
    features, confidence = score(torch.ones(1, 1, 3), math.nan)
    assert features == 0 and confidence == 0


def test_padding_and_forbidden_tokens_are_never_read() -> None:
    """Guards against: NaN or large values in columns that no draft can be drawn from."""
    real = torch.tensor([[[3.0, 1.0, 0.5, 2.0]]])
    padded = torch.cat([real, torch.tensor([[[math.nan, INF, 99.0]]])], -1)
    assert torch.equal(score(padded, vocab_size=4)[1], score(real)[1])
    poisoned = real.clone()
    poisoned[..., 1] = math.nan
    mask = torch.tensor([[True, False, True, True]])
    masked = score(poisoned, allowed_mask=mask)
    assert torch.equal(masked[1], score(real[..., [0, 2, 3]])[1])
    assert not torch.equal(masked[1], score(real)[1])


def test_low_temperatures_score_as_the_floor_and_zero_as_one() -> None:
    """Guards against: greedy or nearly greedy rows that all read the bound and wreck the fit."""
    logits = torch.tensor([[[3.0, 1.0, 0.0]]]).expand(5, 1, 3)
    features, _ = score(logits, [0.0, 1.0, 1e-4, 0.3, 0.5])
    assert features[0] == features[1]
    assert features[2] == features[3] == features[4] > features[1]


def test_positions_behind_the_draft_are_zero() -> None:
    """Guards against: stale logits of another request scored as this one's, and an off-by-one length."""
    logits = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([2], dtype=torch.int32)
    whole = score(logits, position=position)
    draft_lens = torch.tensor([2, 3, 7], dtype=torch.int32)
    features, confidence = score(logits, position=position, draft_lens=draft_lens)
    live = torch.tensor([[False, False], [True, False], [True, True]])
    assert torch.equal(features, torch.where(live, whole[0], 0))
    assert torch.equal(confidence, torch.where(live, whole[1], 0))


def test_a_block_equals_its_positions_one_by_one() -> None:
    """Guards against: a block drafter and an autoregressive one judged by different confidences."""
    logits = torch.randn(4, K, 300, generator=torch.Generator().manual_seed(1)) * 3
    features, confidence = score(logits)
    for i in range(K):
        position = torch.tensor([i], dtype=torch.int32)
        step = score(logits[:, i : i + 1], position=position)
        assert torch.equal(step[0][:, 0], features[:, i])
        assert torch.equal(step[1][:, 0], confidence[:, i])


@pytest.mark.parametrize("block_elements", [1, 600, 1 << 18])
def test_blocks_of_rows_cover_every_row(
    monkeypatch: pytest.MonkeyPatch, block_elements: int
) -> None:
    """Guards against: rows lost or scored twice at the edge of a scratch block, dense and gathered."""
    monkeypatch.setattr(cpu_score, "_BLOCK_ELEMENTS", block_elements)
    logits = torch.randn(7, 2, 300, generator=torch.Generator().manual_seed(2))
    mask = torch.rand(7, 300, generator=torch.Generator().manual_seed(3)) > 0.3
    temperature = torch.linspace(0.5, 2.0, 7)
    score(logits, temperature, allowed_mask=mask)
    draft_lens = torch.tensor([2, 0, 1, 2, 2, 0, 2], dtype=torch.int32)
    score(logits, temperature, allowed_mask=mask, draft_lens=draft_lens)


def test_later_positions_and_other_rows_do_not_leak() -> None:
    """Guards against: a confidence that saw what was drawn (logits behind a draft depend on it)."""
    logits = torch.randn(3, K, 50, generator=torch.Generator().manual_seed(4))
    before = score(logits)[1]
    changed = logits.clone()
    changed[1, 3:] = changed[1, 3:].flip(-1) * 2
    after = score(changed)[1]
    assert torch.equal(before[1, :3], after[1, :3])
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1, 3:], after[1, 3:])


def test_strided_logits_are_scored_in_place() -> None:
    """Guards against: a view read with the wrong stride, and scratch work written into the logits."""
    buffer = torch.randn(3, K, 40, generator=torch.Generator().manual_seed(5))
    view = buffer[:, 2:4, :30]
    before = buffer.clone()
    confidence = score(view)[1]
    assert torch.equal(confidence, score(view.contiguous())[1])
    assert torch.equal(buffer, before)


def test_float64_logits_score_in_float64() -> None:
    """Guards against: exact enumeration that is exact to seven digits."""
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    features, confidence = score(logits, [1.0, 0.7])
    assert features.dtype == confidence.dtype == torch.float64
    # The temperature travels in float32; the row at 1.0 is exact.
    truth = true_log_odds(logits[0, 0].numpy(), 1.0)
    assert float(features[0, 0]) == pytest.approx(truth, abs=1e-14)


specials = st.sampled_from([-INF, INF, math.nan, 0.0, -0.0, 1.0, 2.0**-100, 65504.0, -65504.0])


@given(
    logits=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=6),
        elements=specials | st.floats(-30, 30, width=32),
    ),
    temperature=st.floats(0, 4, width=32),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_operator_and_reference_agree(logits: np.ndarray, temperature: float) -> None:
    """Guards against: two answers to one question; ``score`` compares them."""
    features, confidence = score(torch.from_numpy(logits), temperature)
    assert torch.isfinite(features).all()
    assert ((confidence >= 0) & (confidence <= 1)).all()


def test_given_features_use_all_slopes() -> None:
    """Guards against: a head's logit read with another feature's slope or another position's intercept."""
    features = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]])
    coefficients = torch.tensor([0.5, 0.25, 9.0, -0.5, 0.75])
    position = torch.tensor([1], dtype=torch.int32)
    confidence = torch_ops.score_features(features, coefficients, position)
    expected = [1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-1.75))]
    np.testing.assert_allclose(confidence.numpy(), [expected], rtol=1e-6)
    np.testing.assert_allclose(
        reference.score_features(features, coefficients, position), [expected], rtol=1e-6
    )


def test_given_features_that_are_not_finite_have_confidence_zero() -> None:
    """Guards against: a head that overflows poisoning its request, or counting as certain."""
    features = torch.tensor([[[math.nan], [INF], [-INF], [0.0], [3e38]]])
    confidence = torch_ops.score_features(features, COEFFICIENTS, FIRST)
    assert confidence[0, :3].tolist() == [0.0] * 3
    assert confidence[0, 3] == torch.sigmoid(COEFFICIENTS[4]) and confidence[0, 4] == 1
    np.testing.assert_array_equal(
        confidence.numpy() == 0, reference.score_features(features, COEFFICIENTS, FIRST) == 0
    )


@pytest.mark.parametrize(("first", "columns"), [(-1, 1), (K, 1), (3, 5)])
def test_positions_without_an_intercept_are_refused(first: int, columns: int) -> None:
    """Guards against: a slice that silently takes the intercepts of other positions."""
    position = torch.tensor([first], dtype=torch.int32)
    logits = torch.zeros(1, columns, 4)
    with pytest.raises(ValueError, match=f"position={first}"):
        torch_ops.score_drafts(logits, torch.ones(1), COEFFICIENTS, position, vocab_size=4)
    with pytest.raises(ValueError, match=f"position={first}"):
        reference.score_drafts(logits, torch.ones(1), COEFFICIENTS, position, vocab_size=4)


@pytest.mark.parametrize("vocab_size", [0, 5])
def test_a_vocabulary_the_logits_do_not_hold_is_refused(vocab_size: int) -> None:
    """Guards against: padding rules that silently do nothing."""
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size}"):
        score(torch.zeros(1, 1, 4), vocab_size=vocab_size)
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size}"):
        reference.score_drafts(np.zeros((1, 1, 4)), [1], COEFFICIENTS, [0], vocab_size=vocab_size)
