"""As much of the module ``tensorrt`` as the plugins touch, with what TensorRT passes to them.

Objective: drive the plugins' methods as a builder or an engine would, on machines without TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor


class IPluginV3:
    pass


class IPluginV3OneCore:
    pass


class IPluginV3OneBuild:
    pass


class IPluginV3OneRuntime:
    pass


class IPluginCreatorV3One:
    pass


class INetworkDefinition:
    add_plugin_v3: Callable[..., Any] | None = None


class DataType(Enum):
    FLOAT = auto()
    HALF = auto()
    BF16 = auto()
    INT32 = auto()
    BOOL = auto()
    INT8 = auto()


float32, float16, bfloat16, int32 = DataType.FLOAT, DataType.HALF, DataType.BF16, DataType.INT32
bool = DataType.BOOL


class TensorFormat(Enum):
    LINEAR = auto()
    CHW4 = auto()


class PluginFieldType(Enum):
    INT32 = auto()
    FLOAT32 = auto()


class TensorRTPhase(Enum):
    BUILD = auto()
    RUNTIME = auto()


class PluginCapabilityType(Enum):
    CORE = auto()
    BUILD = auto()
    RUNTIME = auto()


class DimensionOperation(Enum):
    SUM = "+"
    SUB = "-"
    PROD = "*"


@dataclass
class PluginField:
    name: str
    data: Any
    type: PluginFieldType


class PluginFieldCollection(list[PluginField]):
    pass


class DimsExprs(list[str]):
    pass


class ExpressionBuilder:
    """Writes down the expression it is asked for."""

    def constant(self, value: int) -> str:
        return str(value)

    def operation(self, op: DimensionOperation, a: str, b: str) -> str:
        return f"({a}{op.value}{b})"


@dataclass
class PluginTensorDesc:
    dims: tuple[int, ...]
    type: DataType
    format: TensorFormat = TensorFormat.LINEAR


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    max: tuple[int, ...]


@dataclass
class Registry:
    creators: dict[tuple[str, str, str], Any] = field(default_factory=dict)

    def register_creator(self, creator: Any, namespace: str) -> None:
        key = creator.name, creator.plugin_version, namespace
        assert key not in self.creators, "TensorRT logs an error for a second registration"
        self.creators[key] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


_registry = Registry()


def get_plugin_registry() -> Registry:
    return _registry


_OF_TORCH = {
    torch.float32: float32,
    torch.float16: float16,
    torch.bfloat16: bfloat16,
    torch.int32: int32,
    torch.bool: bool,
}


def describe(tensor: Tensor) -> PluginTensorDesc:
    return PluginTensorDesc(tuple(tensor.shape), _OF_TORCH[tensor.dtype])


class Layer:
    """A plugin attached to a context with given tensors, as an engine holds it."""

    def __init__(self, plugin: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)
        descs = [describe(tensor) for tensor in self.inputs]
        results = [describe(tensor) for tensor in self.outputs]
        dynamic = [DynamicPluginTensorDesc(desc, desc.dims) for desc in descs]
        dynamic_results = [DynamicPluginTensorDesc(desc, desc.dims) for desc in results]
        both = dynamic + dynamic_results
        for position in range(len(both)):
            assert plugin.supports_format_combination(position, both, len(dynamic)), position
        plugin.configure_plugin(dynamic, dynamic_results)
        size = plugin.get_workspace_size(dynamic, dynamic_results)
        self.workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device=inputs[0].device)
        self._plugin = plugin.attach_to_context(None)
        self._plugin.on_shape_change(descs, results)
        self._descs, self._results = descs, results

    def enqueue(self, stream: int) -> None:
        self._plugin.enqueue(
            self._descs,
            self._results,
            [tensor.data_ptr() for tensor in self.inputs],
            [tensor.data_ptr() for tensor in self.outputs],
            self.workspace.data_ptr(),
            stream,
        )
