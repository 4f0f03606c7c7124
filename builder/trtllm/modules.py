"""The modules of TensorRT and TensorRT-LLM that a network is built with, taken as a parameter.

Invariants: nothing here imports them before a network is asked for, and tests hand in doubles; a version
that is not known is refused before anything is built.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.runtime.errors import MissingDependencyError


@dataclass(frozen=True, slots=True)
class TrtllmModules:
    """``tensorrt``, and of ``tensorrt_llm``: ``_common``, ``functional`` and ``models.eagle.model``."""

    tensorrt: Any
    common: Any
    functional: Any
    eagle: Any


def import_trtllm() -> ModuleType:
    """The installed ``tensorrt_llm``.

    Raises MissingDependencyError where it is not installed and BuildError for an unknown version.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        containers = ", ".join(entry.container for entry in assumptions().versions.values())
        raise MissingDependencyError(
            f"TensorRT-LLM cannot be imported ({error}); run in one of the images {containers}"
        ) from None
    assumptions().version(str(package.__version__))
    return package


def installed_modules() -> TrtllmModules:
    """The modules of the installed TensorRT-LLM; raises as ``import_trtllm`` does."""
    import_trtllm()
    return TrtllmModules(
        tensorrt=importlib.import_module("tensorrt"),
        common=importlib.import_module("tensorrt_llm._common"),
        functional=importlib.import_module("tensorrt_llm.functional"),
        eagle=importlib.import_module("tensorrt_llm.models.eagle.model"),
    )
