"""What both forms of the plugins answer at build time: types, shapes, formats, fields. No TensorRT here.

The C++ form is ``csrc/core.cpp``; a test compares the two. Errors are UsageError, one line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trtllm_av.plugins.plugin_spec import PLUGINS, DType, PluginSpec
from trtllm_av.runtime.errors import UsageError

Dims = tuple[int, ...]
#: A field's value; its type is the field's.
Fields = dict[str, float]
_Expr = TypeVar("_Expr")


def find_plugin(name: str) -> PluginSpec:
    """The description of the plugin ``name``."""
    try:
        return PLUGINS[name]
    except KeyError:
        raise UsageError(f"plugin {name!r} is unknown; known: {', '.join(PLUGINS)}") from None


def read_fields(spec: PluginSpec, given: Mapping[str, float]) -> Fields:
    """All fields from those ``given``; UsageError for one that is missing, unknown or out of range."""
    known = {field.name for field in spec.fields}
    for name in given:
        if name not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise UsageError(f"{spec.name} has no field {name}; its fields: {choices}")
    values: Fields = {}
    for field in spec.fields:
        value = given.get(field.name, field.default)
        if value is None:
            raise UsageError(f"{spec.name} needs the field {field.name}")
        if not field.least <= value <= field.most:
            raise UsageError(
                f"{spec.name}: {field.name}={value:g} must be in {field.least:g} … {field.most:g}"
            )
        values[field.name] = int(value) if field.dtype == "i32" else float(value)
    return values


def check_counts(spec: PluginSpec, num_inputs: int, num_outputs: int) -> None:
    """Refuse a node with more or fewer tensors than the plugin has."""
    if not spec.num_required <= num_inputs <= len(spec.inputs) or num_outputs != len(spec.outputs):
        raise UsageError(
            f"{spec.name} takes {spec.num_required} … {len(spec.inputs)} inputs and gives "
            f"{len(spec.outputs)} outputs, not {num_inputs} and {num_outputs}"
        )


def supports(
    spec: PluginSpec, position: int, dtype: DType | None, is_linear: bool, num_inputs: int
) -> bool:
    """Whether tensor ``position``, inputs first, may have this type and layout. None: another type."""
    tensors = (*spec.inputs[:num_inputs], *spec.outputs)
    return is_linear and position < len(tensors) and dtype in tensors[position].dtypes


def output_shapes(
    spec: PluginSpec,
    inputs: Sequence[Sequence[_Expr]],
    constant: Callable[[int], _Expr],
    operation: Callable[[str, _Expr, _Expr], _Expr],
) -> list[list[_Expr]]:
    """Dimensions of the outputs, built with an expression builder's ``operation`` of "+", "-" and "*".

    Raises UsageError for inputs whose number of dimensions is wrong.
    """
    values = _bind(spec, inputs)

    def factor(name: str, plus: int) -> _Expr:
        if not name:
            return constant(plus)
        value: _Expr = values[name]
        if not plus:
            return value
        return operation("+" if plus > 0 else "-", value, constant(abs(plus)))

    shapes = []
    for output in spec.outputs:
        shape = []
        for factors in output.shape:
            dim = factor(*factors[0])
            for other in factors[1:]:
                dim = operation("*", dim, factor(*other))
            shape.append(dim)
        shapes.append(shape)
    return shapes


def output_dims(spec: PluginSpec, inputs: Sequence[Dims]) -> list[Dims]:
    """Dimensions of the outputs for known ones of the inputs."""
    arithmetic: dict[str, Callable[[int, int], int]] = {
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
    }
    shapes = output_shapes(spec, inputs, int, lambda kind, a, b: arithmetic[kind](a, b))
    return [tuple(shape) for shape in shapes]


def check_shapes(spec: PluginSpec, fields: Fields, inputs: Sequence[Dims]) -> None:
    """Refuse sizes that contradict each other or that the kernels do not take. −1: not known yet."""
    values = _bind(spec, inputs)
    for tensor, dims in zip(spec.inputs, inputs, strict=False):
        for factors, dim in zip(tensor.shape, dims, strict=True):
            name, plus = factors[0]
            wanted = values[name] if name else plus
            if -1 not in (dim, wanted) and dim != wanted:
                raise UsageError(f"{spec.name}: {tensor.name} has shape {dims}; pass {tensor.dims}")
    check_limits(spec, inputs)
    width = values.get("V", -1)
    if 0 <= width < fields.get("vocab_size", 0):
        raise UsageError(
            f"{spec.name}: vocab_size={fields['vocab_size']} exceeds the {width} columns of the logits"
        )
    drafts, nodes = values.get("K", -1), values.get("N", -1)
    if -1 not in (drafts, nodes) and nodes != drafts + 1:
        raise UsageError(
            f"{spec.name}: paths of {nodes} nodes do not fit {drafts} drafts; pass one more"
        )


def check_limits(spec: PluginSpec, inputs: Sequence[Dims]) -> None:
    """Refuse sizes beyond the kernels; bounds of tensors, which need not agree, are checked by this alone."""
    values = _bind(spec, inputs)
    for limit in spec.limits:
        if values[limit.name] > limit.most:
            raise UsageError(
                f"{spec.name}: {limit.name}={values[limit.name]} exceeds {limit.most}, the most of its kernels"
            )


def _bind(spec: PluginSpec, inputs: Sequence[Sequence[Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for tensor, dims in zip(spec.inputs, inputs, strict=False):
        if len(dims) != len(tensor.shape):
            raise UsageError(
                f"{spec.name}: {tensor.name} has {len(dims)} dimensions; pass {len(tensor.shape)}"
            )
        for factors, dim in zip(tensor.shape, dims, strict=True):
            if factors[0].name:
                values.setdefault(factors[0].name, dim)
    return values
