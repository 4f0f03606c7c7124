"""The staircase, the curve above it, and the drafter's cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.closed_loop import COST_PROFILE
from trtllm_av.runtime.cost_model import CostModel


def model(
    verify: list[list[float]], limit: int = 0, *, is_block: bool = False, **draft: Any
) -> CostModel:
    table: dict[str, Any] = {
        "unit": "ms",
        "graph_limit_tokens": limit,
        "verify_ms_by_tokens": verify,
        **(draft or {"draft_ms_by_requests": [[1, 0.7], [8, 1.4]]}),
    }
    return CostModel.from_table(table, num_positions=7, is_block=is_block)


def costs(of: CostModel, *tokens: int) -> list[float]:
    return of.verify_ms(np.array(tokens)).tolist()


def test_below_the_graph_limit_costs_are_a_staircase() -> None:
    """Guards against interpolation inside a bucket: 121 tokens run padded and cost what 128 cost."""
    steps = model([[8, 1.0], [16, 2.0], [32, 3.0], [64, 10.0]], limit=32)
    assert costs(steps, 0, 1, 8, 9, 16, 17, 31, 32) == [1, 1, 1, 2, 2, 3, 3, 3]
    assert [steps.bucket(tokens) for tokens in (0, 1, 8, 9, 32, 33, 50)] == [
        8,
        8,
        8,
        16,
        32,
        33,
        50,
    ]


def test_above_the_limit_only_points_above_it_count() -> None:
    """Guards against a line drawn across the jump past the limit, which hides it."""
    jump = model([[8, 1.0], [16, 2.0], [32, 50.0], [64, 60.0]], limit=16)
    assert costs(jump, 16, 17, 32, 48, 64, 96) == [2, 50, 50, 55, 60, 70]
    one_above = model([[8, 1.0], [16, 2.0], [32, 50.0]], limit=16)
    assert costs(one_above, 16, 17, 32, 48) == [2, 50, 50, 98]
    none_above = model([[8, 1.0], [16, 2.0]], limit=16)
    assert costs(none_above, 16, 24) == [2, 3]
    assert none_above.bucket(24) == 24


def test_without_graphs_costs_are_a_line() -> None:
    """Guards against padding on an engine that does not pad (a CPU)."""
    line = model([[1, 1.0], [9, 9.0]])
    assert costs(line, 1, 4, 9, 19) == [1, 4, 9, 19]
    assert line.bucket(4) == 4


def test_dips_are_levelled() -> None:
    """Guards against a budget raised because a larger step was measured a little faster."""
    dips = model([[8, 3.0], [16, 2.5], [32, 4.0], [64, 9.0], [128, 8.0]], limit=32)
    assert costs(dips, 8, 16, 32, 64, 100, 128, 256) == [3, 3, 4, 9, 9, 9, 9]


def test_draft_cost_by_requests() -> None:
    """Guards against a drafter charged in full at every depth, or a block drafter charged in parts."""
    autoregressive = model([[1, 1.0], [8, 2.0]])
    assert autoregressive.draft_ms(1, 7) == pytest.approx(0.7)
    assert autoregressive.draft_ms(1, 1) == pytest.approx(0.1)
    assert autoregressive.draft_ms(4, 7) == pytest.approx(1.0)
    assert autoregressive.draft_ms(15, 7) == pytest.approx(2.1)
    assert autoregressive.draft_ms(0, 7) == autoregressive.draft_ms(4, 0) == 0.0
    block = model([[1, 1.0], [8, 2.0]], is_block=True)
    assert block.draft_ms(1, 1) == block.draft_ms(1, 7) == pytest.approx(0.7)
    assert block.draft_ms(1, 0) == 0.0


def test_draft_cost_by_depth() -> None:
    """Guards against losing the measured shape over depth, or the refresh at depth 0."""
    points = [[1, 0, 0.1], [1, 1, 1.0], [1, 3, 2.0], [4, 1, 4.0], [4, 3, 8.0]]
    by_depth = model([[1, 1.0], [8, 2.0]], draft_ms_by_requests_and_depth=points)
    assert by_depth.draft_ms(1, 0) == pytest.approx(0.1)
    assert by_depth.draft_ms(1, 2) == pytest.approx(1.5)
    assert by_depth.draft_ms(1, 6) == pytest.approx(4.0)
    assert by_depth.draft_ms(4, 3) == pytest.approx(8.0)
    assert by_depth.draft_ms(2, 1) == pytest.approx(2.0)
    deep_only = model([[1, 1.0], [8, 2.0]], draft_ms_by_requests_and_depth=[[1, 7, 7.0]])
    assert deep_only.draft_ms(1, 2) == pytest.approx(2.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.integers(1, 300), st.floats(0.01, 100), min_size=2, max_size=9),
    st.integers(0, 300),
)
def test_more_tokens_never_cost_less(points: dict[int, float], limit: int) -> None:
    """Guards against a fall anywhere: at a dip, at the limit, behind the last point."""
    verify = [[size, points[size]] for size in sorted(points)]
    verify[-1][1] = 101.0  # not flat
    some = model(verify, limit)
    tokens = np.arange(400)
    cost = some.verify_ms(tokens)
    assert (np.diff(cost) >= -1e-9).all()
    padded = np.array([some.bucket(int(count)) for count in tokens])
    assert (padded >= tokens).all()
    np.testing.assert_array_equal(some.verify_ms(padded), cost)
    np.testing.assert_array_equal(some.verify_row(5, 20), cost[5:21])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 10), min_size=6, max_size=6), st.booleans())
def test_more_drafting_never_costs_less(values: list[float], is_block: bool) -> None:
    """Guards against noise in a profile that makes a deeper draft the cheaper one."""
    sizes = [[1, 1], [1, 3], [1, 7], [4, 1], [4, 3], [4, 7]]
    points = [[*size, value] for size, value in zip(sizes, values, strict=True)]
    some = model([[1, 1.0], [8, 2.0]], is_block=is_block, draft_ms_by_requests_and_depth=points)
    grid = np.array([[some.draft_ms(rows, depth) for depth in range(9)] for rows in range(9)])
    assert (np.diff(grid, axis=0) >= -1e-9).all()
    assert (np.diff(grid, axis=1) >= -1e-9).all()


def test_the_committed_profile_has_the_published_shape() -> None:
    """Guards against a test profile that lost the features the other tests rely on."""
    profile = CostModel.from_table(COST_PROFILE, num_positions=7)
    assert costs(profile, 121, 128) == [costs(profile, 128)[0]] * 2
    assert costs(profile, 769)[0] > 4 * costs(profile, 768)[0]
