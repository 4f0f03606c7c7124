"""The ``tensorrt`` or ``tensorrt_rtx`` module, imported where it is used and refused where it is too old.

Both have one API but for plugins, which TensorRT-RTX does not have, and compute capabilities, which only
TensorRT-RTX builds for without a GPU.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from trtllm_av.runtime.errors import MissingDependencyError, UsageError

#: Oldest version by backend: ragged cache updates and attention came with these.
_OLDEST = {"tensorrt": (11, 1), "tensorrt_rtx": (1, 7)}
_EXTRA = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
_TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}


def import_backend(backend: str) -> Any:
    """The module of ``backend``; MissingDependencyError if it is not installed or too old."""
    oldest = ".".join(map(str, _OLDEST[backend]))
    remedy = f"pip install 'trtllm-adaptive-verification[{_EXTRA[backend]}]'"
    try:
        module = importlib.import_module(backend)
    except (ImportError, OSError) as error:  # OSError: its libraries do not load
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MissingDependencyError(
            f"backend {backend!r} needs {title(backend)} {oldest} or newer ({reason[0]}); install it "
            f"with: {remedy}"
        ) from None
    found = str(getattr(module, "__version__", "0"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < _OLDEST[backend]:
        raise MissingDependencyError(
            f"backend {backend!r} needs {title(backend)} {oldest} or newer, {found} is installed; "
            f"upgrade it with: {remedy}"
        )
    return module


def is_installed(backend: str) -> bool:
    """True if ``import_backend`` succeeds."""
    try:
        import_backend(backend)
    except MissingDependencyError:
        return False
    return True


def title(backend: str) -> str:
    """How the product is called in messages."""
    return _TITLES[backend]


def buildable_capabilities(trt: Any) -> list[int]:
    """What TensorRT-RTX builds for, in two digits each."""
    names = dir(trt.ComputeCapability)
    return sorted(int(name[2:]) for name in names if re.fullmatch(r"SM\d+", name))


def check_compute_capability(trt: Any, capability: int) -> None:
    """Raises UsageError for one that this TensorRT-RTX does not build for."""
    known = buildable_capabilities(trt)
    if capability not in known:
        raise UsageError(
            f"--compute_capability {capability}: TensorRT-RTX {trt.__version__} builds for "
            f"{', '.join(map(str, known))}"
        )
