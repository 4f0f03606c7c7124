"""A checkpoint to an engine directory: export, check, compile, write.

Invariants: the files that are checked are the ones that are compiled, or, for a 16-bit engine, the same
networks exported once more in float32 (onnxruntime has no bfloat16 products on a CPU, and rounding would
hide mistakes); a build that fails leaves nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trtllm_av.builder.build_report import BuildReport, peak_memory_bytes, versions
from trtllm_av.builder.compile import PlanCompiler
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.draft_source import DraftSource
from trtllm_av.builder.drafters import find_drafter
from trtllm_av.builder.engine_dir import check_target, staged, write_config
from trtllm_av.builder.export import (
    DRAFT_CHAIN,
    DRAFT_STEP,
    DTYPES,
    SCORE,
    TRIM,
    VERIFY,
    export_decoder,
    import_onnx,
)
from trtllm_av.builder.export_operations import export_score, export_trim
from trtllm_av.builder.networks import DecoderNetwork
from trtllm_av.builder.plan_compiler import create_compiler
from trtllm_av.builder.progress import BuildProgress
from trtllm_av.builder.verify import verify_decoder
from trtllm_av.builder.verify_operations import verify_end_to_end, verify_score, verify_trim
from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
from trtllm_av.runtime.models.llama import LlamaModel


def build_engine(config: BuildConfig, progress: BuildProgress) -> BuildReport:
    """Build the engine that ``config`` asks for, and tell ``progress`` what is being done.

    Raises UsageError, CheckpointError, MissingDependencyError, DeviceError or BuildError.
    """
    check_target(config.output_dir)
    import_onnx()
    compiler = create_compiler(config, progress) if config.has_plans else None
    target = CheckpointFiles.find(config.model_dir)
    limit = target.config.max_position_embeddings
    if config.max_seq_len > limit:
        raise UsageError(
            f"--max_seq_len {config.max_seq_len} exceeds the model's {limit} positions"
        )
    tokenizer = target.tokenizer()
    if tokenizer is None:
        raise CheckpointError(
            f"model folder {str(target.folder)!r} has no tokenizer; copy its files next to config.json"
        )
    drafter = find_drafter(config.speculative_model, target, tokenizer, config.max_draft_len)
    report = BuildReport(str(config.output_dir), config.backend, drafter.label)
    if compiler is not None and compiler.has_plugins:
        report.operations = "plugin"
    dtype = DTYPES[config.weight_dtype]
    stage = report.stages(progress)
    with staged(config.output_dir) as folder:
        with stage("export"):
            base = peak_memory_bytes()
            report.weight_bytes = _export(config, target, drafter, dtype, folder)
            report.export_memory_bytes = peak_memory_bytes() - base
        if config.verify:
            with stage("verify"):
                _verify(config, target, drafter, folder, report)
        if compiler is not None:
            with stage("compile"):
                report.plans = _compile(config, compiler, target, drafter, folder)
        tokenizer.save_pretrained(folder / "tokenizer")
        write_config(
            folder,
            asdict(target.config) | {"dtype": config.weight_dtype},
            config.to_dict() | {"device": None if compiler is None else compiler.device},
            {
                "num_speculative_tokens": config.max_draft_len,
                "num_features": 1,
                "operations": report.operations,
                "drafter": {"vocab_size": drafter.vocab_size, **drafter.describe()},
                "buckets": config.profiles(),
                "eos_token_ids": target.eos_token_ids(tokenizer),
                "model_digest": target.digest(),
                "versions": versions() | ({} if compiler is None else compiler.version),
            },
        )
        report.num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    report.peak_memory_bytes = peak_memory_bytes()
    return report


def _export(
    config: BuildConfig,
    target: CheckpointFiles,
    drafter: DraftSource,
    dtype: torch.dtype,
    folder: Path,
) -> int:
    """Write all ONNX files; bytes of the target's weights."""
    network = DecoderNetwork(target.config, target.lazy_tensors(), dtype)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    export_decoder(network, dtype, config.cache_len, folder / VERIFY)
    del network  # its weights are on disk now
    drafter.export(dtype, config.cache_len, folder)
    export_score(drafter.vocab_size, config.max_draft_len, dtype, folder / SCORE)
    export_trim(config.max_draft_len, folder / TRIM)
    return num_bytes


def _verify(
    config: BuildConfig,
    target: CheckpointFiles,
    drafter: DraftSource,
    folder: Path,
    report: BuildReport,
) -> None:
    twin: Path | None = None
    try:
        if config.weight_dtype != "float32":
            twin = folder / "float32"
            twin.mkdir()
            _export(config, target, drafter, torch.float32, twin)
        checked = twin or folder
        positions = config.max_draft_len
        model = LlamaModel(target.config, target.tensors())
        report.differences[VERIFY], _ = verify_decoder(checked / VERIFY, model, positions)
        report.differences[DRAFT_STEP], logits = drafter.check(checked, model, positions)
        report.differences[SCORE] = verify_score(checked / SCORE, drafter.vocab_size, positions)
        verify_trim(checked / TRIM, positions)
        report.end_to_end_rounds = verify_end_to_end(
            checked / SCORE, checked / TRIM, logits, positions
        )
    finally:
        if twin is not None:
            shutil.rmtree(twin, ignore_errors=True)


def _compile(
    config: BuildConfig,
    compiler: PlanCompiler,
    target: CheckpointFiles,
    drafter: DraftSource,
    folder: Path,
) -> dict[str, dict[str, Any]]:
    profiles = config.profiles()
    both, per_round = list(profiles.values()), [profiles["decode"]]
    # Score and trim have one size, the number of requests, which both passes share.
    parts = (
        (VERIFY, both, target.config.num_layers, 0),
        (DRAFT_STEP, both, drafter.num_attention_layers, 0),
        (DRAFT_CHAIN, per_round, 0, 0),
        (SCORE, per_round, 0, 1),
        (TRIM, per_round, 0, 1),
    )
    plans: dict[str, dict[str, Any]] = {}
    for name, sizes, num_attention_layers, num_plugins in parts:
        source = folder / name
        if not source.exists():  # only some drafters have a second network
            continue
        plan = compiler.compile(
            source,
            source.with_suffix(".plan"),
            sizes,
            num_attention_layers=num_attention_layers,
            num_plugins=num_plugins,
        )
        plans[source.with_suffix(".plan").name] = asdict(plan)
    return plans
