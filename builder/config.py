"""What ``trtllm-av-build`` is asked for, checked before any work is done.

Invariants: every wrong value is a UsageError that names its flag; nothing is corrected silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_av.builder.export import DTYPES
from trtllm_av.plugins.onnx_functions import MAX_TRIM_SLOTS
from trtllm_av.runtime.engines.tensorrt_module import title
from trtllm_av.runtime.errors import UsageError

BACKENDS = ("onnx", "tensorrt", "tensorrt_rtx")
PLUGIN_MODES = ("auto", "disable", "enable")
MAX_DRAFT_LEN = 16


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """The flags of a build; ``max_num_tokens`` None is (max_draft_len + 1) · max_batch_size, ``dtype`` None
    what the backend runs best: float32 for onnxruntime, bfloat16 for plans."""

    model_dir: str
    output_dir: Path
    speculative_model: str | None = None
    backend: str = "onnx"
    dtype: str | None = None
    compute_capability: int | None = None
    max_batch_size: int = 8
    max_seq_len: int = 2048
    max_draft_len: int = 7
    max_num_tokens: int | None = None
    adaptive_verification_plugin: str = "auto"
    verify: bool = True

    def __post_init__(self) -> None:
        self._check_choice("backend", BACKENDS)
        if self.dtype is not None:
            self._check_choice("dtype", tuple(DTYPES))
        self._check_choice("adaptive_verification_plugin", PLUGIN_MODES)
        self._check_range("max_draft_len", 1, MAX_DRAFT_LEN)
        self._check_range("max_batch_size", 1, MAX_TRIM_SLOTS // self.max_draft_len)
        self._check_range("max_seq_len", 2, 1 << 20)
        if self.max_num_tokens is not None:
            self._check_range("max_num_tokens", self.max_batch_size, 1 << 20)
        if self.adaptive_verification_plugin == "enable" and self.backend != "tensorrt":
            raise UsageError(
                f"--adaptive_verification_plugin enable: backend {self.backend!r} holds no plugins; "
                "use auto or disable, which put the operations into the graph"
            )
        if self.has_plans and self.dtype == "float32":
            raise UsageError(
                f"--dtype float32: {title(self.backend)} has no attention kernel for it; use bfloat16 or "
                "float16"
            )
        if self.backend == "tensorrt_rtx":
            if self.compute_capability is None:
                raise UsageError(
                    "--backend tensorrt_rtx needs --compute_capability, for instance 89"
                )
        elif self.compute_capability is not None:
            reason = "builds for the GPU it runs on" if self.has_plans else "builds for no GPU"
            raise UsageError(
                f"--compute_capability {self.compute_capability}: backend {self.backend!r} {reason}; "
                "leave it out"
            )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise UsageError(
                f"--{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}"
            )

    def _check_range(self, name: str, low: int, high: int) -> None:
        if not low <= getattr(self, name) <= high:
            raise UsageError(f"--{name} {getattr(self, name)} must be from {low} to {high}")

    @property
    def has_plans(self) -> bool:
        """True if the ONNX files are compiled."""
        return self.backend != "onnx"

    @property
    def weight_dtype(self) -> str:
        """Of weights and cache."""
        return self.dtype or ("bfloat16" if self.has_plans else "float32")

    @property
    def full_decode_tokens(self) -> int:
        """Packed tokens of a round in which every request verifies a whole draft."""
        return (self.max_draft_len + 1) * self.max_batch_size

    @property
    def num_tokens(self) -> int:
        """Most packed tokens of one pass."""
        return self.max_num_tokens or self.full_decode_tokens

    @property
    def cache_len(self) -> int:
        """Positions per slot: a round may write a draft behind the end and one more after it."""
        return self.max_seq_len + 2 * (self.max_draft_len + 1)

    def profiles(self) -> dict[str, Mapping[str, tuple[int, int, int]]]:
        """Sizes (smallest, likeliest, largest) of the decode and of the prefill passes, by name."""
        slots, tokens = self.max_batch_size, self.num_tokens
        decode = min(self.full_decode_tokens, tokens)
        common = {
            "B": (1, slots, slots),
            "B_plus_1": (2, slots + 1, slots + 1),
            "R": (1, slots, slots),
        }
        width = self.max_draft_len + 1
        return {
            "decode": common
            | {
                "T": (1, max(decode // 2, 1), decode),
                "N": (1, max(decode // 2, 1), decode),
                "M": (1, width, width),
            },
            "prefill": common
            | {"T": (1, tokens, tokens), "N": (1, slots, slots), "M": (1, tokens, tokens)},
        }

    def to_dict(self) -> dict[str, Any]:
        """What ``build_config`` of an engine directory says."""
        return {
            "backend": self.backend,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.num_tokens,
            "max_seq_len": self.max_seq_len,
            "max_draft_len": self.max_draft_len,
            "kv_cache_len": self.cache_len,
        }
