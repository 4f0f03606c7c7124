"""Random and adversarial draft trees, and logits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Generator = np.random.Generator


def random_tree(g: Generator, num_drafts: int, levels: int, max_children: int = 4) -> Ints:
    """Paths [K+1, levels+1] of a random tree, nodes numbered level by level; it may have fewer drafts."""
    parents: list[int] = [-1]
    last_level = [0]
    for _ in range(levels):
        level = []
        for parent in last_level:
            for _ in range(int(g.integers(0, max_children + 1))):
                if len(parents) <= num_drafts:
                    level.append(len(parents))
                    parents.append(parent)
        last_level = level
    return paths_of(parents, num_drafts, levels)


def chain(num_drafts: int) -> Ints:
    """Paths [K+1, K+1] of a chain."""
    return paths_of(list(range(-1, num_drafts)), num_drafts, num_drafts)


def paths_of(parents: list[int], num_drafts: int, levels: int) -> Ints:
    """One row a node, from the root to it, unless it is an inner node of a later row."""
    paths = np.full((num_drafts + 1, levels + 1), -1, np.int32)
    leaves = [node for node in range(len(parents)) if node not in parents]
    for row, leaf in enumerate(leaves):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths[row, : len(path)] = path[::-1]
    return paths


def trim_case(seed: int, rows: int, drafts: int, levels: int) -> dict[str, Any]:
    """features [R,K] f32, next_draft_lens [R], paths [R,K+1,levels+1], coefficients, budget and floor."""
    g = np.random.default_rng(seed)
    one = random_tree(g, drafts, levels)
    is_chain = seed % 5 == 0 and levels == drafts
    trees = [chain(drafts)] * rows if is_chain else [one] * rows
    if not is_chain and seed % 3 == 0:
        trees = [random_tree(g, drafts, levels) for _ in range(rows)]
    shape = (rows, drafts)
    make: list[Callable[[], Any]] = [
        lambda: g.normal(0, 2, shape),
        lambda: np.zeros(shape),  # all ties within a level
        lambda: g.choice([-15.0, 0.0, 15.0], shape),
        lambda: g.choice([np.nan, np.inf, -np.inf, 1.0], shape),
        lambda: np.broadcast_to(g.normal(0, 2, drafts), shape).copy(),  # requests tie
        lambda: g.normal(0, 60, shape),  # saturated, products underflow
        lambda: np.full(shape, 90.0),  # every survival is 1
    ]
    features = make[seed % len(make)]().astype(np.float32)
    lens = g.integers(1, drafts + 1, rows) if seed % 2 else np.full(rows, drafts)
    if seed % 11 == 0:
        lens = g.integers(-1, drafts + 3, rows)
    total = int(np.clip(lens, 0, drafts).sum())
    return {
        "features": features,
        "next_draft_lens": lens.astype(np.int32),
        "paths": np.stack(trees),
        "coefficients": g.normal([1.0] + [0.0] * levels, 0.3).astype(np.float32),
        "budget": int(g.choice([0, total, total + 7, int(g.integers(0, total + 1))])),
        "floor": int(g.choice([0, 1, 1, 2, 5])),
        "total_multiple": int(g.choice([1, 1, 8, 16])),
    }
