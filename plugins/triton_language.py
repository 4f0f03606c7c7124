"""Triton, which CUDA builds of torch bring along, or an error that says what to install."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_av.runtime.errors import MissingDependencyError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingDependencyError(
        f"triton is missing ({error}); install a CUDA build of torch, which brings it, or `pip install triton`"
    ) from None

__all__ = ["jit", "tl", "triton"]


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, which carries no types."""
    return triton.jit(function)
