"""The static tree of drafts that an EAGLE engine is given as ``eagle_choices``, seen from the host.

Drafts are numbered as TensorRT-LLM numbers them: by depth, then from left to right; draft k is node k + 1
and node 0 is the root. Its paths are the leaves' from left to right. A chain is a tree with one path.

Invariants: confidence and survival are those of the plugin up to rounding of f32 (the plugin's are the
ones that trim); labels follow the accepted path: a verified draft whose parent was accepted is labelled,
any other is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.plugins.tree_reference import decode_tree
from trtllm_av.runtime.errors import UsageError

_MOST_MEANS = 1 << 20  # means that are compared at once

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


class DraftTree:
    """The tree of ``choices`` in an engine of ``num_levels`` L levels and ``max_draft_len`` K drafts.

    ``choices`` are sorted; ``paths`` [P, L+1] int32 holds nodes from the root to each leaf, −1 behind it;
    ``parents`` [K] the node above each draft and ``depths`` [K] its level from 1 on, both 0 for drafts that
    the tree has not.
    """

    def __init__(
        self, choices: Sequence[Sequence[int]], *, num_levels: int, max_draft_len: int
    ) -> None:
        ordered = sorted((tuple(choice) for choice in choices), key=lambda c: (len(c), c))
        _check(ordered, num_levels, max_draft_len)
        self.choices = [list(choice) for choice in ordered]
        self.num_levels = num_levels
        self.num_drafts = max_draft_len
        number: dict[tuple[int, ...], int] = {(): 0}
        number.update({choice: index for index, choice in enumerate(ordered, start=1)})
        inner = {choice[:-1] for choice in ordered}
        leaves = sorted(choice for choice in ordered if choice not in inner)
        self.paths: Int32 = np.full((len(leaves), num_levels + 1), -1, np.int32)
        for row, leaf in enumerate(leaves):
            for level in range(len(leaf) + 1):
                self.paths[row, level] = number[leaf[:level]]
        template = np.full((max_draft_len + 1, num_levels + 1), -1, np.int32)
        template[: len(leaves)] = self.paths
        parents, depths = decode_tree(template)
        self.depths: Int32 = depths[1:]
        self.parents: Int32 = np.where(self.depths > 0, parents[1:], 0).astype(np.int32)

    @classmethod
    def chain(cls, num_levels: int) -> DraftTree:
        """One draft a level."""
        choices = [[0] * level for level in range(1, num_levels + 1)]
        return cls(choices, num_levels=num_levels, max_draft_len=num_levels)

    @property
    def is_chain(self) -> bool:
        return len(self.paths) == 1

    @property
    def most_non_leaves(self) -> int:
        """The most nodes of one level that have children."""
        inner = np.unique(self.parents[self.depths > 0])
        levels = np.concatenate([[0], self.depths])[inner]
        return int(np.bincount(levels).max())

    def confidence(self, features: Float32, coefficients: Float32) -> Float32:
        """σ(ω·f + β of the draft's level) [N,K] of ``features`` [N,K]; 0 for NaN and missing drafts."""
        intercepts = coefficients[np.maximum(self.depths, 1)]
        with np.errstate(over="ignore"):
            values = 1.0 / (1.0 + np.exp(-(coefficients[0] * features + intercepts)))
        return np.where((self.depths > 0) & np.isfinite(features), values, 0.0).astype(np.float32)

    def survival(self, confidence: Float32) -> Float32:
        """Products [N,K] of ``confidence`` [N,K] along every draft's path."""
        nodes = np.ones((len(confidence), self.num_drafts + 1), np.float32)
        for draft in range(self.num_drafts):
            nodes[:, draft + 1] = nodes[:, self.parents[draft]] * confidence[:, draft]
        return nodes[:, 1:]

    def falling(self, survival: Float32) -> Float32:
        """``survival`` [N,K] as gains of prefixes: means of the pools that make it fall along the order.

        What is verified is a prefix, and the best prefixes end where a pool ends.
        """
        if self.is_chain:
            return survival
        rows = max(_MOST_MEANS // self.num_drafts**2, 1)
        parts = [_pool(survival[i : i + rows]) for i in range(0, len(survival), rows)]
        return np.concatenate(parts) if parts else survival

    def labels(
        self, verified_lens: Int32, num_accepted_tokens: Int32, accepted_paths: Int32
    ) -> Float32:
        """1, 0 or NaN [N,K] for drafts of which the first ``verified_lens`` [N] were verified.

        ``num_accepted_tokens`` [N] counts the token behind the last accepted draft, ``accepted_paths`` [N]
        is the row of ``paths`` that was followed.
        """
        rows = np.arange(len(verified_lens))
        is_accepted = np.zeros((len(rows), self.num_drafts + 1), np.bool_)
        is_accepted[:, 0] = True
        followed = self.paths[np.clip(accepted_paths, 0, len(self.paths) - 1)]
        for level in range(1, self.num_levels + 1):
            node = followed[:, level]
            reached = rows[(num_accepted_tokens > level) & (node > 0)]
            is_accepted[reached, node[reached]] = True
        is_labelled = (
            is_accepted[:, self.parents]
            & (self.depths > 0)
            & (np.arange(self.num_drafts) < verified_lens[:, None])
        )
        return np.where(is_labelled, is_accepted[:, 1:], np.nan).astype(np.float32)

    def by_level(self, values: Float32) -> Float32:
        """``values`` [N,K] as rows of one draft a level, [N·W, L] with W the widest level; NaN fills up."""
        spread = np.full((len(values), self._width, self.num_levels), np.nan, np.float32)
        for level, drafts in enumerate(self._levels):
            spread[:, : drafts.size, level] = values[:, drafts]
        return spread.reshape(-1, self.num_levels)

    def level_sums(self, values: Float32) -> Float32:
        """Sums [N,L] of ``values`` [N,K] over the drafts of each level."""
        sums = [values[:, drafts].sum(axis=1) for drafts in self._levels]
        return np.stack(sums, axis=1)

    @cached_property
    def _levels(self) -> list[NDArray[np.intp]]:
        return [np.flatnonzero(self.depths == level + 1) for level in range(self.num_levels)]

    @cached_property
    def _width(self) -> int:
        return max(drafts.size for drafts in self._levels)


def _pool(survival: Float32) -> Float32:
    """min over starts a ≤ i of the max over ends b ≥ i of the mean of ``survival`` [N,K] over a … b."""
    size = survival.shape[1]
    sums = np.zeros((len(survival), size + 1))
    np.cumsum(survival, axis=1, out=sums[:, 1:])
    starts, ends = np.arange(size)[:, None], np.arange(size) + 1
    means = (sums[:, None, 1:] - sums[:, :-1, None]) / np.maximum(ends - starts, 1)
    means[:, ends <= starts] = -np.inf
    best = np.maximum.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    best[:, starts >= ends] = np.inf  # a start behind i
    pooled: Float32 = best.min(axis=1).astype(np.float32)
    return pooled


def _check(ordered: Sequence[tuple[Any, ...]], num_levels: int, max_draft_len: int) -> None:
    if not ordered:
        raise UsageError("eagle_choices is empty; give at least [[0]]")
    if len(ordered) > max_draft_len:
        raise UsageError(
            f"eagle_choices has {len(ordered)} entries, the engine takes {max_draft_len}; leave some out"
        )
    known = {()} | set(ordered)
    for choice in ordered:
        if not choice or len(set(ordered)) != len(ordered) or choice[:-1] not in known:
            raise UsageError(
                f"eagle_choices entry {list(choice)} is empty, there twice, or has no parent; list every "
                "node of the tree once"
            )
    if len(ordered[-1]) != num_levels:
        raise UsageError(
            f"eagle_choices reaches depth {len(ordered[-1])}, the engine has {num_levels} EAGLE levels; "
            "make the tree that deep"
        )
