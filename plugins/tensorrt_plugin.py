"""The plugins for TensorRT in a Python process: ``IPluginV3`` and creators over the CUDA kernels.

``trt`` is the module ``tensorrt``, a parameter, so that nothing here is imported before TensorRT is. The
C++ form (``csrc/``) is for processes without Python; both answer what ``plugin_core`` says.

Invariants: what a plugin is lies in its fields, so clones and what is deserialised behave like the original;
kernels are loaded and memory is taken when a plugin is attached to an execution context, so that ``enqueue``
can be captured in a CUDA graph. TensorRT-RTX cannot hold plugins, and its parser ends the process when one is
registered: its module is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from trtllm_av.plugins import plugin_core, plugin_launch, plugin_runtime
from trtllm_av.plugins.plugin_core import Fields
from trtllm_av.plugins.plugin_launch import Binding
from trtllm_av.plugins.plugin_spec import NAMESPACE, PLUGINS, VERSION, DType, PluginSpec
from trtllm_av.runtime.errors import UsageError

_TRT_DTYPES: dict[DType, str] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i32": "int32",
    "bool": "bool",
}
_NUMPY_DTYPES = {"i32": np.int32, "f32": np.float32}
_FIELD_TYPES = {"i32": "INT32", "f32": "FLOAT32"}


def register(trt: Any) -> None:
    """Register all creators with TensorRT's registry; again is harmless.

    Raises UsageError for a module that cannot hold these plugins.
    """
    registry = trt.get_plugin_registry()
    for creator in creators(trt):
        if registry.get_creator(creator.name, VERSION, NAMESPACE) is None:
            registry.register_creator(creator, NAMESPACE)


@functools.cache
def creators(trt: Any) -> tuple[Any, ...]:
    """A creator of each plugin: ``IPluginCreatorV3One`` objects that live as long as the process."""
    name = trt.__name__ if isinstance(trt, ModuleType) else type(trt).__name__
    if not hasattr(trt, "IPluginV3") or not hasattr(trt.INetworkDefinition, "add_plugin_v3"):
        raise UsageError(
            f"{name} cannot hold plugins; build with TensorRT 10.11 or newer, or with "
            "--adaptive_verification_plugin disable"
        )
    made = type("Creator", (_Creator, trt.IPluginCreatorV3One), {})
    return tuple(made(trt, spec) for spec in PLUGINS.values())


class _Creator:
    """Creates one plugin at build time, and again from its serialised fields at run time."""

    def __init__(self, trt: Any, spec: PluginSpec) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self._trt, self._spec = trt, spec
        self.name = spec.name
        self.plugin_namespace = NAMESPACE
        self.plugin_version = VERSION
        self._field_data = _field_data(spec, None)
        self.field_names = _collect_fields(trt, spec, self._field_data)

    def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
        """Raises UsageError for a field that is missing or out of range."""
        given = {field.name: np.asarray(field.data).reshape(-1)[0] for field in field_collection}
        return _make(
            self._trt,
            self._spec,
            plugin_core.read_fields(
                self._spec, {key: float(value) for key, value in given.items()}
            ),
        )


def _make(trt: Any, spec: PluginSpec, fields: Fields) -> Any:
    return _plugin_class(trt)(trt, spec, fields)


@functools.cache
def _plugin_class(trt: Any) -> Any:
    return type("Plugin", (_Plugin, *_interfaces(trt)), {})


def _interfaces(trt: Any) -> tuple[Any, ...]:
    return trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime


class _Plugin:
    """All three capabilities of one plugin; the names are TensorRT's."""

    _mailboxes: Tensor  # once attached to a context

    def __init__(self, trt: Any, spec: PluginSpec, fields: Fields) -> None:
        for interface in _interfaces(trt):
            interface.__init__(self)
        self._trt, self._spec, self._fields = trt, spec, fields
        self._field_data = _field_data(spec, fields)
        self.plugin_name = spec.name
        self.plugin_namespace = NAMESPACE
        self.plugin_version = VERSION
        self.num_outputs = len(spec.outputs)

    def get_capability_interface(self, type: Any) -> Any:
        return self

    def clone(self) -> Any:
        return _make(self._trt, self._spec, dict(self._fields))

    # Build.

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [self._dtype(output.dtypes[0]) for output in self._spec.outputs]

    def get_output_shapes(
        self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any
    ) -> list[Any]:
        plugin_core.check_counts(self._spec, len(inputs), self.num_outputs)
        kinds = self._trt.DimensionOperation
        named = {"+": kinds.SUM, "-": kinds.SUB, "*": kinds.PROD}
        shapes: list[list[Any]] = plugin_core.output_shapes(
            self._spec,
            [[dims[axis] for axis in range(len(dims))] for dims in inputs],
            constant=expr_builder.constant,
            operation=lambda kind, a, b: expr_builder.operation(named[kind], a, b),
        )
        return [self._trt.DimsExprs(shape) for shape in shapes]

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        desc = in_out[pos].desc
        is_linear = desc.format == self._trt.TensorFormat.LINEAR
        return plugin_core.supports(
            self._spec, pos, self._name_of(desc.type), is_linear, num_inputs
        )

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        plugin_core.check_counts(self._spec, len(inputs), len(outputs))
        shapes = [tuple(tensor.desc.dims) for tensor in inputs]
        plugin_core.check_shapes(self._spec, self._fields, shapes)
        plugin_core.check_limits(self._spec, [tuple(x.max) for x in inputs])

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        most = [tuple(tensor.max) for tensor in inputs]
        return plugin_launch.workspace_bytes(self._spec.name, most)

    def get_valid_tactics(self) -> list[int]:
        return []  # one implementation

    # Run time.

    def set_tactic(self, tactic: int) -> None:
        pass

    def get_fields_to_serialize(self) -> Any:
        return _collect_fields(self._trt, self._spec, self._field_data)

    def attach_to_context(self, context: Any) -> Any:
        attached = self.clone()
        attached._mailboxes = plugin_runtime.prepare(self._spec.name)
        return attached

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        shapes = [tuple(tensor.dims) for tensor in inputs]
        plugin_core.check_shapes(self._spec, self._fields, shapes)

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        plugin_runtime.enqueue(
            self._spec.name,
            self._fields,
            self._bindings(input_desc, inputs),
            self._bindings(output_desc, outputs),
            workspace=workspace or 0,
            mailboxes=self._mailboxes,
            stream=stream,
        )

    def _bindings(self, descs: Sequence[Any], addresses: Sequence[int]) -> list[Binding]:
        bindings = []
        for desc, address in zip(descs, addresses, strict=True):
            dtype = self._name_of(desc.type)
            assert dtype is not None  # supports_format_combination let no other through
            bindings.append(Binding(address or 0, tuple(desc.dims), dtype))
        return bindings

    def _dtype(self, name: DType) -> Any:
        return getattr(self._trt, _TRT_DTYPES[name])

    def _name_of(self, dtype: Any) -> DType | None:
        return next((name for name in _TRT_DTYPES if self._dtype(name) == dtype), None)


def _field_data(spec: PluginSpec, values: Mapping[str, float] | None) -> list[Any]:
    """An array a field, empty without ``values``. Their owner keeps them: TensorRT holds addresses."""
    return [
        np.array([] if values is None else [values[field.name]], _NUMPY_DTYPES[field.dtype])
        for field in spec.fields
    ]


def _collect_fields(trt: Any, spec: PluginSpec, data: Sequence[Any]) -> Any:
    kinds = [getattr(trt.PluginFieldType, _FIELD_TYPES[field.dtype]) for field in spec.fields]
    made = zip(spec.fields, data, kinds, strict=True)
    return trt.PluginFieldCollection(
        [trt.PluginField(f.name, array, kind) for f, array, kind in made]
    )
