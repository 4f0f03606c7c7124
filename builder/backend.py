"""Which backend a build takes if nobody names one, and where a plan will run.

Invariants: the choice and its reason are printed; a backend is only chosen if a build with it can begin.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_av.runtime.engines.gpu import Gpu, current_gpu
from trtllm_av.runtime.engines.tensorrt_module import (
    buildable_capabilities,
    import_backend,
    is_installed,
)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, the compute capability that it is to build for (TensorRT-RTX only), and why."""

    backend: str
    compute_capability: int | None
    reason: str


def choose_backend(compute_capability: int | None) -> BackendChoice:
    """TensorRT with a GPU, else TensorRT-RTX for ``compute_capability`` or the GPU here, else the files."""
    gpu = current_gpu()
    if compute_capability is None and gpu is not None and is_installed("tensorrt"):
        return BackendChoice("tensorrt", None, f"TensorRT is installed and there is a {gpu.name}")
    if is_installed("tensorrt_rtx"):
        if compute_capability is not None:
            reason = "TensorRT-RTX is installed and a compute capability is given"
            return BackendChoice("tensorrt_rtx", compute_capability, reason)
        return _for_this_gpu(gpu)
    reason = "neither TensorRT with a GPU nor TensorRT-RTX is here"
    return BackendChoice("onnx", compute_capability, reason)


def _for_this_gpu(gpu: Gpu | None) -> BackendChoice:
    if gpu is None:
        reason = "TensorRT-RTX is installed, but there is no GPU and no --compute_capability"
        return BackendChoice("onnx", None, reason)
    known = buildable_capabilities(import_backend("tensorrt_rtx"))
    if gpu.compute_capability not in known:
        reason = f"TensorRT-RTX is installed, but builds for {known}, not for the {gpu.name} here"
        return BackendChoice("onnx", None, reason)
    reason = f"TensorRT-RTX is installed and there is a {gpu.name}"
    return BackendChoice("tensorrt_rtx", gpu.compute_capability, reason)
