"""From a checkpoint's name to an engine that serves: model, cache, drafter, step costs, controller.

Invariants: an engine that adapts has step costs that were measured on this machine or given by the user,
never assumed ones; av_mode off loads no drafter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.coefficient_store import (
    CoefficientKey,
    CoefficientStore,
    drafter_identity,
)
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.cost_profile import ProfileSizes, load_or_measure
from trtllm_av.runtime.cost_table import ProfileKey
from trtllm_av.runtime.engine_parts import DEFAULT_PREFILL_CHUNK, EngineParts
from trtllm_av.runtime.engines.cuda.create import create_engine, resolve_device
from trtllm_av.runtime.engines.engine_directory import is_engine
from trtllm_av.runtime.engines.opening import open_engine
from trtllm_av.runtime.engines.profiling import ExecutorProbe
from trtllm_av.runtime.engines.torch_executor import TorchExecutor
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import check_method, create_drafter
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.models.smollm2 import cache_folder
from trtllm_av.runtime.params import SpeculativeConfig
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.scheduler import Engine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_MAX_SEQ_LEN = 2048
_DEFAULT_BATCH_SIZE = 8
_DEVICE_PREFILL_CHUNK = 2048
NO_SPECULATION = SpeculativeConfig(
    num_speculative_tokens=0, enable_adaptive_verification=False, av_mode="off"
)


def load_engine(
    model: str | LoadedModel,
    speculative: SpeculativeConfig | None = None,
    *,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    dtype: str | None = None,
    cost_table: str | Path | dict[str, Any] | None = None,
    prefill_chunk: int | None = None,
    device: str = "cpu",
) -> Engine:
    """Build an engine on ``device`` ("cpu", "cuda" or "cuda:N"), or open one that ``trtllm-av-build`` wrote.

    ``model`` is ``"smollm2"``, a Hugging Face folder, an engine directory, or a model that is already
    loaded (several engines may share it). ``speculative`` None decodes without drafts. None means for
    ``max_batch_size`` 8, for ``prefill_chunk`` 256 (2048 on a GPU), for ``dtype`` that of a loaded model,
    else float32 (bfloat16 on a GPU); for an engine directory, what it was built for. ``cost_table``
    replaces the measured step costs; one that says what it was measured on must have been measured on
    this engine. Raises UsageError for arguments out of range, CheckpointError and CostTableError for
    files, DeviceError without a usable GPU or enough of its memory.
    """
    sizes = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
    for name, size in {**sizes, "prefill_chunk": prefill_chunk}.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise UsageError(f"{name}={size!r} must be a whole number ≥ 1")
    if not isinstance(device, str):
        raise UsageError(f"device={device!r} is unknown; choose 'cpu' or 'cuda'")
    if not isinstance(cost_table, str | Path | dict | None):
        raise UsageError(f"cost_table={cost_table!r} must be the path of a JSON file, or an object")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"dtype={dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    is_on_cpu = device == "cpu"
    if dtype == "float16" and is_on_cpu:
        raise UsageError("dtype='float16' runs on device 'cuda'; choose bfloat16 or float32")
    if not is_on_cpu:
        resolve_device(device)  # before a model is loaded
    speculative = speculative or NO_SPECULATION
    mode = speculative.resolved_mode
    check_method(speculative.method)  # in av_mode off too, and before a model is loaded
    if cost_table is not None and mode not in ("adaptive", "shadow"):
        raise UsageError(
            f"cost_table={str(cost_table)!r} has no use in av_mode {mode!r}; leave it out"
        )
    if isinstance(model, str) and model and is_engine(Path(model)):
        if not is_on_cpu:
            raise UsageError(
                f"device={device!r}: {model!r} is a built engine, which names its own; leave device out"
            )
        parts = open_engine(
            Path(model),
            speculative,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            dtype=dtype,
            prefill_chunk=prefill_chunk,
        )
        return _assemble(parts, speculative, cost_table)
    if isinstance(model, str):
        loaded = load_checkpoint(model, _DTYPES[dtype or ("float32" if is_on_cpu else "bfloat16")])
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
    num_slots = max_batch_size or _DEFAULT_BATCH_SIZE
    if not is_on_cpu:
        return create_engine(
            loaded,
            speculative,
            device=device,
            max_batch_size=num_slots,
            max_seq_len=length,
            prefill_chunk=prefill_chunk or _DEVICE_PREFILL_CHUNK,
            cost_table=cost_table,
        )
    _check_memory(loaded, num_slots, max_len)
    executor = TorchExecutor(loaded, num_slots=num_slots, max_len=max_len)
    parts = EngineParts(
        executor=executor,
        drafter=create_drafter(speculative, loaded, executor.cache) if num_positions else None,
        digest=loaded.digest,
        num_positions=num_positions,
        max_seq_len=length,
        prefill_chunk=prefill_chunk or DEFAULT_PREFILL_CHUNK,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
    )
    return _assemble(parts, speculative, cost_table)


def _assemble(
    parts: EngineParts,
    speculative: SpeculativeConfig,
    cost_table: str | Path | dict[str, Any] | None,
) -> Engine:
    """Step costs, controller and scheduler around ``parts``."""
    mode = speculative.resolved_mode
    options = AdaptiveOptions.resolve(speculative, parts.drafter)  # before anything is measured
    cost_model = _cost_model(parts, cost_table) if mode in ("adaptive", "shadow") else None
    store = None
    if parts.drafter is not None and cost_model is not None and speculative.keep_coefficients:
        drafter = drafter_identity(parts.drafter.cost_key, speculative)
        key = CoefficientKey.of(parts.digest, drafter, options, parts.num_positions)
        store = CoefficientStore(cache_folder(), key)
    controller = AdaptiveController(
        mode,
        parts.num_positions,
        parts.executor.num_slots,
        cost_model,
        options=options,
        store=store,
    )
    engine = Engine(
        parts.executor,
        parts.drafter,
        controller,
        KeyedSource(),
        max_seq_len=parts.max_seq_len,
        eos_token_ids=parts.eos_token_ids,
        tokenizer=parts.tokenizer,
        is_greedy_draft=speculative.draft_sample_method == "greedy",
        prefill_chunk=parts.prefill_chunk,
    )
    engine.round.operations = parts.operations
    return engine


def _cost_model(parts: EngineParts, cost_table: str | Path | dict[str, Any] | None) -> CostModel:
    """The user's step costs, or this engine's own: cached ones if they fit, else measured now."""
    drafter, num_positions, identity = parts.drafter, parts.num_positions, parts.executor.identity
    assert drafter is not None  # a mode that adapts has one
    key = ProfileKey(
        model_digest=f"{parts.digest}+{drafter.cost_key}",
        executor=identity.executor,
        device=identity.device,
        dtype=identity.dtype,
        num_threads=identity.threads,
    )
    if cost_table is not None:
        return CostModel.from_table(
            cost_table, num_positions=num_positions, is_block=drafter.is_block, key=key
        )
    probe = ExecutorProbe(parts.executor, drafter, operations=parts.operations)
    sizes = ProfileSizes.without_graphs(
        parts.executor.num_slots, num_positions, is_block=drafter.is_block
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
