"""The exported files against the torch modules, on onnxruntime in float32, where they are built.

Objective: an engine that computes something else than its checkpoint is found at build time, not by a
reader of its texts. Invariants: a difference above ``TOLERANCE`` in a logit or state fails the build; the
batches hold every kind of row that the runtime sends. Seeds are fixed. ``verify_operations`` does the same
for score and trim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.builder.draft_source import LogitPair
from trtllm_av.builder.networks import HeadStepNetwork
from trtllm_av.builder.networks_block import BlockStepNetwork
from trtllm_av.runtime.engines.onnx_plan import OnnxPlan
from trtllm_av.runtime.engines.plan_pass import PlanPass
from trtllm_av.runtime.errors import BuildError
from trtllm_av.runtime.models.attention import plan_attention
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.llama import LlamaModel

TOLERANCE = 1e-3
_NUM_SLOTS = 4


def verify_decoder(
    path: Path, model: LlamaModel, num_positions: int, layers: Sequence[int] | None = None
) -> tuple[float, list[LogitPair]]:
    """The largest difference of logits and hidden states over ragged batches, and the logits of both.

    ``layers`` are those that the file holds (None: all). Raises BuildError above ``TOLERANCE``.
    """
    plan = OnnxPlan(path, num_slots=_NUM_SLOTS)
    run = PlanPass(plan)
    cache = KVCache(model.config, _NUM_SLOTS, plan.max_len)
    worst = 0.0
    pairs: list[LogitPair] = []
    for batch in ragged_batches(model.config.vocab_size, plan.max_len, num_positions):
        expected = model(batch, cache, layers=layers)
        logits, hidden = run(batch)
        worst = max(worst, _difference(logits, expected.logits, path, "logits", batch))
        worst = max(worst, _difference(hidden, expected.hidden, path, "hidden", batch))
        pairs.append((logits, expected.logits))
    return worst, pairs


@torch.inference_mode()
def verify_head_step(
    path: Path, network: HeadStepNetwork, num_positions: int
) -> tuple[float, list[LogitPair]]:
    """The same for one step of a head, whose ``network`` has weights of float32."""
    head, config = network.head, network.head.config
    plan = OnnxPlan(path, num_slots=_NUM_SLOTS)
    run = PlanPass(plan, state_name="state")
    layer = config.as_layer()
    cache = KVCache(layer, _NUM_SLOTS, plan.max_len)
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    pairs: list[LogitPair] = []
    for batch in ragged_batches(network.embedding.shape[0], plan.max_len, num_positions):
        hidden = torch.randn(batch.token_ids.numel(), config.hidden_size, generator=generator)
        attention = plan_attention(batch, layer, cache)
        per_token = {"hidden": hidden}
        embedded = F.embedding(batch.token_ids, network.embedding)
        if isinstance(network, BlockStepNetwork):
            masks = torch.arange(batch.token_ids.numel()) % network.masks.shape[0]
            per_token["mask_idx"] = masks
            embedded = embedded + network.masks[masks]
        residual, q, k, v = head.before_attention(embedded, hidden, batch.positions)
        cache.write(0, attention.token_slots, batch.positions, k, v)
        mixed = attention.attend(q, *cache.read(0, attention.rows, attention.reach))
        expected_state = head.after_attention(residual, mixed)
        last = batch.cu_seqlens[1:] - 1
        expected = F.linear(expected_state[last], network.output)
        logits, state = run(batch, last, per_token)
        worst = max(worst, _difference(logits, expected, path, "logits", batch))
        worst = max(worst, _difference(state, expected_state, path, "state", batch))
        pairs.append((logits, expected))
    return worst, pairs


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
