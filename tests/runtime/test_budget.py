"""The budget at one depth: every B looked at, ties, floors, and what never changes it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime.closed_loop import COST_PROFILE
from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.budget import BudgetChoice, find_budgets, lens_at_depth
from trtllm_av.runtime.cost_model import CostModel

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


def model(
    verify: list[list[float]], limit: int = 0, num_positions: int = 3, draft_ms: float = 0.0
) -> CostModel:
    return CostModel.from_table(
        {
            "unit": "ms",
            "graph_limit_tokens": limit,
            "verify_ms_by_tokens": verify,
            "draft_ms_by_requests": [[1, draft_ms]],
        },
        num_positions=num_positions,
        is_block=True,
    )


def find(
    survival: Any,
    cost_model: CostModel,
    *,
    limits: Any = None,
    floors: Any = None,
    base_tokens: int | None = None,
    sampling_rows: int | None = None,
    depth: int | None = None,
    dtype: type = np.float32,
) -> BudgetChoice:
    survival = np.asarray(survival, dtype)
    rows, positions = survival.shape
    (choice,) = find_budgets(
        survival,
        np.full(rows, positions, np.int32) if limits is None else np.array(limits, np.int32),
        np.zeros(rows, np.int32) if floors is None else np.array(floors, np.int32),
        rows if base_tokens is None else base_tokens,
        cost_model,
        (positions if depth is None else depth,),
        sampling_rows=rows if sampling_rows is None else sampling_rows,
        dtype=dtype,
    )
    return choice


def test_the_rest_of_a_paid_bucket_is_used() -> None:
    """Guards against case 4: the first maximum leaves slots of survival 0 unused though they are padding."""
    padded = model([[1, 1.0], [8, 1.5], [16, 9.0]], limit=16)
    assert find([[0.9, 0.0, 0.0]], padded).budget == 3
    # Without graphs there is no padding to fill.
    line = model([[1, 1.0], [2, 1.2], [8, 3.0]])
    assert find([[0.9, 0.0, 0.0]], line).budget == 1
    # The bucket ends before the drafts do.
    short = model([[1, 1.0], [3, 1.5], [8, 9.0]], limit=8)
    assert find([[0.9, 0.0, 0.0]], short).budget == 2


def test_the_first_descent_is_not_the_best() -> None:
    """Guards against case 5: a greedy search stops at index 1 of a saw-toothed objective."""
    rates = np.array([0.40, 0.46, 0.429, 0.471, 0.513, 0.55, 0.583, 0.592])
    survival = np.array([0.15, 0.15, 0.14, 0.14, 0.13, 0.12, 0.11])
    expected = 1 + np.concatenate([[0], np.cumsum(survival)])
    cost = expected / rates
    verify = [[tokens + 1, float(ms)] for tokens, ms in enumerate(cost)]
    choice = find([survival], model(verify, num_positions=7))
    # The running maximum lifts no cost above the last one, where the best is.
    assert choice.budget == 7
    assert choice.tokens_per_ms == pytest.approx(0.592, rel=1e-6)


def test_the_survival_order_decides_not_the_requests() -> None:
    """Guards against case 3: exact ties (σ(20) is 1 in f32) that make B depend on the batch order."""
    steps = model([[1, 1.0], [9, 4.0]], num_positions=2)
    tied = np.float32(1 / (1 + np.exp(-20.0)))
    rows = [[tied, 0.3], [tied, tied], [0.4, 0.3], [tied, 0.3]]
    choices = {find(order, steps)[:2] for order in itertools.permutations(rows)}
    assert len(choices) == 1


def test_floors_are_counted_and_paid() -> None:
    """Guards against B < Σ floors, and floors that are expected to emit nothing."""
    steep = model([[1, 1.0], [64, 640.0]])
    survival = [[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]]
    choice = find(survival, steep, floors=[0, 2])
    assert choice.budget == 2
    assert choice.expected_tokens == pytest.approx(2 + 0.5 + 0.4, rel=1e-6)
    cheap = model([[1, 1.0], [64, 1.01]])
    choice = find(survival, cheap, floors=[0, 2])
    assert choice.budget == 6
    assert choice.expected_tokens == pytest.approx(2 + 2.4 + 1.2, rel=1e-6)


def test_floors_are_drafted_at_any_depth_and_set_the_drafters_cost() -> None:
    """Guards against depth 0 that forgets the drafting of an adaptive=False row."""
    table = {
        "unit": "ms",
        "graph_limit_tokens": 0,
        "verify_ms_by_tokens": [[1, 1.0], [8, 8.0]],
        "draft_ms_by_requests": [[1, 0.3], [2, 0.6]],
    }
    drafter = CostModel.from_table(table, num_positions=3)
    survival = np.array([[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]])
    choice = find(survival, drafter, floors=[0, 2], depth=0)
    # One row drafts 2 of 3 positions; base 2 + floor 2 tokens are verified.
    assert choice.cost_ms == pytest.approx(0.2 + 4.0)
    assert choice.budget == 2
    lens = lens_at_depth(np.array([3, 3, 0, 2], np.int32), np.array([0, 2, 0, 0], np.int32), 1)
    assert lens.tolist() == [1, 2, 0, 1]


def test_prefill_rows_cost_tokens_and_draft_nothing() -> None:
    """Guards against a chunk of 100 prompt tokens counted as 100 rows that emit one token each."""
    steps = model([[1, 1.0], [64, 4.0], [256, 40.0]], limit=256)
    survival = [[0.9, 0.8, 0.7], [0.9, 0.9, 0.9]]
    choice = find(survival, steps, limits=[3, 0], base_tokens=101, sampling_rows=1)
    assert choice.budget == 3
    assert choice.expected_tokens == pytest.approx(1 + 2.4, rel=1e-6)
    assert choice.cost_ms == 40.0


@pytest.mark.parametrize("rows", [0, 1])
def test_small_batches(rows: int) -> None:
    """Guards against case 11: a batch drained to zero, one request, K = 1, B = 0."""
    steep = model([[1, 1.0], [64, 640.0]], num_positions=1)
    choice = find(np.full((rows, 1), 0.5), steep)
    assert choice.budget == 0
    assert choice.expected_tokens == rows
    assert find(np.full((rows, 1), 0.5), steep, depth=0).budget == 0


def test_nan_survival_counts_as_zero() -> None:
    """Guards against NaN that sorts in front of every real slot."""
    line = model([[1, 1.0], [64, 2.0]])
    choice = find([[0.9, np.nan, np.nan], [0.8, 0.7, 0.6]], line)
    assert choice.expected_tokens == pytest.approx(2 + 0.9 + 0.8 + 0.7 + 0.6, rel=1e-6)


def brute_force(
    survival: NDArray[Any], lens: NDArray[Any], floors: NDArray[Any], base: int, costs: CostModel
) -> tuple[float, int]:
    """The best rate, and the largest budget that has it inside the bucket of the first one."""
    floored = sorted(survival[r, i] for r in range(len(lens)) for i in range(floors[r]))
    free = [survival[r, i] for r in range(len(lens)) for i in range(floors[r], lens[r])]
    free.sort(reverse=True)
    draft_ms = costs.draft_ms(int((lens > 0).sum()), int(lens.max(initial=0)))
    rates = []
    for count in range(len(free) + 1):
        tokens = len(lens) + sum(map(float, floored)) + sum(map(float, free[:count]))
        total = base + len(floored) + count
        rates.append(tokens / (float(costs.verify_ms(np.array([total]))[0]) + draft_ms))
    best = max(rates)
    first = next(i for i, rate in enumerate(rates) if rate >= best * (1 - 1e-12))
    bucket = costs.bucket(base + len(floored) + first)
    last = max(
        i
        for i, rate in enumerate(rates)
        if rate >= best * (1 - 1e-12) and costs.bucket(base + len(floored) + i) == bucket
    )
    return best, len(floored) + last


@EXAMPLES
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 5), st.integers(0, 6))
def test_equals_trying_every_budget(seed: int, rows: int, positions: int, depth: int) -> None:
    """Guards against any slip in sorting, slicing, flooring or bucketing."""
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.choice([0.0, 0.3, 0.5, 0.9, 1.0], (rows, positions)), axis=1)
    limits = rng.integers(0, positions + 1, rows).astype(np.int32)
    floors = np.where(rng.random(rows) < 0.3, rng.integers(0, limits + 1), 0).astype(np.int32)
    sizes = np.unique(rng.integers(1, 60, 6))
    verify = [[int(size), float(ms)] for size, ms in zip(sizes, rng.uniform(1, 9, 6), strict=False)]
    verify.append([80, 10.0])
    limit = int(rng.integers(0, 90))
    costs = model(verify, limit, positions, draft_ms=float(rng.uniform(0, 3)))
    base = rows + int(rng.integers(0, 20))
    choice = find(
        survival,
        costs,
        limits=limits,
        floors=floors,
        base_tokens=base,
        depth=depth,
        dtype=np.float64,
    )
    lens = lens_at_depth(limits, floors, depth)
    rate, budget = brute_force(survival, lens, floors, base, costs)
    assert choice.tokens_per_ms == pytest.approx(rate, rel=1e-9)
    assert choice.budget == budget
    assert floors.sum() <= choice.budget <= lens.sum()


@EXAMPLES
@given(st.integers(0, 2**32 - 1), st.integers(1, 16))
def test_the_trim_admits_what_was_decided(seed: int, rows: int) -> None:
    """Guards against a decision and a trim that count floors or drafts differently."""
    rng = np.random.default_rng(seed)
    costs = CostModel.from_table(COST_PROFILE, num_positions=4, is_block=True)
    confidence = rng.random((rows, 4)).astype(np.float32)
    limits = rng.integers(0, 5, rows).astype(np.int32)
    floors = (limits * (rng.random(rows) < 0.2)).astype(np.int32)
    choice = find(np.cumprod(confidence, axis=1), costs, limits=limits, floors=floors, depth=3)
    lens = lens_at_depth(limits, floors, 3)
    survival, verify_lens, _ = torch_ops.trim_drafts(
        torch.from_numpy(confidence),
        torch.from_numpy(lens),
        torch.ones(rows, dtype=torch.int32),
        torch.from_numpy(floors),
        torch.tensor([choice.budget], dtype=torch.int32),
    )
    assert int(verify_lens.sum()) == choice.budget
    admitted = np.arange(4) < verify_lens.numpy()[:, None]
    expected = rows + float(survival.numpy()[admitted].sum(dtype=np.float64))
    assert expected == pytest.approx(choice.expected_tokens, rel=1e-5)
