"""What scoring and trimming of draft trees mean, in NumPy; the kernels are tested against this file.

A tree has a root and K drafts, numbered level by level: node 0 is the root, draft k is node k + 1.
``paths`` [R, K+1, L+1] hold a path from the root in each row, −1 behind its end, over L levels. A chain is
a tree with one path. What is verified of a request is a prefix of its drafts.

Objective of the trim: the sum of the survivals of what is verified, which is the expected number of
accepted drafts, for a given total. Survival of a node is the product of the confidences along its path.
As it may rise along the order of the drafts, it is replaced by the means of pools that make it fall (pool
adjacent violators): whole pools in the order of their means are the best prefixes for their total.

Invariants: confidences in, integers from there on, so that every implementation agrees bit for bit;
total order of the drafts of a batch: mean descending, position ascending, request ascending.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtllm_av.plugins.reference import Floats, Ints, score_features

#: Survivals are compared as integers of so many binary places.
FRACTION_BITS = 30
#: Children of a node that are scored apart; further ones get the lowest feature.
MAX_CHILDREN = 16


def decode_tree(paths: ArrayLike) -> tuple[Ints, Ints]:
    """parent [N] and depth [N] of one request's nodes from its ``paths`` [N, L+1].

    A node without a path has depth 0 like the root, and parent −1; so has one whose parent does not come
    before it.
    """
    rows = np.asarray(paths, np.int32)
    num_nodes = rows.shape[0]
    parent = np.full(num_nodes, -1, np.int32)
    depth = np.zeros(num_nodes, np.int32)
    for row in rows:
        for level in range(1, row.size):
            node, above = int(row[level]), int(row[level - 1])
            if 0 < node < num_nodes and 0 <= above < node:
                parent[node], depth[node] = above, level
    return parent, depth


def score_level(
    logits: ArrayLike,
    num_rows: int,
    paths: ArrayLike,
    *,
    level: int,
    vocab_size: int,
    feature_bound: float = 15.0,
) -> Floats:
    """Features [R, K] f32 of the drafts of level ``level`` + 1, 0 at all others.

    ``logits`` [M, V] f16/bf16/f32 hold a row for each node of ``level`` that has children, by request and
    node; the first ``num_rows`` are valid. The j-th child gets the log-odds of the row's j-th greatest
    probability. A row that cannot be scored (NaN, +inf, only −inf, not valid) gives NaN.
    """
    values = np.asarray(logits).astype(np.float64)[:, :vocab_size]
    trees = np.asarray(paths, np.int32)
    features = np.zeros((trees.shape[0], trees.shape[1] - 1), np.float32)
    row = 0
    for request, tree in enumerate(trees):
        parent, depth = decode_tree(tree)
        for node in np.flatnonzero((depth == level) & np.isin(np.arange(depth.size), parent)):
            children = np.flatnonzero((parent == node) & (depth == level + 1))
            if children.size:
                feature = _features_of_row(values, row, num_rows, children.size, feature_bound)
                features[request, children - 1] = feature
            row += 1
    return features


def _features_of_row(
    values: NDArray[np.float64], row: int, num_rows: int, num_children: int, bound: float
) -> NDArray[np.float64]:
    features = np.full(num_children, np.nan)
    if row >= num_rows or not np.isfinite(np.max(values[row])):
        return features
    best = np.sort(values[row])[::-1]
    with np.errstate(divide="ignore"):
        weights = np.exp(best - best[0])
        for j in range(num_children):
            if j >= min(MAX_CHILDREN, best.size):
                features[j] = -bound
                continue
            others = weights[:j].sum() + weights[j + 1 :].sum()
            features[j] = best[j] - best[0] - np.log(others)
    return np.clip(features, -bound, bound)


def node_confidence(features: ArrayLike, paths: ArrayLike, coefficients: ArrayLike) -> Floats:
    """Confidence [R, K] f32 of each draft given that its parent is accepted; NaN features have none (0).

    ``coefficients`` [1 + L]: slope, then the intercept of each level.
    """
    x = np.asarray(features, np.float32)
    confidence = np.zeros_like(x)
    for request, tree in enumerate(np.asarray(paths)):
        depth = decode_tree(tree)[1][1:]
        for draft in np.flatnonzero(depth):
            feature = x[request, draft].reshape(1, 1, 1)
            one = score_features(feature, coefficients, [depth[draft] - 1], dtype=np.float32)
            confidence[request, draft] = one.item()
    return confidence


def trim_tree(
    confidence: ArrayLike,
    draft_lens: ArrayLike,
    paths: ArrayLike,
    *,
    budget: int,
    floor: int = 1,
    total_multiple: int = 1,
) -> Ints:
    """Drafts [R] int32 to verify of each request: the best of the batch in the total order above.

    ``confidence`` [R, K] f32; ``draft_lens`` [R] int32. Each request keeps at least min(``floor``,
    draft_lens), and R + the total is rounded up to ``total_multiple``, as far as there are drafts: R roots
    and the drafts are the rows of the next verify pass, and equal totals share a captured graph.
    """
    p = np.asarray(confidence, np.float32)
    num_requests, num_drafts = p.shape
    lens = np.clip(draft_lens, 0, num_drafts).astype(np.int32)
    floors = np.minimum(max(floor, 1), lens)
    rows = num_requests + max(min(budget, int(lens.sum())), int(floors.sum()))
    rows = -(-rows // total_multiple) * total_multiple
    quota = min(rows - num_requests, int(lens.sum())) - int(floors.sum())
    slots = []
    for request, tree in enumerate(np.asarray(paths)):
        survival = node_survival(p[request], int(lens[request]), tree)
        keys = pooled_means(survival[: lens[request]])
        for position in range(floors[request], lens[request]):
            slots.append((-keys[position], position, request))
    verified = floors.copy()
    for _, _, request in sorted(slots)[:quota]:
        verified[request] += 1
    return verified


def node_survival(confidence: ArrayLike, draft_len: int, paths: ArrayLike) -> Floats:
    """Survival [K] f32 of one request's drafts: f32 products from the root on, denormals and NaN = 0."""
    p = np.asarray(confidence, np.float32)
    parent, depth = decode_tree(paths)
    tiny = np.finfo(np.float32).tiny
    survival = np.zeros(p.size + 1, np.float32)
    survival[0] = 1
    for node in range(1, draft_len + 1):
        own = p[node - 1]
        if depth[node] and own >= tiny:
            product = survival[parent[node]] * own
            survival[node] = product if product >= tiny else 0
    return survival[1:]


def pooled_means(survival: ArrayLike) -> list[int]:
    """Falling keys of one request's drafts: of each the mean of its pool in ``FRACTION_BITS`` binary places.

    Neighbouring pools are joined while the latter has the greater mean, compared exactly.
    """
    pools: list[tuple[int, int]] = []  # sum, count
    for value in np.asarray(survival, np.float64):
        total, count = int(value * (1 << FRACTION_BITS)), 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total // count for total, count in pools for _ in range(count)]
