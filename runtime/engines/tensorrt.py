"""A compiled plan on TensorRT or TensorRT-RTX, bound to memory of torch.

Written against the API of TensorRT 11.1 and TensorRT-RTX 1.7. It was tested with a stand-in for that module,
which checks the sequence of calls, the shapes and the aliasing; it has not been executed on a GPU.

Objective: rounds without allocation: inputs and outputs have buffers of the largest size that a profile
allows, and a decode pass of a known size is one CUDA graph. Invariants: the updated caches have the memory
of the caches; every profile has an execution context of its own, because a captured graph belongs to the
profile and the shapes it was captured under; a size outside every profile is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity
from trtllm_av.runtime.engines.plan import PassSizes
from trtllm_av.runtime.engines.tensorrt_device import PlanDevice, Replay
from trtllm_av.runtime.errors import CheckpointError

_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}
#: Decode passes are padded to a multiple of this, so that few graphs serve all of them.
_BUCKET = 8
_Shapes = tuple[tuple[int, ...], ...]


class TensorRTPlan:
    """The plan of ``path``, run by ``trt``, the module ``tensorrt`` or ``tensorrt_rtx``.

    The first profile is that of decode passes; only its passes become CUDA graphs.
    """

    def __init__(
        self,
        trt: Any,
        path: Path,
        device: PlanDevice,
        *,
        num_slots: int = 0,
        shared_caches: Mapping[str, Tensor] | None = None,
    ) -> None:
        """A cache that ``shared_caches`` names is taken from there.

        Raises CheckpointError for a plan that ``trt`` refuses or whose outputs alias other inputs.
        """
        self._trt = trt
        self._device = device
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._logger)  # outlives the engine
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise CheckpointError(
                f"{trt.__name__} {trt.__version__} refuses {str(path)!r}; build the engine again on this "
                "machine"
            )
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        is_input = {n: engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
        caches = [name for name in names if is_input[name] and "_cache_" in name]
        updated = {name.replace("_cache_", "_out_"): name for name in caches}
        self._inputs = [name for name in names if is_input[name] and name not in caches]
        self._outputs = [name for name in names if not is_input[name] and name not in updated]
        self._check_aliases(path, updated)
        self.num_slots = num_slots if caches else 0
        self.max_len = int(engine.get_tensor_shape(caches[0])[2]) if caches else 0
        self.dtype = self._dtype(caches[0] if caches else self._outputs[0])
        shared = shared_caches or {}
        self._caches = {name: shared.get(name, self._new_cache(name)) for name in caches}
        with device.queue() as stream:
            self._profiles = [
                _Profile(self, index, stream) for index in range(engine.num_optimization_profiles)
            ]
        for output, cache in updated.items():
            for profile in self._profiles:
                profile.bind(output, self._caches[cache])

    def _check_aliases(self, path: Path, updated: Mapping[str, str]) -> None:
        for output, cache in updated.items():
            found = self._engine.get_aliased_input_tensor(output)
            if found not in (cache, None):
                raise CheckpointError(
                    f"{str(path)!r}: output {output!r} shares the memory of {found!r}, expected {cache!r}; "
                    "build the engine again"
                )

    def _dtype(self, name: str) -> torch.dtype:
        return _DTYPES[str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]]

    def _new_cache(self, name: str) -> Tensor:
        shape = [int(size) for size in self._engine.get_tensor_shape(name)]
        # Zeros: what lies behind a slot's length has to be finite.
        return torch.zeros(
            self.num_slots, *shape[1:], dtype=self._dtype(name), device=self._device.torch_device
        )

    @property
    def caches(self) -> Mapping[str, Tensor]:
        return self._caches

    @property
    def identity(self) -> ExecutorIdentity:
        dtype = str(self.dtype).removeprefix("torch.")
        return ExecutorIdentity(self._trt.__name__, self._device.name, dtype, 1)

    @property
    def max_row_tokens(self) -> int | None:
        largest = [profile.largest_sizes() for profile in self._profiles]
        return max(min(one.num_tokens, one.width) for one in largest)

    def sizes(self, wanted: PassSizes) -> PassSizes:
        """Decode passes in buckets and with the decode profile's width; others as they are.

        Raises ValueError for a pass that no profile allows.
        """
        decode = self._profiles[0].largest_sizes()
        if _fits(wanted, decode):
            return PassSizes(
                _bucket(wanted.num_tokens, decode.num_tokens),
                decode.width,
                _bucket(wanted.num_logits, decode.num_logits),
            )
        largest = [profile.largest_sizes() for profile in self._profiles]
        if not any(_fits(wanted, one) for one in largest):
            raise ValueError(f"{wanted} exceeds what the plan was built for: {largest}")
        return wanted

    def run(self, feed: Mapping[str, Tensor], outputs: Sequence[str]) -> list[Tensor]:
        shapes: _Shapes = tuple(tuple(feed[name].shape) for name in self._inputs)
        profile = next((one for one in self._profiles if one.allows(shapes)), None)
        if profile is None:
            sizes = dict(zip(self._inputs, shapes, strict=True))
            raise ValueError(f"no profile of the plan allows the shapes {sizes}")
        with self._device.queue() as stream:
            profile.fill(feed)
            profile.execute(shapes, stream)
            # A copy, wherever the buffer is: the next pass overwrites it.
            return [profile.output(name).to("cpu", copy=True) for name in outputs]


class _Profile:
    """One optimisation profile: an execution context, its buffers and the graphs captured with them."""

    def __init__(self, plan: TensorRTPlan, index: int, stream: int) -> None:
        self._plan = plan
        self._index = index
        engine = plan._engine
        self._context = _new_context(plan._trt, engine)
        if not self._context.set_optimization_profile_async(index, stream):
            raise CheckpointError(f"{plan._trt.__name__} refuses profile {index} of its own plan")
        bounds = {name: engine.get_tensor_profile_shape(name, index) for name in plan._inputs}
        self._smallest: _Shapes = tuple(tuple(bounds[name][0]) for name in plan._inputs)
        self._largest: _Shapes = tuple(tuple(bounds[name][2]) for name in plan._inputs)
        self._replays: dict[_Shapes, tuple[Replay, dict[str, tuple[int, ...]]]] = {}
        self._output_shapes: dict[str, tuple[int, ...]] = {}
        for name, cache in plan._caches.items():
            self._set_shape(name, tuple(cache.shape))
            self.bind(name, cache)
        self._buffers: dict[str, Tensor] = {}
        self._set_shapes(self._largest)
        for name in (*plan._inputs, *plan._outputs):
            shape = tuple(self._context.get_tensor_shape(name))
            self._buffers[name] = torch.zeros(
                math.prod(shape), dtype=plan._dtype(name), device=plan._device.torch_device
            )
            self.bind(name, self._buffers[name])

    def bind(self, name: str, memory: Tensor) -> None:
        if not self._context.set_tensor_address(name, memory.data_ptr()):
            raise CheckpointError(f"{self._plan._trt.__name__} refuses the memory of {name!r}")

    def allows(self, shapes: _Shapes) -> bool:
        return all(
            len(shape) == len(low)
            and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
            for shape, low, high in zip(shapes, self._smallest, self._largest, strict=True)
        )

    def largest_sizes(self) -> PassSizes:
        """Of a network with packed tokens."""
        largest = dict(zip(self._plan._inputs, self._largest, strict=True))
        return PassSizes(largest["input_ids"][0], largest["pad_idx"][1], largest["logit_idx"][0])

    def fill(self, feed: Mapping[str, Tensor]) -> None:
        """Copy the inputs to the front of their buffers."""
        for name in self._plan._inputs:
            value = feed[name]
            buffer = self._buffers[name][: value.numel()]
            buffer.copy_(value.reshape(-1), non_blocking=True)

    def execute(self, shapes: _Shapes, stream: int) -> None:
        """Queue one pass; a decode pass of a new size is captured too, and later ones are replays."""
        if shapes in self._replays:  # the context is left as it is: the graph has all it needs
            replay, self._output_shapes = self._replays[shapes]
            replay()
            return
        self._set_shapes(shapes)
        self._output_shapes = {
            name: tuple(self._context.get_tensor_shape(name)) for name in self._plan._outputs
        }
        self._enqueue(stream)  # TensorRT finishes its set-up for a size in the first pass
        if self._index == 0 and _is_capturable(self._context, stream):
            replay = self._plan._device.capture(self._enqueue)
            self._replays[shapes] = (replay, self._output_shapes)

    def _enqueue(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise RuntimeError(f"{self._plan._trt.__name__} could not queue a pass")

    def output(self, name: str) -> Tensor:
        """A view of the output's buffer, as large as the shapes of this pass make it."""
        shape = self._output_shapes[name]
        return self._buffers[name][: math.prod(shape)].view(shape)

    def _set_shapes(self, shapes: _Shapes) -> None:
        for name, shape in zip(self._plan._inputs, shapes, strict=True):
            self._set_shape(name, shape)
        missing = self._context.infer_shapes()
        if missing:
            raise RuntimeError(f"{self._plan._trt.__name__} still asks for {missing}")

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._context.set_input_shape(name, shape):
            raise ValueError(f"{self._plan._trt.__name__} refuses the shape {shape} of {name!r}")


def _new_context(trt: Any, engine: Any) -> Any:
    """TensorRT-RTX compiles kernels for the shapes at hand; eagerly, or a graph would keep the slow ones."""
    strategies = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is None:
        return engine.create_execution_context()
    config = engine.create_runtime_config()
    config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
    return engine.create_execution_context(config)


def _is_capturable(context: Any, stream: int) -> bool:
    ask = getattr(context, "is_stream_capturable", None)  # TensorRT-RTX only
    return True if ask is None else bool(ask(stream))


def _fits(wanted: PassSizes, largest: PassSizes) -> bool:
    return (
        wanted.num_tokens <= largest.num_tokens
        and wanted.width <= largest.width
        and wanted.num_logits <= largest.num_logits
    )


def _bucket(size: int, largest: int) -> int:
    return min(-(-size // _BUCKET) * _BUCKET, largest)
