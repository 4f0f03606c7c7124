"""An exported network on onnxruntime: the same file that TensorRT compiles.

Objective: to show on any machine that the file computes what the torch module computes; it is no fast
path. Invariants: the updated caches are written into the memory that they are read from, which two plans
may share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.engines.plan import PassSizes
from trtllm_av.runtime.errors import CheckpointError, MissingDependencyError

_DTYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}


class OnnxPlan:
    """The network of ``path``; positions per slot are the file's."""

    def __init__(
        self,
        path: Path,
        *,
        num_slots: int = 0,
        num_threads: int = 0,
        shared_caches: Mapping[str, Any] | None = None,
    ) -> None:
        """``num_threads`` 0 takes torch's. A cache that ``shared_caches`` names is taken from there.

        Raises CheckpointError for a file that onnxruntime refuses.
        """
        self._num_threads = num_threads or torch.get_num_threads()
        self._session = open_session(path, self._num_threads)
        inputs = self._session.get_inputs()
        caches = [one for one in inputs if "_cache_" in one.name]
        self.num_slots = num_slots if caches else 0
        self.max_len = int(caches[0].shape[2]) if caches else 0
        typed = [one for one in inputs if one.type in _DTYPES]
        self.dtype = _DTYPES[(caches or typed)[0].type]
        shared = shared_caches or {}
        self._caches: dict[str, Any] = {}
        for one in caches:
            value = shared.get(one.name)
            self._caches[one.name] = value or self._zeros(num_slots, *one.shape[1:])

    def _zeros(self, *shape: int) -> Any:
        import onnxruntime

        zeros = torch.zeros(*shape, dtype=self.dtype).numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy(zeros)

    @property
    def max_row_tokens(self) -> int | None:
        return None

    @property
    def caches(self) -> Mapping[str, Any]:
        return self._caches

    @property
    def identity(self) -> ExecutorIdentity:
        dtype = str(self.dtype).removeprefix("torch.")
        return ExecutorIdentity("onnxruntime", "cpu", dtype, self._num_threads)

    def sizes(self, wanted: PassSizes) -> PassSizes:
        return wanted

    def run(self, feed: Mapping[str, Tensor], outputs: Sequence[str]) -> list[Tensor]:
        binding = self._session.io_binding()
        arrays = {name: value.contiguous().numpy() for name, value in feed.items()}
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        for name in outputs:  # before the caches: results come in the order of binding
            binding.bind_output(name)
        for name, value in self._caches.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("_cache_", "_out_"), value)
        self._session.run_with_iobinding(binding)
        results = binding.get_outputs()[: len(outputs)]
        return [torch.from_numpy(value.numpy()) for value in results]


def open_session(path: Path, num_threads: int) -> Any:
    """An onnxruntime session on the CPU.

    Raises MissingDependencyError without onnxruntime, CheckpointError if it refuses the file.
    """
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependencyError(
            "running an exported file needs onnxruntime; install it with: "
            "pip install 'trtllm-adaptive-verification[onnx]'"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # passes are tiny
    options.log_severity_level = 3  # errors; warnings are about unused initialisers
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes are private and have no common base
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"onnxruntime refuses {str(path)!r}: {reason[0]}; on a CPU it runs files exported with "
            "--dtype float32 or float16"
        ) from None
