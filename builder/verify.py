"""The exported files against the torch modules, on onnxruntime in float32, where they are built.

Objective: an engine that computes something else than its checkpoint is found at build time, not by a
reader of its texts. Invariants: a difference above ``TOLERANCE`` in a logit, state, feature or confidence
fails the build; ``verify_lens`` of equal confidences must be equal bit for bit. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.plugins import reference
from trtllm_av.runtime.engines.onnx_executor import (
    KVBuffers,
    OnnxExecutor,
    SlotLayout,
    open_session,
)
from trtllm_av.runtime.errors import BuildError
from trtllm_av.runtime.models.attention import plan_attention
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.llama import LlamaModel

TOLERANCE = 1e-3
_NUM_SLOTS = 4
_NUM_ROUNDS = 200


def verify_target(path: Path, model: LlamaModel, num_positions: int) -> float:
    """The largest difference of logits and hidden states over ragged batches.

    Raises BuildError above ``TOLERANCE``.
    """
    executor = OnnxExecutor(path, num_slots=_NUM_SLOTS, vocab_size=model.config.vocab_size)
    cache = KVCache(model.config, _NUM_SLOTS, executor.max_len)
    worst = 0.0
    for batch in ragged_batches(model.config.vocab_size, executor.max_len, num_positions):
        expected = model(batch, cache)
        logits, hidden = executor.verify(batch)
        worst = max(worst, _difference(logits, expected.logits, path, "logits", batch))
        worst = max(worst, _difference(hidden, expected.hidden, path, "hidden", batch))
    return worst


def verify_draft_step(
    path: Path, head: EagleHead, embedding: Tensor, output: Tensor, num_positions: int
) -> float:
    """The same for one step of the drafter and the confidence of its logits, all in float32.

    ``embedding`` [V, H] and ``output`` [V_d, H] as ``DraftStepNetwork`` takes them.
    """
    session = open_session(path, torch.get_num_threads())
    cache_inputs = [one for one in session.get_inputs() if "_cache_" in one.name]
    max_len = int(cache_inputs[0].shape[2])
    buffers = KVBuffers(cache_inputs, _NUM_SLOTS, torch.float32)
    layer = head.config.as_layer()
    cache = KVCache(layer, _NUM_SLOTS, max_len)
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    for number, batch in enumerate(ragged_batches(embedding.shape[0], max_len, num_positions)):
        hidden = torch.randn(batch.token_ids.numel(), head.config.hidden_size, generator=generator)
        with torch.inference_mode():
            plan = plan_attention(batch, layer, cache)
            embedded = F.embedding(batch.token_ids, embedding)
            residual, q, k, v = head.before_attention(embedded, hidden, batch.positions)
            cache.write(0, plan.token_slots, batch.positions, k, v)
            mixed = plan.attend(q, *cache.read(0, plan.rows, plan.reach))
            state = head.after_attention(residual, mixed)
            last = batch.cu_seqlens[1:] - 1
            logits = F.linear(state[last], output)
        layout = SlotLayout(batch, _NUM_SLOTS, max_len)
        temperature = np.resize(np.array([0, 0.3, 1, 1.7], np.float32), batch.num_rows)
        draft_lens = np.resize(np.array([num_positions, 0, 1], np.int32), batch.num_rows)
        coefficients = np.linspace(0.5, -0.5, 1 + num_positions, dtype=np.float32)
        position = np.array([number % num_positions], np.int32)
        names = ["draft_logits", "state", "features", "confidence"]
        feed = layout.feed() | {
            "input_ids": batch.token_ids[layout.order].numpy(),
            "hidden": hidden[layout.order].numpy(),
            "logit_idx": layout.place[last].numpy(),
            "temperature": temperature,
            "coefficients": coefficients,
            "position": position,
            "draft_lens": draft_lens,
        }
        found = dict(zip(names, buffers.run(session, feed, names), strict=True))
        found["state"] = found["state"][layout.place.numpy()]
        features, confidence = reference.score_drafts(
            logits[:, None].numpy(),
            temperature,
            coefficients,
            position,
            vocab_size=output.shape[0],
            draft_lens=draft_lens,
        )
        expected = [logits.numpy(), state.numpy(), features, confidence]
        for name, value in zip(names, expected, strict=True):
            difference = _difference(
                torch.from_numpy(found[name]), torch.from_numpy(value), path, name, batch
            )
            worst = max(worst, difference)
    return worst


def verify_trim(path: Path, num_positions: int) -> None:
    """Random rounds of ``TrimDrafts`` against the definition, bit for bit; raises BuildError."""
    session = open_session(path, 1)
    names = ("survival", "verify_lens", "cu_seqlens")
    for case in trim_rounds(num_positions):
        expected = reference.trim_drafts(**case)
        for name, ours, theirs in zip(names, session.run(names, case), expected, strict=True):
            if ours.tobytes() != theirs.tobytes():
                raise BuildError(
                    f"{path.name}: {name} is {ours.tolist()} where the definition says "
                    f"{theirs.tolist()}; the file must not be used"
                )


def ragged_batches(vocab_size: int, max_len: int, num_positions: int) -> Iterator[PackedBatch]:
    """Passes that follow one another on ``_NUM_SLOTS`` slots: prompt chunks, then single tokens, full
    drafts (K+1), idle slots and rows in any order of slots."""
    generator = torch.Generator().manual_seed(1)
    full = num_positions + 1
    chunk = min(64, max_len // 4)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lens = [0] * _NUM_SLOTS
    order = list(range(_NUM_SLOTS))
    plans: list[tuple[list[int], list[int]]] = [
        ([2], [chunk]),
        ([0], [1]),
        ([3, 1], [chunk // 2 + 1, 2]),
        ([1], [full]),
        (order, [1] * _NUM_SLOTS),
        (order, [full] * _NUM_SLOTS),
        ([3, 0], [1, full]),
    ]
    for _ in range(8):
        rows = torch.randperm(_NUM_SLOTS, generator=generator).tolist()
        rows = rows[: draw(1, _NUM_SLOTS + 1, 1)[0]]
        plans.append((rows, draw(1, full + 1, len(rows))))
    for slots, lengths in plans:
        # A row that would leave its slot starts again, as a new request does.
        for slot, length in zip(slots, lengths, strict=True):
            lens[slot] = 0 if lens[slot] + length > max_len else lens[slot]
        tokens = [draw(0, vocab_size, length) for length in lengths]
        yield PackedBatch.from_lists(tokens, slots, [lens[slot] for slot in slots])
        for slot, length in zip(slots, lengths, strict=True):
            lens[slot] += draw(1, length + 1, 1)[0]  # what was not accepted is overwritten


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


def _difference(
    found: Tensor, expected: Tensor, path: Path, name: str, batch: PackedBatch
) -> float:
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE:  # also for NaN
        raise BuildError(
            f"{path.name}: {name} differ from the torch module's by {difference:.2g} (at most "
            f"{TOLERANCE:g}) for rows of {batch.lengths.tolist()} tokens; the file must not be used"
        )
    return difference
