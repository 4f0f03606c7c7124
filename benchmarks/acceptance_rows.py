"""Writes rows (feature, Σ min(p, q)) for the closed-loop tests, from random pairs of distributions.

A row is a drafter's distribution q over a small vocabulary and a target's p that is q at another
temperature with noise on its logits; how peaked q is and how close p is vary from row to row. Acceptance
is then no logistic function of the feature, which the estimator must live with.

``python -m benchmarks.acceptance_rows [PATH]``
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROWS = Path(__file__).resolve().parent.parent / "tests" / "data" / "acceptance_rows.npz"
_NUM_ROWS = 8192
_NUM_TOKENS = 256


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def synthesize(num_rows: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``feature`` [N], the log-odds of q's top token within ±15, and ``overlap`` [N] = Σ min(p, q)."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, _NUM_TOKENS)
    draft_logits = rng.normal(size=shape) * rng.uniform(0.5, 1.8, (num_rows, 1))
    draft_logits[:, 0] += rng.normal(8.4, 2.6, num_rows)
    temperature = np.exp(rng.normal(0.0, 0.3, (num_rows, 1)))
    noise = rng.normal(size=shape) * rng.exponential(0.8, (num_rows, 1))
    # Now and then the target prefers a token that the drafter thinks little of.
    surprise = rng.random(num_rows) < 0.1
    noise[surprise, 1] += rng.normal(8.0, 3.0, int(surprise.sum()))
    draft = _softmax(draft_logits)
    target = _softmax(draft_logits / temperature + noise)
    top = draft.max(axis=1)
    feature = np.clip(np.log(top) - np.log1p(-np.minimum(top, 1.0 - 1e-12)), -15.0, 15.0)
    overlap = np.minimum(draft, target).sum(axis=1)
    return feature.astype(np.float32), overlap.astype(np.float32)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    feature, overlap = synthesize(_NUM_ROWS)
    np.savez_compressed(path, feature=feature, overlap=overlap)
    print(
        f"{path}: {feature.size} rows, mean feature {feature.mean():.2f}, overlap {overlap.mean():.2f}"
    )


if __name__ == "__main__":
    main()
