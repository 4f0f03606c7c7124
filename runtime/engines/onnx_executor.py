"""The exported verify pass on onnxruntime: the same file that TensorRT compiles, driven by the scheduler.

Objective: to show on any machine that the file computes what the torch module computes; it is no fast
path. Invariants: every slot of the cache takes part in every pass, idle ones with no tokens, as they do
in an engine; the updated caches are written into the memory that they are read from; a batch that would
leave the cache is refused, because an engine would ignore the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.engines.engine_directory import EngineDirectory
from trtllm_av.runtime.errors import CheckpointError, MissingDependencyError
from trtllm_av.runtime.models.batch import PackedBatch

_DTYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}


class OnnxExecutor:
    """The target of ``verify.onnx`` with ``num_slots`` cache slots; positions per slot are the file's."""

    def __init__(
        self, path: Path, *, num_slots: int, vocab_size: int, num_threads: int = 0
    ) -> None:
        """``num_threads`` 0 takes torch's. Raises CheckpointError for a file that onnxruntime refuses."""
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self._num_threads = num_threads or torch.get_num_threads()
        self._session = open_session(path, self._num_threads)
        caches = [one for one in self._session.get_inputs() if "_cache_" in one.name]
        self.max_len = int(caches[0].shape[2])
        self._dtype = _DTYPES[caches[0].type]
        self._caches = KVBuffers(caches, num_slots, self._dtype)

    @classmethod
    def from_engine(cls, engine: EngineDirectory) -> OnnxExecutor:
        """The target of a built engine, with the slots that it was built for."""
        return cls(
            engine.folder / "verify.onnx",
            num_slots=int(engine.build_config["max_batch_size"]),
            vocab_size=int(engine.pretrained_config["vocab_size"]),
        )

    @property
    def identity(self) -> ExecutorIdentity:
        dtype = str(self._dtype).removeprefix("torch.")
        return ExecutorIdentity("onnxruntime", "cpu", dtype, self._num_threads)

    def verify(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return self._run(batch, torch.arange(batch.token_ids.numel()))

    def prefill(self, batch: PackedBatch, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(batch, logit_rows)

    def _run(self, batch: PackedBatch, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        layout = SlotLayout(batch, self.num_slots, self.max_len)
        feed = layout.feed() | {
            "input_ids": batch.token_ids[layout.order].numpy(),
            "logit_idx": layout.place[logit_rows].numpy(),
        }
        logits, hidden = self._caches.run(self._session, feed, ["logits", "hidden"])
        return torch.from_numpy(logits), torch.from_numpy(hidden)[layout.place]


class SlotLayout:
    """A batch in the order of the cache's slots, and the index inputs that an exported network takes.

    ``order`` [T] int64 names the batch's token at each packed row, ``place`` [T] is its inverse.
    """

    def __init__(self, batch: PackedBatch, num_slots: int, max_len: int) -> None:
        """Raises ValueError if a row leaves the cache or two rows share a slot."""
        slots, lengths = batch.slots, batch.lengths
        reach = int((batch.kv_lens + lengths).max())
        if reach > max_len:
            raise ValueError(f"a row reaches {reach} tokens, but the KV cache holds {max_len}")
        is_inside = bool(((slots >= 0) & (slots < num_slots)).all())
        if not is_inside or slots.unique().numel() != slots.numel():
            raise ValueError(
                f"slots {slots.tolist()} must be distinct and below num_slots={num_slots}"
            )
        rows = slots.argsort()
        row_of_token = rows.repeat_interleave(lengths[rows])
        first = lengths[rows].cumsum(0) - lengths[rows]
        offset = torch.arange(row_of_token.numel()) - first.repeat_interleave(lengths[rows])
        self.order = batch.cu_seqlens[row_of_token] + offset
        self.place = self.order.argsort()
        self._positions = batch.positions[self.order]
        self._lengths = torch.zeros(num_slots, dtype=torch.int64).index_copy(0, slots, lengths)
        self._starts = torch.zeros(num_slots, dtype=torch.int64).index_copy(0, slots, batch.kv_lens)
        self._token_slots = slots[row_of_token]

    def feed(self) -> dict[str, NDArray[Any]]:
        """``position_ids``, ``cu_q``, ``kv_write``, ``kv_len``, ``pad_idx`` and ``pack_idx``."""
        ends = self._lengths.cumsum(0)
        width = int(self._lengths.max())
        pad = (ends[:, None] - width + torch.arange(width)).clamp_min(0)
        from_end = ends[self._token_slots] - torch.arange(self.order.numel())
        pack = (self._token_slots + 1) * width - from_end
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        int32 = {"cu_q": cu, "kv_write": self._starts, "kv_len": self._starts + self._lengths}
        int64 = {"position_ids": self._positions, "pad_idx": pad, "pack_idx": pack}
        return {name: value.int().numpy() for name, value in int32.items()} | {
            name: value.numpy() for name, value in int64.items()
        }


class KVBuffers:
    """The caches of one exported network: memory that its passes read and update in place."""

    def __init__(self, inputs: Sequence[Any], num_slots: int, dtype: torch.dtype) -> None:
        import onnxruntime

        self._values: dict[str, Any] = {}
        for one in inputs:
            zeros = torch.zeros(num_slots, *one.shape[1:], dtype=dtype).numpy()
            self._values[one.name] = onnxruntime.OrtValue.ortvalue_from_numpy(zeros)

    def run(
        self, session: Any, feed: dict[str, NDArray[Any]], outputs: list[str]
    ) -> list[NDArray[Any]]:
        """The named outputs of one pass."""
        binding = session.io_binding()
        for name, value in feed.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
        for name in outputs:  # before the caches: results come in the order of binding
            binding.bind_output(name)
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("_cache_", "_out_"), value)
        session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[: len(outputs)]]


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
    options.log_severity_level = 3  # errors; warnings are about unused initialisers
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes are private and have no common base
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"onnxruntime refuses {str(path)!r}: {reason[0]}; on a CPU it runs files exported with "
            "--dtype float32 or float16"
        ) from None
