"""The definitions of scoring and trimming trees, against brute force and against the chain's."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.tree_cases import chain, paths_of, random_tree, trim_case
from trtllm_av.plugins import reference, tree_reference
from trtllm_av.plugins.plugin_spec import PLUGINS

KERNELS = Path(tree_reference.__file__).with_name("kernels")


def test_a_chain_is_trimmed_like_a_chain() -> None:
    """Guards against: a second order of drafts for chains, so that two paths serve different lengths."""
    g = np.random.default_rng(1)
    for _ in range(60):
        rows, drafts = int(g.integers(1, 6)), int(g.integers(1, 8))
        confidence = g.choice([0.5, 0.75, 0.9, 1.0], (rows, drafts)).astype(np.float32)
        lens = g.integers(1, drafts + 1, rows)
        budget = int(g.integers(0, rows * drafts + 1))
        _, wanted, _ = reference.trim_drafts(
            confidence, lens, np.ones(rows), np.ones(rows), [budget]
        )
        got = tree_reference.trim_tree(
            confidence, lens, np.stack([chain(drafts)] * rows), budget=budget
        )
        np.testing.assert_array_equal(got, wanted)


def test_no_prefixes_are_better_where_pools_are_whole() -> None:
    """Guards against: an order that is no best use of the budget. All prefixes of small batches are tried."""
    g, num_compared = np.random.default_rng(2), 0
    for _ in range(40):
        trees = [random_tree(g, 5, 3) for _ in range(2)]
        confidence = g.random((2, 5)).astype(np.float32)
        values = [tree_reference.node_survival(confidence[r], 5, trees[r]) for r in range(2)]
        keys = [tree_reference.pooled_means(v) for v in values]
        for budget in range(2, 11):
            lens = tree_reference.trim_tree(
                confidence, [5, 5], np.stack(trees), budget=budget, floor=1
            )
            assert lens.sum() == budget
            if any(0 < n < 5 and keys[r][n - 1] == keys[r][n] for r, n in enumerate(lens)):
                continue  # the budget ends inside a pool
            if any(keys[r][0] < keys[1 - r][n] for r, n in enumerate(lens[::-1]) if n < 5):
                continue  # the floor decides
            num_compared += 1
            gained = sum(values[r][: lens[r]].sum() for r in range(2))
            best = max(
                values[0][:a].sum() + values[1][: budget - a].sum()
                for a in range(1, 6)
                if 1 <= budget - a <= 5
            )
            assert gained >= best - 1e-6
    assert num_compared > 50


def test_total_is_rounded_up_to_a_multiple() -> None:
    """Guards against: a graph captured for every total, and a floor or draft count that is overrun."""
    for seed in range(80):
        case = trim_case(seed, 5, 12, 3)
        confidence = tree_reference.node_confidence(
            case["features"], case["paths"], case["coefficients"]
        )
        lens = np.clip(case["next_draft_lens"], 0, 12)
        floor = max(case["floor"], 1)
        got = tree_reference.trim_tree(
            confidence,
            case["next_draft_lens"],
            case["paths"],
            budget=case["budget"],
            floor=case["floor"],
            total_multiple=8,
        )
        assert (got <= lens).all() and (got >= np.minimum(floor, lens)).all()
        total = 5 + got.sum()
        least = 5 + max(min(case["budget"], lens.sum()), np.minimum(floor, lens).sum())
        assert least <= total < least + 8
        assert total % 8 == 0 or total == 5 + lens.sum()


def test_pools_fall_and_keep_the_sum() -> None:
    """Guards against: keys that rise along a request, so that what is admitted is no prefix."""
    g = np.random.default_rng(3)
    for _ in range(50):
        survival = g.choice([0.0, 0.1, 0.25, 0.5, 0.9, 1.0], int(g.integers(1, 20)))
        keys = tree_reference.pooled_means(survival)
        assert all(a >= b for a, b in itertools.pairwise(keys))
        assert sum(keys) / 2**tree_reference.FRACTION_BITS == pytest.approx(
            survival.sum(), abs=1e-6
        )


def test_survival_is_the_product_along_the_path() -> None:
    """Guards against: the product along the order of the drafts, which passes through siblings."""
    #      0 ─ 1, 2;  1 ─ 3;  2 ─ 4;  4 ─ 5
    paths = paths_of([-1, 0, 0, 1, 2, 4], 6, 3)
    p = np.array([0.5, 0.25, 0.5, 1.0, 0.5, 0.9], np.float32)
    survival = tree_reference.node_survival(p, 6, paths)
    np.testing.assert_array_equal(survival, np.float32([0.5, 0.25, 0.25, 0.25, 0.125, 0]))
    np.testing.assert_array_equal(
        tree_reference.node_survival(p, 3, paths), np.float32([0.5, 0.25, 0.25, 0, 0, 0])
    )


def test_children_get_the_log_odds_of_their_own_tokens() -> None:
    """Guards against: the top token's confidence for every child, and rows taken for other nodes."""
    paths = np.stack([paths_of([-1, 0, 0, 1, 2, 2], 5, 2)] * 2)
    g = np.random.default_rng(4)
    logits = g.normal(0, 2, (4, 11))
    features = tree_reference.score_level(logits, 4, paths, level=1, vocab_size=10)
    for request, row, children in ((0, 0, [2]), (0, 1, [3, 4]), (1, 2, [2]), (1, 3, [3, 4])):
        q = np.sort(np.exp(logits[row, :10]) / np.exp(logits[row, :10]).sum())[::-1]
        for rank, draft in enumerate(children):
            wanted = np.log(q[rank] / (1 - q[rank]))
            assert features[request, draft] == pytest.approx(wanted, rel=1e-5)
    assert not features[:, :2].any()


def test_first_child_is_scored_like_a_chain() -> None:
    """Guards against: another feature for the same draft, which the coefficients do not fit."""
    g = np.random.default_rng(5)
    logits = g.normal(0, 4, (3, 40)).astype(np.float32)
    logits[1, 3] = np.nan
    wanted, _ = reference.score_drafts(
        logits[:, None], np.ones(3), [1.0, 0.0], [0], vocab_size=39, dtype=np.float64
    )
    got = tree_reference.score_level(logits, 3, np.stack([chain(1)] * 3), level=0, vocab_size=39)
    assert np.isnan(got[1, 0]) and wanted[1] == 0
    np.testing.assert_allclose(got[[0, 2], 0], wanted[[0, 2], 0, 0], rtol=1e-5)
    late = tree_reference.score_level(logits, 2, np.stack([chain(1)] * 3), level=0, vocab_size=39)
    assert np.isnan(late[2, 0])


def test_paths_that_are_no_tree() -> None:
    """Guards against: reading outside the tables, or for ever, when paths hold anything."""
    g = np.random.default_rng(6)
    for _ in range(50):
        parent, depth = tree_reference.decode_tree(g.integers(-3, 12, (9, 4)))
        assert (parent < np.arange(9)).all() and ((depth == 0) == (parent == -1)).all()


def test_limits_are_the_kernels() -> None:
    """Guards against: a batch or tree that is let through and does not fit the kernels' tables."""
    text = "".join((KERNELS / name).read_text("utf-8") for name in ("tree.cuh", "tree_trim.cu"))
    limit = {name: int(value) for name, value in re.findall(r"int (MAX_\w+) = (\d+);", text)}
    levels = limit["MAX_COEFFICIENTS"] - 1
    requests, drafts = limit["MAX_REQUESTS"], limit["MAX_NODES"] - 1
    assert (requests, drafts) == (512, 256)
    most = {name: {one.name: one.most for one in PLUGINS[name].limits} for name in PLUGINS}
    assert most["ScoreLevel"] == {"R": requests, "N": drafts + 1, "D": levels + 1}
    assert most["TrimTree"] == {"R": requests, "K": drafts, "D": levels + 1}
    assert limit["MAX_CHILDREN"] == tree_reference.MAX_CHILDREN
