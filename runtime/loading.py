"""From a checkpoint's name to an engine that serves: model, cache, drafter, step costs, controller.

Invariants: an engine that adapts has step costs that were measured on this machine or given by the user,
never assumed ones; av_mode off loads no drafter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.cost_profile import ProfileSizes, load_or_measure
from trtllm_av.runtime.cost_table import ProfileKey
from trtllm_av.runtime.engines.profiling import ExecutorProbe
from trtllm_av.runtime.engines.torch_executor import TorchExecutor
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import check_method, create_drafter
from trtllm_av.runtime.models.drafters.base import Drafter
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.smollm2 import cache_folder
from trtllm_av.runtime.params import SpeculativeConfig
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.scheduler import Engine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEFAULT_MAX_SEQ_LEN = 2048
NO_SPECULATION = SpeculativeConfig(
    num_speculative_tokens=0, enable_adaptive_verification=False, av_mode="off"
)


def load_engine(
    model: str | LoadedModel,
    speculative: SpeculativeConfig | None = None,
    *,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    dtype: str | None = None,
    cost_table: str | Path | dict[str, Any] | None = None,
    prefill_chunk: int = 256,
) -> Engine:
    """Build an engine on the CPU.

    ``model`` is ``"smollm2"``, a Hugging Face folder, or a model that is already loaded (several engines
    may share it). ``speculative`` None decodes without drafts. ``dtype`` None means that of a loaded
    model, else float32. ``cost_table`` replaces the measured step costs; one that says what it was
    measured on must have been measured on this engine. Raises UsageError for arguments out of range,
    CheckpointError and CostTableError for files.
    """
    if max_batch_size < 1:
        raise UsageError(f"max_batch_size={max_batch_size} must be ≥ 1")
    if prefill_chunk < 1:
        raise UsageError(f"prefill_chunk={prefill_chunk} must be ≥ 1")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"dtype={dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    speculative = speculative or NO_SPECULATION
    mode = speculative.resolved_mode
    check_method(speculative.method)  # in av_mode off too, and before a model is loaded
    if cost_table is not None and mode not in ("adaptive", "shadow"):
        raise UsageError(
            f"cost_table={str(cost_table)!r} has no use in av_mode {mode!r}; leave it out"
        )
    if isinstance(model, str):
        loaded = load_checkpoint(model, _DTYPES[dtype or "float32"])
    else:
        loaded = model
        if dtype is not None and _DTYPES[dtype] != loaded.dtype:
            raise UsageError(
                f"dtype={dtype!r}, but the model was loaded as {loaded.dtype}; load it as {dtype}"
            )
    limit = loaded.config.max_position_embeddings
    length = min(_DEFAULT_MAX_SEQ_LEN, limit) if max_seq_len is None else max_seq_len
    if not 2 <= length <= limit:
        raise UsageError(f"max_seq_len={length} must be from 2 to the model's {limit} positions")
    num_positions = 0 if mode == "off" else speculative.num_speculative_tokens
    max_len = length + 2 * (num_positions + 1)
    _check_memory(loaded, max_batch_size, max_len)
    executor = TorchExecutor(loaded, num_slots=max_batch_size, max_len=max_len)
    drafter = create_drafter(speculative, loaded, executor.cache) if num_positions else None
    cost_model: CostModel | None = None
    if mode in ("adaptive", "shadow"):
        assert drafter is not None
        cost_model = _cost_model(executor, drafter, num_positions, cost_table)
    controller = AdaptiveController(mode, num_positions, max_batch_size, cost_model)
    return Engine(
        executor,
        drafter,
        controller,
        KeyedSource(),
        max_seq_len=length,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
        is_greedy_draft=speculative.draft_sample_method == "greedy",
        prefill_chunk=prefill_chunk,
    )


def _cost_model(
    executor: TorchExecutor,
    drafter: Drafter,
    num_positions: int,
    cost_table: str | Path | dict[str, Any] | None,
) -> CostModel:
    """The user's step costs, or this engine's own: cached ones if they fit, else measured now."""
    identity = executor.identity
    key = ProfileKey(
        model_digest=f"{executor.loaded.digest}+{drafter.cost_key}",
        executor=identity.executor,
        device=identity.device,
        dtype=identity.dtype,
        num_threads=identity.threads,
    )
    if cost_table is not None:
        return CostModel.from_table(
            cost_table, num_positions=num_positions, is_block=drafter.is_block, key=key
        )
    probe = ExecutorProbe(executor, drafter)
    sizes = ProfileSizes.without_graphs(
        executor.num_slots, num_positions, is_block=drafter.is_block
    )
    table = load_or_measure(cache_folder(), probe.verify, probe.draft, sizes, key)
    probe.reset()
    return CostModel(table, num_positions=num_positions, is_block=drafter.is_block)


def _check_memory(loaded: LoadedModel, num_slots: int, max_len: int) -> None:
    """Refuse a KV cache that this machine cannot hold, rather than be ended by it later."""
    needed = KVCache.num_bytes(loaded.config, num_slots, max_len, loaded.dtype)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UsageError(
            f"max_batch_size={num_slots} × {max_len} positions need a KV cache of "
            f"{needed / 2**30:.1f} GiB, and this machine has {memory / 2**30:.1f} GiB; "
            "lower the concurrency or max_seq_len"
        )
