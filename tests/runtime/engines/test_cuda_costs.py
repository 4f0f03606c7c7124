"""Costs of a device: interpolation by context, live ratios and their bounds, what is stored."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trtllm_av.runtime.budget import find_budgets
from trtllm_av.runtime.cost_table import ProfileKey
from trtllm_av.runtime.engines.cuda.cost_files import load_profile, store_profile
from trtllm_av.runtime.engines.cuda.costs import BucketProfile, DeviceCosts, token_sizes_for
from trtllm_av.runtime.engines.cuda.sizes import padded, request_sizes, sizes_up_to

KEY = ProfileKey("digest", "torch-cuda", "a card", "bfloat16", 1)


def costs() -> DeviceCosts:
    small = BucketProfile(
        (1, 2, 4), np.array([[1.0, 1.2, 1.1], [2.0, 2.4, 3.0]]), np.array([[0.1, 0.2], [0.3, 0.4]])
    )
    large = BucketProfile(
        (2, 4, 8), np.array([[2.0, 3.0, 5.0], [4.0, 6.0, 10.0]]), np.array([[0.5, 0.6], [0.5, 0.6]])
    )
    return DeviceCosts({1: small, 2: large}, num_positions=3, kv_lens=(100, 300))


def test_costs_follow_the_batch_and_its_context() -> None:
    """Guards against: costs of another request bucket or KV length than the round's."""
    model = costs()
    model.set_batch(1, 100)
    assert model.verify_row(1, 4).tolist() == [1.0, 1.2, 1.2, 1.2]  # the running maximum
    model.set_batch(1, 200)
    np.testing.assert_allclose(model.verify_row(1, 4), [1.5, 1.8, 2.05, 2.05])
    assert model.draft_ms(1, 3) == pytest.approx(0.2 + 2 * 0.3)
    assert model.draft_ms(1, 0) == 0.0 == model.draft_ms(0, 3)
    model.set_batch(2, 1000)  # beyond the profile: the longest that was measured
    assert model.verify_row(2, 8).tolist() == [4.0, 6.0, 6.0, 10.0, 10.0, 10.0, 10.0]
    assert [model.bucket(tokens) for tokens in (1, 2, 3, 5, 8)] == [2, 2, 4, 8, 8]
    assert model.verify_ms(np.array([2, 8, 16])).tolist() == [4.0, 10.0, 20.0]


def test_live_ratios_are_bounded_and_stay_monotone() -> None:
    """Guards against: one slow phase that switches speculation off, and costs that fall with more tokens."""
    model = costs()
    model.set_batch(2, 100)
    for _ in range(500):
        for tokens, depth, draft_ms, verify_ms in (
            (4, 2, 0.5, 30.0),
            (8, 0, 0.0, 0.1),
            (2, 0, 0.0, 2.0),
        ):
            model.observe(2, tokens, depth, draft_ms, verify_ms)
    model.set_batch(2, 100)
    bounded = pytest.approx([2.0, *[3.9] * 6], rel=0.02)  # not 3.5 at the end
    assert model.verify_row(2, 8).tolist() == bounded
    assert model.draft_ms(2, 2) == pytest.approx(1.1 * 0.7)
    drift = {"updates": 1500, "min_ratio": 0.7, "max_ratio": 1.3}
    assert model.drift() == pytest.approx(drift, rel=0.02)
    for row in model._ratios.values():
        assert all(0.7 <= ratio <= 1.3 for part in row for ratio in part.current())
    model.observe(2, 5, 1, 1.0, 1.0)  # a size that was never profiled
    assert model.num_updates == 1500


def test_an_observed_bucket_costs_what_it_costs() -> None:
    """Guards against: live refinement that takes dozens of rounds to see what one has measured."""
    model = costs()
    model.set_batch(1, 100)
    model.observe(1, 2, 0, 0.0, 1.4)
    model.set_batch(1, 100)
    assert model.verify_row(2, 2)[0] == pytest.approx(1.4)
    for _ in range(300):
        model.observe(1, 2, 0, 0.0, 1.3)
    model.set_batch(1, 100)
    assert model.verify_row(2, 2)[0] == pytest.approx(1.3)


def test_unused_buckets_are_not_cheap_for_being_unused() -> None:
    """Guards against: a card slower than its profile on which every bucket but the present one looks better."""
    model = costs()
    model.set_batch(2, 100)
    for _ in range(3):
        model.observe(2, 4, 0, 0.0, 3.3)
    model.set_batch(2, 100)
    np.testing.assert_allclose(model.verify_row(2, 8), 1.1 * np.array([2.0, 3, 3, 5, 5, 5, 5]))
    model.set_batch(1, 100)  # another request bucket has its own
    assert model.verify_row(1, 1)[0] == 1.0


def test_a_time_that_is_none_is_left_out() -> None:
    """Guards against: one NaN after which every cost of a bucket is NaN for good."""
    model = costs()
    model.set_batch(2, 100)
    model.observe(2, 4, 1, float("nan"), float("nan"))
    model.observe(2, 4, 1, 0.5, 3.3)
    model.set_batch(2, 100)
    assert model.verify_row(4, 4)[0] == pytest.approx(3.3)
    assert model.draft_ms(2, 1) == pytest.approx(0.5)


def test_a_slow_phase_is_not_held_against_the_buckets_in_use() -> None:
    """Guards against: a bucket that was used only while the card was slow, and is then avoided for good."""
    model = costs()
    for speed, buckets in ((1.0, [2] * 40), (1.2, [2, 4] * 5), (1.0, [2] * 40)):
        for tokens in buckets:
            model.set_batch(2, 100)
            model.observe(2, tokens, 0, 0.0, speed * {2: 2.0, 4: 3.0}[tokens])
    model.set_batch(2, 100)
    # A quarter of the phase stays: its first round could have been the bucket's own.
    assert model.verify_row(2, 4).tolist() == pytest.approx([2.0, 3.0, 3.0], rel=0.06)
    for _ in range(60):  # what is the bucket's own is learnt all the same
        model.observe(2, 4, 0, 0.0, 3.6)
        model.observe(2, 2, 0, 0.0, 2.0)
    model.set_batch(2, 100)
    assert model.verify_row(2, 4).tolist() == pytest.approx([2.0, 3.6, 3.6], rel=0.04)


def test_noise_does_not_raise_a_bucket_that_fell_out_of_use() -> None:
    """Guards against: a bucket that looks dearer with every round of another one, and is never used again."""
    model = costs()
    model.set_batch(2, 100)
    for _ in range(30):
        model.observe(2, 2, 0, 0.0, 2.0)
        model.observe(2, 4, 0, 0.0, 3.0)
    for noise in np.random.default_rng(0).normal(0.0, 0.05, 20_000):
        model.observe(2, 2, 0, 0.0, 2.0 * (1.0 + noise))
    model.set_batch(2, 100)
    assert model.verify_row(2, 4).tolist() == pytest.approx([2.0, 3.0, 3.0], rel=0.04)


def test_stored_profile_holds_no_ratios(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against: a bad day's drift that is kept for good, and a profile of another engine."""
    model = costs()
    for _ in range(50):
        model.observe(1, 2, 1, 0.5, 9.0)
    store_profile(tmp_path, KEY, model)
    again = load_profile(tmp_path, KEY, 3)
    assert again is not None and again.kv_lens == (100, 300)
    assert again.drift()["updates"] == 0
    again.set_batch(1, 100)
    assert again.verify_row(1, 4).tolist() == [1.0, 1.2, 1.2, 1.2]
    assert load_profile(tmp_path, ProfileKey("other", "torch-cuda", "a card", "f", 1), 3) is None
    (path,) = tmp_path.iterdir()
    for damaged in ("{", json.dumps(json.loads(path.read_text()) | {"buckets": [{"requests": 1}]})):
        path.write_text(damaged)
        with caplog.at_level(logging.WARNING):
            assert load_profile(tmp_path, KEY, 3) is None
        assert "measuring step costs again" in caplog.text
        caplog.clear()


def test_budgets_are_found_on_device_costs() -> None:
    """Guards against: a cost model that the decision cannot read, or buckets that it does not fill."""
    model = costs()
    model.set_batch(2, 100)
    limits = np.array([3, 3], np.int32)
    survival = np.array([[0.9, 0.8, 0.01], [0.9, 0.7, 0.01]], np.float32)
    plain, drafted = find_budgets(
        survival, limits, np.zeros_like(limits), 2, model, (0, 3), sampling_rows=2
    )
    assert (plain.budget, plain.cost_ms) == (0, 2.0)
    assert drafted.budget == 2  # fills the bucket of 4, and no further
    assert drafted.cost_ms == pytest.approx(3.0 + 1.7)


def test_sizes_cover_and_pad_little() -> None:
    """Guards against: a round that fits no bucket, and buckets so coarse that padding costs a quarter."""
    for last in (1, 7, 8, 100, 512, 4096):
        sizes = sizes_up_to(last)
        assert sizes[0] == 1 and sizes[-1] == last and list(sizes) == sorted(set(sizes))
        assert all(padded(size, sizes) >= size for size in range(1, last + 1))
        assert all(b / a <= 1.26 for a, b in pairwise(sizes) if a >= 4)
    assert request_sizes(1) == (1,)
    assert request_sizes(20) == (1, 2, 4, 6, 8, 12, 16, 20)
    assert token_sizes_for(4, 2, 3)[0] == 3 and token_sizes_for(4, 2, 3)[-1] == 16
