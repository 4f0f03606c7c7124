"""The compiler that a configuration asks for: its module, its GPU, its plugins and its timing cache."""

from __future__ import annotations

from typing import Any

from trtllm_av.builder.compile import PlanCompiler
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.progress import BuildProgress
from trtllm_av.plugins import tensorrt_plugin
from trtllm_av.runtime.engines.gpu import current_gpu
from trtllm_av.runtime.engines.tensorrt_module import check_compute_capability, import_backend
from trtllm_av.runtime.errors import AdaptiveVerificationError, DeviceError
from trtllm_av.runtime.models.smollm2 import cache_folder


def create_compiler(config: BuildConfig, progress: BuildProgress) -> PlanCompiler:
    """A compiler for ``config.backend``, with our plugins registered if they are wanted and can be.

    Raises MissingDependencyError, UsageError for a compute capability that cannot be built for, and
    DeviceError for TensorRT without a GPU.
    """
    trt = import_backend(config.backend)
    if config.backend == "tensorrt_rtx":
        assert config.compute_capability is not None  # BuildConfig sees to it
        check_compute_capability(trt, config.compute_capability)
        device = {"name": None, "compute_capability": config.compute_capability}
        return PlanCompiler(trt, config.backend, progress, device=device)
    gpu = current_gpu()
    if gpu is None:
        raise DeviceError(
            "--backend tensorrt compiles on the GPU it builds for, and there is none; use "
            "--backend tensorrt_rtx --compute_capability, or --backend onnx"
        )
    return PlanCompiler(
        trt,
        config.backend,
        progress,
        device={"name": gpu.name, "compute_capability": gpu.compute_capability},
        has_plugins=_register_plugins(trt, config.adaptive_verification_plugin, progress),
        timing_cache=cache_folder() / f"timing-{trt.__version__}-{gpu.compute_capability}.cache",
    )


def _register_plugins(trt: Any, mode: str, progress: BuildProgress) -> bool:
    """True if the plugins are registered; with ``auto`` a reason against it is said, not raised."""
    if mode == "disable":
        return False
    try:
        tensorrt_plugin.register(trt)
    except AdaptiveVerificationError as error:
        if mode == "enable":
            raise
        progress.say(f"without plugins: {error}")
        return False
    return True
