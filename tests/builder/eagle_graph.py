"""A recording double of TensorRT-LLM's functional layer: a network as layers that can be looked at and run.

Layers run in any order that their inputs allow. ``run`` takes the one that is worst for a network that
relies on an order it did not ask for: decoding, which overwrites logits, goes before scoring whenever both
could. Values are NumPy arrays; a layer gets and returns them.

Invariants: names, orders and shapes come from the assumptions; nothing of TensorRT is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

Compute = Callable[..., Sequence[Any]]


@dataclass(eq=False)
class Tensor:
    """An output of ``producer``, or an input of the network if that is None."""

    name: str
    graph: Graph = field(repr=False)
    producer: Layer | None = field(default=None, repr=False)
    index: int = 0

    @property
    def trt_tensor(self) -> Tensor:
        return self

    def mark_output(self, name: str, dtype: Any = None) -> None:
        assert self.producer is not None, f"{name}: an input of the network is marked as an output"
        self.graph.outputs[name] = self


@dataclass(eq=False)
class Layer:
    kind: str
    inputs: list[Tensor]
    compute: Compute = field(repr=False)
    fields: dict[str, int] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]


class Graph:
    """The network under construction; ``plugins`` maps a plugin's name to what it computes."""

    def __init__(self, plugins: Mapping[str, Callable[[dict[str, int]], Compute]]) -> None:
        self.plugins = plugins
        self.layers: list[Layer] = []
        self.outputs: dict[str, Tensor] = {}
        self.plugin_config: Any = SimpleNamespace()

    def input(self, name: str) -> Tensor:
        return Tensor(name, self)

    def add(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[str],
        compute: Compute,
        **fields: int,
    ) -> list[Tensor]:
        layer = Layer(kind, list(inputs), compute, fields)
        layer.outputs = [Tensor(f"{kind}.{name}", self, layer, i) for i, name in enumerate(outputs)]
        self.layers.append(layer)
        return layer.outputs

    def add_plugin_v3(self, inputs: list[Tensor], shape_inputs: list[Tensor], plugin: Any) -> Layer:
        from trtllm_av.plugins.plugin_spec import PLUGINS

        assert not shape_inputs
        compute = self.plugins[plugin.name](plugin.fields)
        spec = PLUGINS[plugin.name]
        assert len(inputs) == len(spec.inputs)
        self.add(plugin.name, inputs, [t.name for t in spec.outputs], compute, **plugin.fields)
        return self.layers[-1]

    def of(self, kind: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind == kind]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The marked outputs for ``feeds`` by input name."""
        values: dict[Tensor, Any] = {}

        def ready(layer: Layer) -> bool:
            return all(tensor.producer is None or tensor in values for tensor in layer.inputs)

        pending = list(self.layers)
        while pending:
            runnable = [layer for layer in pending if ready(layer)]
            layer = min(runnable, key=lambda layer: layer.kind != "EagleDecodeDraftTokens")
            pending.remove(layer)
            taken = [
                values[tensor] if tensor.producer is not None else feeds[tensor.name]
                for tensor in layer.inputs
            ]
            _check_types(layer, taken)
            values.update(zip(layer.outputs, layer.compute(*taken), strict=True))
        return {name: values[tensor] for name, tensor in self.outputs.items()}


def _check_types(layer: Layer, values: Sequence[Any]) -> None:
    """Ranks and types of what a plugin of ours is given, against its description."""
    from trtllm_av.plugins.plugin_spec import PLUGINS

    if layer.kind not in PLUGINS:
        return
    names = {"i32": "int32", "f32": "float32", "f16": "float16"}
    for value, spec in zip(values, PLUGINS[layer.kind].inputs, strict=True):
        where = f"{layer.kind}.{spec.name}"
        assert np.ndim(value) == len(spec.dims.split()), where
        allowed = {names.get(dtype, dtype) for dtype in spec.dtypes}
        assert str(np.asarray(value).dtype) in allowed, where


def functional_module(graph: Graph) -> ModuleType:
    """``tensorrt_llm.functional`` on ``graph``."""
    module = ModuleType("tensorrt_llm.functional")

    def add_elementwise(kind: str, compute: Callable[..., Any], *operands: Any) -> Tensor:
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]

        def with_constants(*values: Any) -> list[Any]:
            given = iter(values)
            return [compute(*(next(given) if isinstance(o, Tensor) else o for o in operands))]

        return graph.add(kind, tensors, ["output"], with_constants)[0]

    def add(left: Any, right: Any) -> Tensor:
        return add_elementwise("add", np.add, left, right)

    def lt(left: Any, right: Any) -> Tensor:
        return add_elementwise("lt", np.less, left, right)

    def where(condition: Any, left: Any, right: Any) -> Tensor:
        return add_elementwise("where", np.where, condition, left, right)

    def unsqueeze(input: Any, axis: int) -> Tensor:
        return add_elementwise("unsqueeze", lambda x: np.expand_dims(x, axis), input)

    def concat(inputs: Sequence[Any], dim: int = 0) -> Tensor:
        return add_elementwise("concat", lambda *x: np.concatenate(x, dim), *inputs)

    def _create_tensor(trt_tensor: Tensor, producer: Layer) -> Tensor:
        assert trt_tensor.producer is producer
        return trt_tensor

    for value in (add, lt, where, unsqueeze, concat, _create_tensor, Tensor):
        setattr(module, value.__name__, value)
    return module


def tensorrt_module() -> ModuleType:
    """``tensorrt`` with a registry that knows every creator by name."""
    module = ModuleType("tensorrt")
    module.__dict__["__version__"] = "10.14.1"

    class PluginField:
        def __init__(self, name: str, data: Any = None, type: Any = None) -> None:
            self.name, self.data, self.type = name, data, type

    class Creator:
        def __init__(self, name: str, fields: Sequence[str]) -> None:
            self.name = name
            self.field_names = [PluginField(field) for field in fields]

        def create_plugin(self, name: str, collection: Any, phase: Any) -> Any:
            assert phase == "build"
            for entry in collection:
                assert entry.type == "int32" and entry.data.dtype == np.int32
            fields = {entry.name: int(entry.data[0]) for entry in collection}
            assert fields.keys() <= {entry.name for entry in self.field_names}, fields
            return SimpleNamespace(name=self.name, fields=fields)

    class Registry:
        def get_creator(self, name: str, version: str, namespace: str) -> Creator | None:
            from trtllm_av.builder.trtllm.assumptions import assumptions
            from trtllm_av.plugins.plugin_spec import NAMESPACE, PLUGINS, VERSION

            if name in PLUGINS and (version, namespace) == (VERSION, NAMESPACE):
                return Creator(name, [field.name for field in PLUGINS[name].fields])
            plugin = assumptions().upstream_plugins.get(name)
            if plugin is None or (version, namespace) != (plugin.version, plugin.namespace):
                return None
            return Creator(name, plugin.fields)

        get_plugin_creator = get_creator

    registry = Registry()
    members = {
        "PluginField": PluginField,
        "PluginFieldType": SimpleNamespace(INT32="int32"),
        "PluginFieldCollection": list,
        "TensorRTPhase": SimpleNamespace(BUILD="build"),
        "get_plugin_registry": lambda: registry,
    }
    module.__dict__.update(members)
    return module
