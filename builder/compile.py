"""ONNX files to TensorRT-RTX plans, on machines with and without a GPU.

Objective: a plan for the compute capability asked for, with the attention and the cache update that
TensorRT has kernels for. Invariants: no plugin is ever registered, because TensorRT-RTX cannot hold one
and its parser ends the process on meeting one; our operations come in through their local functions.

Left out on purpose: a timing cache, whose calls do nothing in TensorRT-RTX; stripped plans, which it
cannot build without a GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_av.builder.export import import_onnx
from trtllm_av.runtime.errors import BuildError, MissingDependencyError, UsageError

#: (smallest, likeliest, largest) of each dynamic size, by its name in the file.
Profile = Mapping[str, tuple[int, int, int]]
#: Text in a plan whose attention runs in one fused kernel.
FUSED_ATTENTION = b"_gemm_mha_v2"


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What was written and what TensorRT made of it; ``layers`` counts layer types of the network."""

    num_bytes: int
    seconds: float
    layers: dict[str, int]
    has_fused_attention: bool


def import_tensorrt_rtx() -> Any:
    """The ``tensorrt_rtx`` module; raises MissingDependencyError without it."""
    try:
        import tensorrt_rtx
    except ImportError:
        raise MissingDependencyError(
            "--backend tensorrt_rtx needs TensorRT-RTX; install it with: "
            "pip install 'trtllm-adaptive-verification[tensorrt-rtx]'"
        ) from None
    return tensorrt_rtx


def check_compute_capability(trt: Any, capability: int) -> None:
    """Raises UsageError for one that this TensorRT-RTX does not build for."""
    known = sorted(int(name[2:]) for name in dir(trt.ComputeCapability) if re.match(r"SM\d", name))
    if capability not in known:
        raise UsageError(
            f"--compute_capability {capability}: TensorRT-RTX {trt.__version__} builds for "
            f"{', '.join(map(str, known))}"
        )


def compile_plan(
    source: Path,
    target: Path,
    profiles: Sequence[Profile],
    compute_capability: int,
    *,
    num_attention_layers: int = 0,
) -> CompiledPlan:
    """Build ``source`` for SM ``compute_capability`` and write the plan to ``target``.

    Raises BuildError with TensorRT's own words if it refuses, or if the network does not hold
    ``num_attention_layers`` native attentions with two cache updates each.
    """
    trt = import_tensorrt_rtx()
    started = time.perf_counter()
    messages: list[str] = []
    builder = trt.Builder(_error_log(trt, messages))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(os.fspath(source)):
        messages += [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise BuildError(f"TensorRT-RTX cannot read {source.name}: {_last(messages)}")
    layers = Counter(
        str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers)
    )
    _require_native_attention(source, layers, num_attention_layers)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{compute_capability}"), 0)
    shapes = _input_shapes(source)
    for sizes in profiles:
        profile = builder.create_optimization_profile()
        for name, shape in shapes.items():
            if any(isinstance(size, str) for size in shape):
                profile.set_shape(name, *_extremes(shape, sizes))
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"{source.name}: TensorRT-RTX refuses the sizes {dict(sizes)}")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildError(f"TensorRT-RTX cannot build {source.name}: {_last(messages)}")
    content = bytes(plan)
    target.write_bytes(content)
    return CompiledPlan(
        num_bytes=len(content),
        seconds=time.perf_counter() - started,
        layers=dict(layers),
        has_fused_attention=FUSED_ATTENTION in content,
    )


def _require_native_attention(source: Path, layers: Mapping[str, int], expected: int) -> None:
    """A node that fell back to its local function would cost a copy of the cache in each layer."""
    for kind, count in (("KV_CACHE_UPDATE", 2 * expected), ("ATTENTION_INPUT", expected)):
        if layers.get(kind, 0) != count:
            raise BuildError(
                f"{source.name}: TensorRT-RTX made {layers.get(kind, 0)} layers of type {kind}, "
                f"expected {count}; this version lacks the native layer, use 1.7 or newer"
            )


def _error_log(trt: Any, messages: list[str]) -> Any:
    class ErrorLog(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                messages.append(message)

    return ErrorLog()


def _input_shapes(path: Path) -> dict[str, list[str | int]]:
    model = import_onnx().load(os.fspath(path), load_external_data=False)
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }


def _extremes(shape: Sequence[str | int], sizes: Profile) -> list[tuple[int, ...]]:
    return [
        tuple(sizes[size][which] if isinstance(size, str) else size for size in shape)
        for which in range(3)
    ]


def _last(messages: Sequence[str]) -> str:
    return " ".join(messages[-1].split())[:300] if messages else "it gives no reason"
