"""ONNX files to plans, by TensorRT-RTX on machines with and without a GPU, and by TensorRT on its GPU.

Objective: plans with the attention and the cache update that the builder has kernels for. Invariants: our
plugins are registered for TensorRT only: TensorRT-RTX holds none, and its parser ends the process on
meeting one; a plan without plugins takes our operations from their local functions; what the network is
made of is checked before it is compiled.

The timing cache is TensorRT's alone: in TensorRT-RTX its calls do nothing. Stripped plans are left out,
because TensorRT-RTX cannot build one without a GPU.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_av.builder.export import import_onnx
from trtllm_av.builder.progress import PhaseObserver, progress_monitor
from trtllm_av.runtime.engines.tensorrt_module import title
from trtllm_av.runtime.errors import BuildError

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


@dataclass(frozen=True, slots=True)
class PlanCompiler:
    """``trt`` is the module of ``backend``, ``tensorrt`` or ``tensorrt_rtx``.

    ``device`` has the ``compute_capability`` to build for and the ``name`` of the GPU that TensorRT builds
    on; ``has_plugins`` says that our plugins are registered with ``trt``; ``timing_cache`` is a file
    that is read if it is there and written after each build.
    """

    trt: Any
    backend: str
    observer: PhaseObserver
    device: dict[str, Any]
    has_plugins: bool = False
    timing_cache: Path | None = None

    @property
    def version(self) -> dict[str, str]:
        """What a plan says it was built by; it runs under no other version."""
        return {self.backend: str(self.trt.__version__)}

    def compile(
        self,
        source: Path,
        target: Path,
        profiles: Sequence[Profile],
        *,
        num_attention_layers: int = 0,
        num_plugins: int = 0,
    ) -> CompiledPlan:
        """Build ``source`` and write the plan to ``target``.

        Raises BuildError with TensorRT's own words if it refuses, or if the network does not hold
        ``num_attention_layers`` native attentions with two cache updates each, or, with plugins,
        ``num_plugins`` of them.
        """
        trt, name = self.trt, title(self.backend)
        started = time.perf_counter()
        messages: list[str] = []
        builder = trt.Builder(_error_log(trt, messages))
        network = builder.create_network(_creation_flags(trt))
        parser = trt.OnnxParser(network, builder.logger)
        if not parser.parse_from_file(os.fspath(source)):
            messages += [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise BuildError(f"{name} cannot read {source.name}: {_last(messages)}")
        layers = Counter(
            str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers)
        )
        expected = {"KV_CACHE_UPDATE": 2 * num_attention_layers}
        expected["ATTENTION_INPUT"] = num_attention_layers
        expected["PLUGIN_V3"] = num_plugins if self.has_plugins else 0
        _require_layers(f"{source.name}: {name}", layers, expected)
        config = builder.create_builder_config()
        monitor = progress_monitor(trt, self.observer)
        config.progress_monitor = monitor
        if self.backend == "tensorrt_rtx":
            capability = getattr(trt.ComputeCapability, f"SM{self.device['compute_capability']}")
            config.num_compute_capabilities = 1
            config.set_compute_capability(capability, 0)
        shapes = _input_shapes(source)
        for sizes in profiles:
            profile = builder.create_optimization_profile()
            for tensor, shape in shapes.items():
                if any(isinstance(size, str) for size in shape):
                    profile.set_shape(tensor, *_extremes(shape, sizes))
            if config.add_optimization_profile(profile) < 0:
                raise BuildError(f"{source.name}: {name} refuses the sizes {dict(sizes)}")
        if self.timing_cache is not None:
            config.set_timing_cache(_read_timing_cache(config, self.timing_cache), False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{name} cannot build {source.name}: {_last(messages)}")
        content = bytes(plan)
        target.write_bytes(content)
        if self.timing_cache is not None:
            _write_timing_cache(config, self.timing_cache)
        return CompiledPlan(
            num_bytes=len(content),
            seconds=time.perf_counter() - started,
            layers=dict(layers),
            has_fused_attention=FUSED_ATTENTION in content,
        )


def _creation_flags(trt: Any) -> int:
    # From TensorRT 11 on every network is strongly typed, with or without the flag.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _require_layers(where: str, layers: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """A node that fell back to its local function would cost a copy of the cache in each layer."""
    for kind, count in expected.items():
        if layers.get(kind, 0) != count:
            raise BuildError(
                f"{where} made {layers.get(kind, 0)} layers of type {kind}, expected {count}; this "
                "version lacks the native layer or the plugin was not found, use a newer one"
            )


def _read_timing_cache(config: Any, path: Path) -> Any:
    """The cache in ``path``, an empty one if there is none or it does not fit this GPU."""
    with suppress(OSError, RuntimeError, ValueError):
        cache = config.create_timing_cache(path.read_bytes())
        if cache is not None:
            return cache
    return config.create_timing_cache(b"")


def _write_timing_cache(config: Any, path: Path) -> None:
    """Atomically, since builds may run side by side; a full disk costs the next build time, no more."""
    content = bytes(config.get_timing_cache().serialize())
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


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
