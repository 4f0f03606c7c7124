"""An engine directory to the parts that serve: plans, executor, drafter, operations, tokenizer.

Invariants: what a caller asks for is within what was built, or refused with both sides; without
speculation no draft step is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtllm_av.runtime.engine_parts import DEFAULT_PREFILL_CHUNK, EngineParts
from trtllm_av.runtime.engines.engine_directory import DRAFT_TO_TARGET, EngineDirectory
from trtllm_av.runtime.engines.gpu import current_gpu
from trtllm_av.runtime.engines.onnx_plan import OnnxPlan
from trtllm_av.runtime.engines.plan import Plan
from trtllm_av.runtime.engines.plan_blocks import PlanDFlashDrafter, PlanDSparkDrafter
from trtllm_av.runtime.engines.plan_drafters import (
    PlanDraftModelDrafter,
    PlanHeadDrafter,
    PlanLayerSkipDrafter,
)
from trtllm_av.runtime.engines.plan_executor import PlanExecutor
from trtllm_av.runtime.engines.plan_operations import PlanOperations
from trtllm_av.runtime.engines.tensorrt import TensorRTPlan
from trtllm_av.runtime.engines.tensorrt_device import CudaDevice
from trtllm_av.runtime.engines.tensorrt_module import import_backend
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import load_tokenizer
from trtllm_av.runtime.models.drafters.base import Drafter
from trtllm_av.runtime.models.drafters.eagle_head import EagleHeadConfig
from trtllm_av.runtime.params import SpeculativeConfig

#: Opens the plan of a stem; the caches are shared where the second argument names them.
OpenPlan = Callable[[str, Mapping[str, Any] | None], Plan]


def open_engine(
    folder: Path,
    speculative: SpeculativeConfig,
    *,
    max_batch_size: int | None,
    max_seq_len: int | None,
    dtype: str | None,
    prefill_chunk: int | None,
) -> EngineParts:
    """The parts of the engine in ``folder``; None takes what it was built for.

    Raises CheckpointError for a directory that is damaged or for another device or version, UsageError
    for a setting that the engine was not built for, MissingDependencyError without its backend.
    """
    engine = EngineDirectory.load(folder)
    built, adaptive = engine.build_config, engine.adaptive_verification
    num_slots = _within("max_batch_size", max_batch_size, int(built["max_batch_size"]), folder)
    length = _within("max_seq_len", max_seq_len, int(built["max_seq_len"]), folder)
    num_tokens = int(built["max_num_tokens"])
    default_chunk = min(DEFAULT_PREFILL_CHUNK, num_tokens)
    chunk = default_chunk if prefill_chunk is None else prefill_chunk
    _within("prefill_chunk", chunk, num_tokens, folder)
    if dtype not in (None, engine.pretrained_config["dtype"]):
        raise UsageError(
            f"dtype={dtype!r}, but the engine {str(folder)!r} was built with "
            f"{engine.pretrained_config['dtype']}; leave it out"
        )
    num_positions = draft_positions(engine, speculative)
    if num_slots * (num_positions + 1) > num_tokens:
        raise UsageError(
            f"{num_slots} requests with {num_positions} drafts each need passes of "
            f"{num_slots * (num_positions + 1)} tokens, the engine {str(folder)!r} was built for "
            f"{num_tokens}; lower max_batch_size or num_speculative_tokens"
        )
    open_plan = plan_opener(engine, num_slots)
    verify = open_plan("verify", None)
    parts = EngineParts(
        executor=PlanExecutor(verify, vocab_size=int(engine.pretrained_config["vocab_size"])),
        drafter=None,
        digest=str(adaptive["model_digest"]),
        num_positions=num_positions,
        max_seq_len=length,
        prefill_chunk=chunk,
        eos_token_ids=[int(token) for token in adaptive["eos_token_ids"]],
        tokenizer=load_tokenizer(folder / "tokenizer"),
    )
    if num_positions:
        parts.drafter = _drafter(engine, open_plan, verify, num_positions)
        parts.operations = PlanOperations(
            open_plan("score", None),
            open_plan("trim", None),
            vocab_size=int(adaptive["drafter"]["vocab_size"]),
            num_positions=engine.num_positions,
        )
    return parts


def draft_positions(engine: EngineDirectory, speculative: SpeculativeConfig) -> int:
    """K of a runtime on ``engine``, 0 without speculation.

    Raises UsageError for more drafts or another drafter than it was built with.
    """
    if speculative.resolved_mode == "off":
        return 0
    built = engine.adaptive_verification["drafter"]
    where = f"the engine {str(engine.folder)!r} was built with {built['method']!r}"
    if speculative.method not in (None, built["method"]):
        raise UsageError(f"method={speculative.method!r}, but {where}; leave method out")
    if speculative.model is not None:
        raise UsageError(f"model={speculative.model!r}, but {where} inside; leave model out")
    if speculative.skip_layers is not None:
        raise UsageError(f"skip_layers={speculative.skip_layers}, but {where}; leave it out")
    if "num_speculative_tokens" not in speculative.model_fields_set:
        return min(engine.num_positions, speculative.num_speculative_tokens)
    engine.check_draft_len(speculative.num_speculative_tokens)
    return speculative.num_speculative_tokens


def plan_opener(engine: EngineDirectory, num_slots: int) -> OpenPlan:
    """How the plans of ``engine`` are opened; raises as ``open_engine`` does."""
    folder, backend = engine.folder, engine.backend
    if backend == "onnx":
        return lambda stem, caches: OnnxPlan(
            folder / f"{stem}.onnx", num_slots=num_slots, shared_caches=caches
        )
    trt = import_backend(backend)
    engine.check_device(current_gpu(), str(trt.__version__))
    if engine.adaptive_verification["operations"] == "plugin":
        from trtllm_av.plugins import tensorrt_plugin

        tensorrt_plugin.register(trt)
    device = CudaDevice()
    return lambda stem, caches: TensorRTPlan(
        trt, folder / f"{stem}.plan", device, num_slots=num_slots, shared_caches=caches
    )


def _drafter(
    engine: EngineDirectory, open_plan: OpenPlan, verify: Plan, num_positions: int
) -> Drafter:
    built = engine.adaptive_verification["drafter"]
    if built["method"] == "layer_skip":
        plan = open_plan("draft_step", verify.caches)
        return PlanLayerSkipDrafter(plan, built["layers"], max_draft_len=num_positions)
    plan = open_plan("draft_step", None)
    if built["method"] == "draft_model":
        return PlanDraftModelDrafter(plan, str(built["digest"]), max_draft_len=num_positions)
    draft_to_target = np.load(engine.folder / DRAFT_TO_TARGET).astype(np.int64)
    layer = EagleHeadConfig(**built["head"])
    vocab_map = torch.from_numpy(draft_to_target)
    dtype = getattr(torch, str(engine.pretrained_config["dtype"]))
    if built["method"] == "dspark":
        return PlanDSparkDrafter(
            plan,
            open_plan("draft_chain", None),
            layer,
            vocab_map,
            dtype,
            state_size=int(built["state_size"]),
            sequential_size=int(built["sequential_size"]),
            max_draft_len=num_positions,
        )
    family = PlanDFlashDrafter if built["method"] == "dflash" else PlanHeadDrafter
    return family(plan, layer, vocab_map, dtype, max_draft_len=num_positions)


def _within(name: str, wanted: int | None, built: int, folder: Path) -> int:
    if wanted is None:
        return built
    if wanted > built:
        raise UsageError(
            f"{name}={wanted} exceeds {built}, what the engine {str(folder)!r} was built for; lower it or "
            "build again"
        )
    return wanted
