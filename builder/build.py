"""A checkpoint to an engine directory: export, check, compile, write.

Invariants: the files that are checked are the ones that are compiled, or, for a 16-bit engine, the same
networks exported once more in float32 (onnxruntime has no bfloat16 products on a CPU, and rounding would
hide mistakes); a build that fails leaves nothing.
"""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_av.builder import compile as tensorrt_rtx
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.draft_head import DraftHead, find_head
from trtllm_av.builder.engine_dir import check_target, staged, write_config
from trtllm_av.builder.export import (
    DRAFT_STEP,
    DTYPES,
    TRIM,
    VERIFY,
    export_draft_step,
    export_target,
    export_trim,
    import_onnx,
)
from trtllm_av.builder.networks import TargetNetwork
from trtllm_av.builder.verify import verify_draft_step, verify_target, verify_trim
from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
from trtllm_av.runtime.models.llama import LlamaModel

_PACKAGES = ("trtllm-adaptive-verification", "torch", "onnx", "onnxscript", "tensorrt-rtx")


@dataclass(slots=True)
class BuildReport:
    """What a build did; ``differences`` are the largest ones that the check found, by file."""

    output_dir: str
    drafter: str | None
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_bytes: int = 0
    peak_memory_bytes: int = 0

    @contextmanager
    def timed(self, stage: str, on_stage: Callable[[str], None]) -> Iterator[None]:
        on_stage(stage)
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started


def build_engine(config: BuildConfig, on_stage: Callable[[str], None]) -> BuildReport:
    """Build the engine that ``config`` asks for; ``on_stage`` is told what begins.

    Raises UsageError, CheckpointError, MissingDependencyError or BuildError.
    """
    check_target(config.output_dir)
    import_onnx()
    if config.compute_capability is not None:
        trt = tensorrt_rtx.import_tensorrt_rtx()
        tensorrt_rtx.check_compute_capability(trt, config.compute_capability)
    files = CheckpointFiles.find(config.model_dir)
    limit = files.config.max_position_embeddings
    if config.max_seq_len > limit:
        raise UsageError(
            f"--max_seq_len {config.max_seq_len} exceeds the model's {limit} positions"
        )
    tokenizer = files.tokenizer()
    if tokenizer is None:
        raise CheckpointError(
            f"model folder {str(files.folder)!r} has no tokenizer; copy its files next to config.json"
        )
    head = find_head(config.speculative_model, files.config, files.lazy_tensors())
    report = BuildReport(str(config.output_dir), None if head is None else head.path.name)
    with staged(config.output_dir) as folder:
        with report.timed("export", on_stage):
            _export(config, files, head, DTYPES[config.dtype], folder)
        if config.verify:
            with report.timed("verify", on_stage):
                report.differences = _verify(config, files, head, folder)
        if config.compute_capability is not None:
            with report.timed("compile", on_stage):
                report.plans = _compile(config, files, folder, config.compute_capability)
        tokenizer.save_pretrained(folder / "tokenizer")
        write_config(
            folder,
            asdict(files.config) | {"dtype": config.dtype},
            config.to_dict(),
            {
                "num_speculative_tokens": config.max_draft_len,
                "num_features": 1,
                "operations": "onnx_functions",
                "drafter": report.drafter,
                "buckets": config.profiles(),
                "eos_token_ids": files.eos_token_ids(tokenizer),
                "model_digest": files.digest(),
                "versions": _versions(),
            },
        )
        report.num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there
    report.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return report


def _export(
    config: BuildConfig,
    files: CheckpointFiles,
    head: DraftHead | None,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    tensors = files.lazy_tensors()
    target = TargetNetwork(files.config, tensors, dtype)
    export_target(target, dtype, config.cache_len, folder / VERIFY)
    del target  # its weights are on disk now
    if head is not None:
        network = head.network(files.config, tensors, dtype)
        positions = config.max_draft_len
        export_draft_step(network, dtype, config.cache_len, positions, folder / DRAFT_STEP)
    export_trim(config.max_draft_len, folder / TRIM)


def _verify(
    config: BuildConfig, files: CheckpointFiles, head: DraftHead | None, folder: Path
) -> dict[str, float]:
    twin: Path | None = None
    try:
        if config.dtype != "float32":
            twin = folder / "float32"
            twin.mkdir()
            _export(config, files, head, torch.float32, twin)
        checked = twin or folder
        positions = config.max_draft_len
        model = LlamaModel(files.config, files.tensors())
        differences = {VERIFY: verify_target(checked / VERIFY, model, positions)}
        if head is not None:
            network = head.network(files.config, files.lazy_tensors(), torch.float32)
            differences[DRAFT_STEP] = verify_draft_step(
                checked / DRAFT_STEP, network.head, network.embedding, network.output, positions
            )
        verify_trim(checked / TRIM, positions)
        return differences
    finally:
        if twin is not None:
            shutil.rmtree(twin, ignore_errors=True)


def _compile(
    config: BuildConfig, files: CheckpointFiles, folder: Path, capability: int
) -> dict[str, dict[str, Any]]:
    profiles = config.profiles()
    num_layers = {VERIFY: files.config.num_layers, DRAFT_STEP: 1, TRIM: 0}
    plans: dict[str, dict[str, Any]] = {}
    for name, num_attention_layers in num_layers.items():
        source = folder / name
        if not source.exists():  # no drafter
            continue
        target = source.with_suffix(".plan")
        plan = tensorrt_rtx.compile_plan(
            source,
            target,
            # Trim has one size, the number of requests, which both passes share.
            list(profiles.values()) if num_attention_layers else [profiles["decode"]],
            capability,
            num_attention_layers=num_attention_layers,
        )
        plans[target.name] = asdict(plan)
    return plans


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
