"""An engine's plans against the torch module and the definitions, part by part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trtllm_av.builder.verify import ragged_batches
from trtllm_av.builder.verify_operations import trim_rounds
from trtllm_av.plugins import reference
from trtllm_av.runtime.engines.opening import open_engine
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig

#: Largest difference of logits, in parts of the largest logit, by the engine's dtype.
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}


def compare_with_torch(engine: Path, checkpoint: Path) -> dict[str, float]:
    """``logits``: the largest relative difference over ragged batches; ``confidence``: the largest one of
    scores; ``wrong_trims``: rounds, of ``trims``, whose ``verify_lens`` are not the definition's."""
    parts = open_engine(
        engine,
        SpeculativeConfig(),
        max_batch_size=None,
        max_seq_len=None,
        dtype=None,
        prefill_chunk=None,
    )
    executor, num_positions = parts.executor, parts.num_positions
    model = load_checkpoint(checkpoint).model
    cache = KVCache(model.config, executor.num_slots, executor.max_len)
    worst = largest = 0.0
    for batch in ragged_batches(executor.vocab_size, executor.max_len, num_positions):
        expected = model(batch, cache).logits
        if int(batch.lengths.max()) > num_positions + 1:  # a prompt chunk: its last rows
            rows = batch.cu_seqlens[1:] - 1
            found, expected = executor.prefill(batch, rows)[0], expected[rows]
        else:
            found = executor.verify(batch)[0]
        worst = max(worst, _largest(found.float() - expected))
        largest = max(largest, _largest(expected))
    figures = {"logits": worst / largest, "confidence": 0.0, "trims": 0, "wrong_trims": 0}
    vocab_map = None if parts.drafter is None else parts.drafter.draft_to_target
    width = executor.vocab_size if vocab_map is None else vocab_map.numel()
    generator = torch.Generator().manual_seed(6)
    coefficients = torch.linspace(0.5, -0.5, 1 + num_positions)
    for position in range(num_positions):
        logits = torch.randn(executor.num_slots, 1, width, generator=generator)
        logits = logits.to(getattr(torch, executor.identity.dtype))
        temperature = torch.tensor([0.0, 0.3, 1.0, 1.7]).repeat(executor.num_slots)
        arguments = (temperature[: executor.num_slots], coefficients)
        at = torch.tensor([position], dtype=torch.int32)
        ours = parts.operations.score_drafts(logits, *arguments, at, vocab_size=width)[1]
        theirs = reference.score_drafts(
            logits.float().numpy(),
            *(value.numpy() for value in (*arguments, at)),
            vocab_size=width,
        )[1]
        figures["confidence"] = max(
            figures["confidence"], float(np.abs(ours.numpy() - theirs).max())
        )
    for case in trim_rounds(num_positions):
        if len(case["draft_lens"]) > executor.num_slots:
            continue
        tensors = {name: torch.from_numpy(value) for name, value in case.items()}
        found_lens = parts.operations.trim_drafts(**tensors)[1]
        figures["trims"] += 1
        figures["wrong_trims"] += found_lens.tolist() != reference.trim_drafts(**case)[1].tolist()
    return figures


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())
