"""A stand-in for the module ``tensorrt``: it builds nothing and runs plans with onnxruntime on host memory.

It has the part of TensorRT's Python interface that this package uses, with the rules that a caller can break:
outputs are written to the addresses that were set, a pass without every shape and address fails, an updated
cache has to share its input's memory, one context serves one profile, and while a graph is captured nothing
runs. Rows that belong to no slot come back as NaN.
"""

from __future__ import annotations

import ctypes
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

__version__ = "11.1.0.42"

DataType = Enum("DataType", "FLOAT HALF BF16 INT32 INT64 BOOL")
TensorIOMode = Enum("TensorIOMode", "NONE INPUT OUTPUT")
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1})
_TYPES = {
    onnx.TensorProto.FLOAT: (DataType.FLOAT, np.float32),
    onnx.TensorProto.FLOAT16: (DataType.HALF, np.float16),
    onnx.TensorProto.INT32: (DataType.INT32, np.int32),
    onnx.TensorProto.INT64: (DataType.INT64, np.int64),
}
#: What was called, in order, as the tests want to see it.
calls: list[tuple[Any, ...]] = []
#: (name, version, namespace) of registered plugins.
plugins: set[tuple[str, str, str]] = set()
_capture: list[Callable[[], None]] | None = None


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING = range(3)


class Logger(ILogger):
    def __init__(self, severity: int) -> None: ...


class IProgressMonitor:
    """The builder calls a subclass."""


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> SimpleNamespace:
        calls.append(("create_network", flags))
        network = SimpleNamespace(layers=[], path=None)
        network.get_layer = lambda i: SimpleNamespace(type=f"LayerType.{network.layers[i]}")
        network.num_layers = 0
        return network

    def create_builder_config(self) -> BuilderConfig:
        return BuilderConfig()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Any, config: BuilderConfig) -> bytes:
        monitor = config.progress_monitor
        monitor.phase_start("Building", None, 2)
        monitor.phase_start("Timing", "Building", 5)
        assert monitor.step_complete("Timing", 0) is True
        monitor.phase_finish("Timing")
        monitor.phase_finish("Building")
        shapes = [profile.shapes for profile in config.profiles]
        calls.append(("build", network.path))
        return pickle.dumps((network.path, shapes))


@dataclass
class Profile:
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        assert all(a <= b <= c for a, b, c in zip(*shapes, strict=True))
        self.shapes[name] = shapes


class BuilderConfig:
    def __init__(self) -> None:
        self.progress_monitor: Any = None
        self.profiles: list[Profile] = []
        self._cache: Any = None

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, content: bytes) -> Any:
        calls.append(("create_timing_cache", content))
        if content == b"foreign":
            return None
        return SimpleNamespace(serialize=lambda: b"timings")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._cache


class OnnxParser:
    """Two native nodes, plugins that are registered under the namespace a node names, else functions."""

    num_errors = 0

    def __init__(self, network: Any, logger: ILogger) -> None:
        self._network = network

    def parse_from_file(self, path: str) -> bool:
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            names = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
            space = names.get("plugin_namespace", b"").decode()
            if (node.op_type, "1", space) in plugins:
                self._network.layers.append("PLUGIN_V3")
            elif node.op_type == "TRT_KVCacheUpdate":
                self._network.layers.append("KV_CACHE_UPDATE")
            elif node.op_type == "TRT_Attention":
                self._network.layers += ["ATTENTION_INPUT", "ATTENTION_OUTPUT"]
            else:
                self._network.layers.append("ELEMENTWISE")
        self._network.num_layers = len(self._network.layers)
        self._network.path = path
        return True


class Runtime:
    def __init__(self, logger: Logger) -> None: ...

    def deserialize_cuda_engine(self, plan: bytes) -> CudaEngine | None:
        try:
            return CudaEngine(*pickle.loads(plan))
        except pickle.UnpicklingError:
            return None


class CudaEngine:
    def __init__(self, path: str, profiles: list[dict[str, tuple[tuple[int, ...], ...]]]) -> None:
        graph = onnx.load(path, load_external_data=False).graph
        self.values = {value.name: value for value in (*graph.input, *graph.output)}
        self.inputs = [value.name for value in graph.input]
        self.profiles = profiles
        self.num_io_tensors = len(self.values)
        self.num_optimization_profiles = len(profiles)
        self.aliases = {
            name: name.replace("_out_", "_cache_") for name in self.values if "_out_" in name
        }
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TYPES[self.values[name].type.tensor_type.elem_type][0]

    def dims(self, name: str) -> list[str | int]:
        return [d.dim_param or d.dim_value for d in self.values[name].type.tensor_type.shape.dim]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(size, str) else size for size in self.dims(name))

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        fixed = self.get_tensor_shape(name)
        return list(self.profiles[index].get(name, (fixed, fixed, fixed)))

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_execution_context(self) -> ExecutionContext:
        return ExecutionContext(self)


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self.engine = engine
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert self.profile == -1, "a captured graph would belong to another profile"
        self.profile = index
        return stream > 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        is_allowed = all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        self.shapes[name] = tuple(shape)
        return is_allowed

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address != 0

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        sizes = {
            size: found
            for source, shape in self.shapes.items()
            for size, found in zip(self.engine.dims(source), shape, strict=True)
            if isinstance(size, str)
        }
        if "R" in sizes:
            sizes |= {"R_plus_1": sizes["R"] + 1}
            width = self.engine.dims("confidence")[-1]
            sizes |= {"capacity": sizes["R"] * (int(width) + 1)} if isinstance(width, int) else {}
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.engine.dims(name))

    def execute_async_v3(self, stream: int) -> bool:
        assert stream > 0, "not the default stream"
        shapes = dict(self.shapes)
        if _capture is not None:
            _capture.append(lambda: self._execute(shapes))
            return True
        calls.append(("execute", self.profile, shapes.get("input_ids")))
        self._execute(shapes)
        return True

    def _execute(self, shapes: dict[str, tuple[int, ...]]) -> None:
        engine = self.engine
        assert not engine.values.keys() - self.addresses.keys(), "no memory for a tensor"
        for output, cache in engine.aliases.items():
            assert self.addresses[output] == self.addresses[cache], f"{output} is not in place"
        feed = {name: self._memory(name, shapes[name]).copy() for name in engine.inputs}
        num_tokens = int(feed["cu_q"][-1]) if "cu_q" in feed else 0
        for name in engine.inputs:
            if engine.dims(name)[0] == "T":  # the rest belongs to no slot
                feed[name] = feed[name][:num_tokens]
        names = [name for name in engine.values if name not in engine.inputs]
        for name, result in zip(names, engine.session.run(names, feed), strict=True):
            shape = list(result.shape)
            if engine.dims(name)[0] == "T":
                shape[0] = shapes["input_ids"][0]
            memory = self._memory(name, tuple(shape))
            if memory.dtype.kind == "f" and name not in engine.aliases:
                memory[:] = np.nan
            memory[: len(result)] = result

    def _memory(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = _TYPES[self.engine.values[name].type.tensor_type.elem_type][1]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = (ctypes.c_char * size).from_address(self.addresses[name])
        return np.frombuffer(buffer, dtype).reshape(shape)


class HostDevice:
    """A ``PlanDevice`` on host memory whose captured graphs are lists of passes."""

    torch_device = torch.device("cpu")
    name = "host"

    @contextmanager
    def queue(self) -> Iterator[int]:
        yield 7

    def capture(self, work: Callable[[int], None]) -> Callable[[], None]:
        global _capture
        _capture = recorded = []
        work(7)
        _capture = None

        def replay() -> None:
            calls.append(("replay", len(recorded)))
            for run in recorded:
                run()

        return replay


def count_calls() -> Counter[str]:
    """How often each function was called since ``calls`` was cleared."""
    return Counter(str(call[0]) for call in calls)
