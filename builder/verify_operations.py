"""``score.onnx`` and ``trim.onnx`` on onnxruntime against the definition, where they are built.

Invariants: a feature or confidence within ``TOLERANCE``; ``verify_lens`` of equal confidences equal bit for
bit; and from the drafter's own logits to ``verify_lens`` equal wherever the survival of the last admitted
and of the first refused draft are further apart than rounding can move them. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.builder.draft_source import LogitPair
from trtllm_av.builder.verify import TOLERANCE
from trtllm_av.plugins import reference
from trtllm_av.runtime.engines.onnx_plan import OnnxPlan
from trtllm_av.runtime.errors import BuildError

#: Survivals closer than this at the cut may change places by rounding alone.
MIN_GAP = 1e-5
_NUM_ROUNDS = 200
_NUM_END_TO_END_ROUNDS = 40
_TRIM_OUTPUTS = ("survival", "verify_lens", "cu_seqlens", "pack_index")


def verify_score(path: Path, vocab_size: int, num_positions: int) -> float:
    """The largest difference of features and confidences; raises BuildError above ``TOLERANCE``."""
    plan = OnnxPlan(path)
    rng = np.random.default_rng(4)
    worst = 0.0
    for number in range(2 * num_positions):
        rows = int(rng.integers(1, 9))
        scale = float(rng.choice([0.1, 2, 10]))
        logits = (scale * rng.standard_normal((rows, 1, vocab_size))).astype(np.float32)
        if number % 3 == 0:
            logits[0, 0, rng.integers(vocab_size)] = rng.choice([np.nan, np.inf, -np.inf])
        feed: dict[str, Any] = {
            "draft_logits": logits,
            "temperature": np.resize(np.array([0, 0.3, 1, 1.7], np.float32), rows),
            "coefficients": np.linspace(0.5, -0.5, 1 + num_positions, dtype=np.float32),
            "position": np.array([number % num_positions], np.int32),
            "draft_lens": rng.integers(0, num_positions + 1, rows, np.int32),
        }
        found = _run(plan, feed, ["features", "confidence"])
        expected = reference.score_drafts(**feed, vocab_size=vocab_size)
        for name, ours, theirs in zip(("features", "confidence"), found, expected, strict=True):
            difference = float(np.abs(ours - theirs).max())
            if not difference <= TOLERANCE:  # also for NaN
                raise BuildError(
                    f"{path.name}: {name} differ from the definition by {difference:.2g} (at most "
                    f"{TOLERANCE:g}); the file must not be used"
                )
            worst = max(worst, difference)
    return worst


def verify_trim(path: Path, num_positions: int) -> None:
    """Random rounds of ``TrimDrafts`` against the definition, bit for bit; raises BuildError."""
    plan = OnnxPlan(path)
    for case in trim_rounds(num_positions):
        names: Sequence[str] = _TRIM_OUTPUTS[:3]
        expected: tuple[NDArray[Any], ...] = reference.trim_drafts(**case)
        if case["base_lens"].max() <= 1:  # what pack_index is defined for
            rows, stride = len(case["base_lens"]), num_positions + 1
            packed = reference.pack_drafts(
                case["base_lens"], expected[1], stride=stride, capacity=rows * stride
            )
            names, expected = _TRIM_OUTPUTS, (*expected, packed)
        for name, ours, theirs in zip(names, _run(plan, case, names), expected, strict=True):
            if ours.tobytes() != theirs.tobytes():
                raise BuildError(
                    f"{path.name}: {name} is {ours.tolist()} where the definition says "
                    f"{theirs.tolist()}; the file must not be used"
                )


def verify_end_to_end(
    score_path: Path, trim_path: Path, pairs: Sequence[LogitPair], num_positions: int
) -> int:
    """From the exported step's logits through score and trim, against the torch module's and the
    definition; the number of rounds whose cut was clear enough to be compared.

    Raises BuildError if ``verify_lens`` of such a round differ.
    """
    score, trim = OnnxPlan(score_path), OnnxPlan(trim_path)
    found = torch.cat([ours for ours, _ in pairs]).numpy()
    expected = torch.cat([theirs for _, theirs in pairs]).numpy()
    coefficients = np.linspace(0.5, -0.5, 1 + num_positions, dtype=np.float32)
    rng = np.random.default_rng(5)
    num_compared = 0
    for _ in range(_NUM_END_TO_END_ROUNDS):
        rows = int(rng.integers(2, 9))
        picked = rng.integers(0, len(found), (num_positions, rows))
        lens = rng.integers(1, num_positions + 1, rows, np.int32)
        common: dict[str, Any] = {
            "temperature": rng.choice(np.array([0, 0.7, 1, 1.3], np.float32), rows),
            "coefficients": coefficients,
            "draft_lens": lens,
        }
        ours, theirs = np.zeros((2, rows, num_positions), np.float32)
        for i in range(num_positions):
            position = np.array([i], np.int32)
            feed = {**common, "draft_logits": found[picked[i], None], "position": position}
            ours[:, i] = _run(score, feed, ["confidence"])[0][:, 0]
            theirs[:, i] = reference.score_drafts(
                expected[picked[i], None],
                position=position,
                vocab_size=expected.shape[1],
                **common,
            )[1][:, 0]
        case: dict[str, NDArray[Any]] = {
            "draft_lens": lens,
            "base_lens": np.ones(rows, np.int32),
            "min_verify_lens": np.zeros(rows, np.int32),
            "draft_budget": np.array([rng.integers(1, max(int(lens.sum()), 2))], np.int32),
        }
        survival, verify_lens, _ = reference.trim_drafts(theirs, **case)
        is_drafted = np.arange(num_positions) < lens[:, None]
        ranked = np.sort(survival[is_drafted])[::-1]
        cut = int(case["draft_budget"][0])
        if cut < len(ranked) and ranked[cut - 1] - ranked[cut] <= MIN_GAP:
            continue
        num_compared += 1
        lens_found = _run(trim, {**case, "confidence": ours}, ["verify_lens"])[0]
        if lens_found.tolist() != verify_lens.tolist():
            raise BuildError(
                f"{score_path.name} and {trim_path.name}: from the drafter's logits verify_lens is "
                f"{lens_found.tolist()} where the torch module gives {verify_lens.tolist()}; the files "
                "must not be used"
            )
    return num_compared


def trim_rounds(num_positions: int) -> Iterator[dict[str, NDArray[Any]]]:
    """Inputs of ``TrimDrafts`` with ties, zero budgets, floors, dead rows and broken confidences."""
    rng = np.random.default_rng(3)
    coarse = np.array([0, 0.25, 0.5, 1, 1.5, np.nan, np.inf, -1, 1e-38, 2.0**-70], np.float32)
    for number in range(_NUM_ROUNDS):
        rows = int(rng.integers(1, 17))
        size = (rows, num_positions)
        smooth = rng.random(size, np.float32)
        floors = rng.integers(0, num_positions + 1, rows, np.int32)
        budget = 0 if number % 8 == 0 else rng.integers(0, rows * num_positions + 2)
        yield {
            "confidence": smooth if number % 2 else rng.choice(coarse, size),
            "draft_lens": rng.integers(0, num_positions + 1, rows, np.int32),
            "base_lens": rng.choice(np.array([0, 1, 1, 1, 9], np.int32), rows),
            "min_verify_lens": floors if number % 3 == 0 else np.zeros_like(floors),
            "draft_budget": np.array([budget], np.int32),
        }


def _run(
    plan: OnnxPlan, feed: dict[str, NDArray[Any]], outputs: Sequence[str]
) -> list[NDArray[Any]]:
    tensors = {name: torch.from_numpy(value) for name, value in feed.items()}
    return [value.numpy() for value in plan.run(tensors, outputs)]
