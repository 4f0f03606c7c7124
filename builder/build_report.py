"""What a build did, in figures."""

from __future__ import annotations

import importlib.metadata
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from trtllm_av.builder.progress import BuildProgress

_PACKAGES = ("trtllm-adaptive-verification", "torch", "onnx", "onnxscript")


@dataclass(slots=True)
class BuildReport:
    """``differences`` are the largest ones that the check found, by file; ``end_to_end_rounds`` counts the
    rounds whose ``verify_lens`` were compared from the drafter's logits on;
    ``export_memory_bytes`` is the memory that the export added to the process, to be compared with
    ``weight_bytes`` of the target."""

    output_dir: str
    backend: str
    drafter: str
    operations: str = "onnx_functions"
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    end_to_end_rounds: int = 0
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_bytes: int = 0
    weight_bytes: int = 0
    export_memory_bytes: int = 0
    peak_memory_bytes: int = 0

    def stages(self, progress: BuildProgress) -> Callable[[str], AbstractContextManager[None]]:
        """A context manager per stage, which shows it and notes its time."""

        @contextmanager
        def stage(name: str) -> Iterator[None]:
            started = time.perf_counter()
            with progress.stage(name):
                yield
            self.seconds[name] = time.perf_counter() - started

        return stage


def peak_memory_bytes() -> int:
    """The most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
    """Installed versions of the packages that a build depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
