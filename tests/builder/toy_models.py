"""Toy models for the doubles of TensorRT-LLM: a target, a drafter that is sure where it is right, and trees.

Invariants: everything is a pure function of the tokens before; the vocabulary is padded.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

VOCAB, PADDED_VOCAB = 40, 48
GARBAGE = 39  # a token that memory nobody wrote seems to hold
CHAIN = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


def target_token(prefix: Sequence[int]) -> int:
    """The toy target's greedy token after ``prefix``."""
    return zlib.crc32(bytes(t % 251 for t in prefix[-3:])) % (VOCAB - 1)


def draft_logits(prefix: Sequence[int]) -> np.ndarray[Any, Any]:
    """The toy drafter's logits [PADDED_VOCAB] f32: surer of itself where it is right, as real ones are."""
    rng = np.random.default_rng(zlib.crc32(b"draft" + bytes(t % 251 for t in prefix)))
    logits = np.concatenate([rng.normal(2.0, 1.0, VOCAB), np.zeros(PADDED_VOCAB - VOCAB)])
    is_right = rng.random() < 0.7
    logits[target_token(prefix) if is_right else rng.integers(VOCAB - 1)] += (
        6.0 if is_right else 3.0
    )
    return logits.astype(np.float32)


def template(choices: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """[K+1, L+1] int32: the leaves' paths of ``eagle_choices``, nodes numbered level by level."""
    nodes = [()] + [tuple(c) for c in sorted(choices, key=lambda c: (len(c), list(c)))]
    number = {node: index for index, node in enumerate(nodes)}
    paths = np.full((len(nodes), 1 + max(map(len, nodes))), -1, np.int32)
    leaves = sorted(set(nodes) - {node[:-1] for node in nodes if node})
    for row, leaf in enumerate(leaves):
        for level in range(len(leaf) + 1):
            paths[row, level] = number[leaf[:level]]
    return paths


def greedy(prompt: Sequence[int], length: int) -> list[int]:
    """What plain decoding of the toy target emits."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(target_token(tokens))
    return tokens[len(prompt) :]
