"""The plugins' build-phase methods in the Python form, driven as TensorRT's builder would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.plugins import fake_tensorrt as trt
from trtllm_av.plugins import (
    onnx_functions,
    plugin_core,
    plugin_launch,
    plugin_runtime,
    tensorrt_plugin,
)
from trtllm_av.plugins.plugin_launch import Binding, Scratch
from trtllm_av.plugins.plugin_spec import DTYPES, ITEM_BYTES, NAMESPACE, PLUGINS, VERSION, DType
from trtllm_av.runtime.errors import UsageError

#: The fields that have no default.
REQUIRED: dict[str, dict[str, float]] = {
    "ScoreDrafts": {"vocab_size": 90},
    "TrimDrafts": {},
    "ScoreLevel": {"level": 1, "vocab_size": 90, "max_non_leaves": 4},
    "TrimTree": {},
}
#: Shapes of all inputs that fit, and of the outputs for them.
SHAPES: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "ScoreDrafts": ([(4, 3, 96), (4,), (8,), (1,), (4,), (4, 96)], [(4, 3, 1), (4, 3)]),
    "TrimDrafts": ([(4, 7), (4,), (4,), (4,), (1,)], [(4, 7), (4,), (5,), (32,)]),
    "ScoreLevel": ([(9, 96), (), (4, 8, 4), (4,)], [(4, 7), (4,)]),
    "TrimTree": ([(4, 7), (4,), (4, 8, 4), (4,), (4,), (4,)], [(4,), (4, 15)]),
}
EXPRESSIONS = {
    "ScoreDrafts": [["a0", "a1", "1"], ["a0", "a1"]],
    "TrimDrafts": [["a0", "a1"], ["a0"], ["(a0+1)"], ["(a0*(a1+1))"]],
    "ScoreLevel": [["c0", "(c1-1)"], ["c0"]],
    "TrimTree": [["a0"], ["a0", "(a1+8)"]],
}
TRT_DTYPES: dict[DType, Any] = {
    "f32": trt.float32,
    "f16": trt.float16,
    "bf16": trt.bfloat16,
    "i32": trt.int32,
    "bool": trt.bool,
}


def creator_of(name: str) -> Any:
    return next(c for c in tensorrt_plugin.creators(trt) if c.name == name)


def make(name: str, **fields: float) -> Any:
    """A plugin as the ONNX parser creates it, from fields of the types it declares."""
    creator = creator_of(name)
    kinds = {field.name: field for field in creator.field_names}
    given = [
        trt.PluginField(key, np.array([value], kinds[key].data.dtype), kinds[key].type)
        for key, value in {**REQUIRED[name], **fields}.items()
    ]
    return creator.create_plugin("layer", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)


def tensors(shapes: list[tuple[int, ...]]) -> list[Any]:
    return [
        trt.DynamicPluginTensorDesc(trt.PluginTensorDesc(shape, trt.float32), shape)
        for shape in shapes
    ]


@pytest.mark.parametrize("name", PLUGINS)
def test_shapes_are_expressions_of_the_inputs(name: str) -> None:
    """Guards against: an output whose size is right for the traced example and wrong for others."""
    inputs = SHAPES[name][0]
    given = [
        trt.DimsExprs([f"{chr(97 + i)}{a}" for a in range(len(s))]) for i, s in enumerate(inputs)
    ]
    shapes = make(name).get_output_shapes(given, [], trt.ExpressionBuilder())
    assert shapes == EXPRESSIONS[name]
    assert plugin_core.output_dims(PLUGINS[name], inputs) == SHAPES[name][1]


@pytest.mark.parametrize("name", PLUGINS)
def test_every_type_and_layout(name: str) -> None:
    """Guards against: a half-precision confidence or a vectorised layout that a kernel would misread."""
    spec, plugin = PLUGINS[name], make(name)
    for count in range(spec.num_required, len(spec.inputs) + 1):
        all_tensors = (*spec.inputs[:count], *spec.outputs)
        for position, tensor in enumerate(all_tensors):
            for dtype, trt_dtype in (*TRT_DTYPES.items(), (None, trt.DataType.INT8)):
                for layout in trt.TensorFormat:
                    desc = trt.PluginTensorDesc((1,), trt_dtype, layout)
                    in_out = [trt.DynamicPluginTensorDesc(desc, (1,))] * len(all_tensors)
                    assert plugin.supports_format_combination(position, in_out, count) == (
                        dtype in tensor.dtypes and layout is trt.TensorFormat.LINEAR
                    )
    types = plugin.get_output_data_types([trt.bfloat16])
    assert types == [TRT_DTYPES[output.dtypes[0]] for output in spec.outputs]


@pytest.mark.parametrize("name", PLUGINS)
def test_fields_survive_serialisation(name: str) -> None:
    """Guards against: an engine file that scores with another bound than it was built with."""
    spec = PLUGINS[name]
    fields = {f.name: f.least if f.least >= 1 else (f.least + 1) / 2 for f in spec.fields}
    fields = {
        f.name: int(fields[f.name]) if f.dtype == "i32" else fields[f.name] for f in spec.fields
    }
    plugin = make(name, **fields)
    stored = plugin.get_fields_to_serialize()
    again = creator_of(name).create_plugin("layer", stored, trt.TensorRTPhase.RUNTIME)
    for one in (plugin, plugin.clone(), again):
        assert one.plugin_name == name
        assert one.get_capability_interface(trt.PluginCapabilityType.RUNTIME) is one
        values = {field.name: field.data[0] for field in one.get_fields_to_serialize()}
        assert values == pytest.approx(fields)
        assert [field.type.name for field in one.get_fields_to_serialize()] == [
            "INT32" if field.dtype == "i32" else "FLOAT32" for field in spec.fields
        ]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("ScoreDrafts", {"vocab_size": 0}, r"vocab_size=0 must be in 1 … "),
        ("ScoreDrafts", {"feature_bound": float("nan")}, "feature_bound=nan must be in"),
        ("ScoreDrafts", {"temperature_floor": 0.0}, "temperature_floor=0 must be in 0.001"),
        ("ScoreLevel", {"level": 32}, "level=32 must be in 0 … 31"),
        ("ScoreLevel", {"vocab_size": 262145}, "must be in 1 … 262144"),
        ("TrimTree", {"total_multiple": 0}, "total_multiple=0 must be in 1"),
        ("TrimTree", {"min_draft_len": 0}, "min_draft_len=0 must be in 1"),
    ],
)
def test_fields_out_of_range(name: str, fields: dict[str, float], message: str) -> None:
    """Guards against: a plugin that trims to 0 drafts, or divides by 0, from a mistyped attribute."""
    with pytest.raises(UsageError, match=message) as raised:
        make(name, **fields)
    assert "\n" not in str(raised.value)


def test_missing_and_unknown_fields() -> None:
    """Guards against: a default vocabulary, and an option that is spelled wrong and ignored."""
    creator = creator_of("ScoreDrafts")
    with pytest.raises(UsageError, match="ScoreDrafts needs the field vocab_size"):
        creator.create_plugin("layer", trt.PluginFieldCollection(), trt.TensorRTPhase.BUILD)
    field = trt.PluginField("budget", np.array([1], np.int32), trt.PluginFieldType.INT32)
    with pytest.raises(UsageError, match="TrimDrafts has no field budget; its fields: none"):
        creator_of("TrimDrafts").create_plugin("layer", [field], trt.TensorRTPhase.BUILD)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ScoreDrafts", {0: (4, 3, 80), 5: (4, 80)}, "vocab_size=90 exceeds the 80 columns"),
        ("ScoreDrafts", {4: (5,)}, "draft_lens has shape"),
        ("ScoreDrafts", {1: (4, 1)}, "temperature has 2 dimensions; pass 1"),
        ("ScoreDrafts", {3: (2,)}, "position has shape"),
        ("TrimDrafts", {0: (4, 17)}, "K=17 exceeds 16, the most of its kernels"),
        ("ScoreLevel", {2: (4, 258, 4)}, "N=258 exceeds 257"),
        ("ScoreLevel", {2: (4, 8, 34)}, "D=34 exceeds 33"),
        ("TrimTree", {2: (4, 9, 4)}, "paths of 9 nodes do not fit 7 drafts; pass one more"),
    ],
)
def test_shapes_that_do_not_fit(
    name: str, changes: dict[int, tuple[int, ...]], message: str
) -> None:
    """Guards against: a kernel that reads behind a tensor because two sizes disagree."""
    inputs, outputs = SHAPES[name]
    changed = [changes.get(i, shape) for i, shape in enumerate(inputs)]
    plugin = make(name)
    plugin.configure_plugin(tensors(inputs), tensors(outputs))
    with pytest.raises(UsageError, match=message) as raised:
        plugin.configure_plugin(tensors(changed), tensors(outputs))
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match=message):
        plugin.on_shape_change([tensor.desc for tensor in tensors(changed)], [])


def test_sizes_that_are_not_known_yet() -> None:
    """Guards against: a build that fails because dynamic dimensions are −1, or a maximum nobody checks."""
    inputs, outputs = SHAPES["TrimDrafts"]
    plugin = make("TrimDrafts")
    dynamic = tensors(inputs)
    for tensor in dynamic[:4]:
        tensor.desc.dims = (-1, *tensor.desc.dims[1:])
    plugin.configure_plugin(dynamic, tensors(outputs))
    dynamic[0].max = (1025, 7)
    with pytest.raises(UsageError, match="exceeds 1024"):
        plugin.configure_plugin(dynamic, tensors(outputs))


def test_number_of_tensors() -> None:
    """Guards against: a graph of another version whose tensors are taken by position."""
    inputs, outputs = SHAPES["ScoreDrafts"]
    plugin = make("ScoreDrafts")
    plugin.configure_plugin(tensors(inputs[:5]), tensors(outputs))
    for wrong in (inputs[:4], [*inputs, (1,)]):
        with pytest.raises(UsageError, match="takes 5 … 6 inputs and gives 2 outputs, not"):
            plugin.configure_plugin(tensors(wrong), tensors(outputs))
        with pytest.raises(UsageError, match="takes 5 … 6 inputs"):
            exprs = [trt.DimsExprs(["x"] * len(shape)) for shape in wrong]
            plugin.get_output_shapes(exprs, [], trt.ExpressionBuilder())


def test_registered_once_under_the_name_in_the_graph() -> None:
    """Guards against: creators that the ONNX parser does not find, and errors at a second registration."""
    tensorrt_plugin.register(trt)
    tensorrt_plugin.register(trt)
    for name in PLUGINS:
        assert trt.get_plugin_registry().get_creator(name, VERSION, NAMESPACE).name == name
    assert NAMESPACE == onnx_functions.DOMAIN


@pytest.mark.parametrize(
    "module",
    [SimpleNamespace(), SimpleNamespace(IPluginV3=1, INetworkDefinition=object)],
    ids=["no plugins", "RTX"],
)
def test_modules_that_cannot_hold_plugins(module: SimpleNamespace) -> None:
    """Guards against: registering with TensorRT-RTX, whose parser then ends the process."""
    hashable = type("tensorrt_rtx", (), vars(module))
    hashable.get_plugin_registry = staticmethod(dict)  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"cannot hold plugins.*--adaptive_verification_plugin disable"
    ):
        tensorrt_plugin.register(hashable)


@pytest.mark.parametrize(
    "function",
    [
        onnx_functions.score_drafts_function(),
        onnx_functions.score_drafts_function(has_allowed_mask=True),
        onnx_functions.trim_drafts_function(3),
    ],
    ids=lambda function: f"{function.name} of {len(function.input)}",
)
def test_description_is_that_of_the_onnx_node(function: onnx.FunctionProto) -> None:
    """Guards against: a plugin whose tensors come in another order than the node's that it replaces."""
    spec = PLUGINS[function.name]
    count = len(function.input)
    assert spec.num_required <= count
    assert [tensor.name for tensor in spec.inputs[:count]] == list(function.input)
    assert [tensor.name for tensor in spec.outputs] == list(function.output)
    assert {field.name for field in spec.fields} == set(function.attribute)


@pytest.mark.parametrize("name", PLUGINS)
def test_description_is_that_of_the_documents(name: str) -> None:
    """Guards against: a page that tells a network's author another order, type or default."""
    page = Path(__file__).parents[2] / "docs" / "plugins.md"
    (row,) = (line for line in page.read_text("utf-8").splitlines() if f"| `{name}` |" in line)
    _, _, inputs, outputs, fields, _ = (cell.strip() for cell in row.split("|"))
    spec = PLUGINS[name]
    for cell, described in ((inputs, spec.inputs), (outputs, spec.outputs)):
        wanted = []
        for tensor in described:
            kind = "logits" if len(tensor.dtypes) > 1 else tensor.dtypes[0]
            optional = "optional " if tensor.is_optional else ""
            wanted.append(f"{optional}`{tensor.name}` [{tensor.dims.replace(' ', ',')}] {kind}")
        assert cell == ", ".join(wanted)
    texts = [
        f"`{f.name}`" + ("" if f.default is None else f" ({f.default:g})") for f in spec.fields
    ]
    assert fields == (", ".join(texts) or "–")


@pytest.mark.parametrize("name", PLUGINS)
def test_what_is_enqueued_stays_inside_workspace_and_tensors(name: str) -> None:
    """Guards against: addresses that belong to nothing, and a workspace smaller than what is used of it."""
    spec = PLUGINS[name]
    inputs, outputs = SHAPES[name]
    fields = plugin_core.read_fields(spec, REQUIRED[name])
    given = [Binding(1 << 20 | i << 12, s, spec.inputs[i].dtypes[0]) for i, s in enumerate(inputs)]
    results = [
        Binding(1 << 24 | i << 12, s, spec.outputs[i].dtypes[0]) for i, s in enumerate(outputs)
    ]
    scratch = Scratch(workspace=1 << 30, mailboxes=1 << 35, control=1 << 40)
    size = make(name).get_workspace_size(tensors(inputs), tensors(outputs))
    known = {b.address for b in (*given, *results)} | {scratch.control, scratch.mailboxes}
    seen: set[int] = set()
    for launch in plugin_launch.launches(name, fields, given, results, scratch, 132):
        assert 0 < launch.num_threads <= 1024
        for argument in plugin_launch.argument_bytes(launch):
            address = int.from_bytes(argument, "little")
            if len(argument) == 8 and address > 1 << 16:
                seen.add(address)
                first = scratch.workspace
                assert address in known or first <= address < first + size
    assert {b.address for b in (*given, *results)} <= seen


@pytest.mark.parametrize("processors", [1, 7, 132, 148])
def test_mailboxes_are_enough(processors: int) -> None:
    """Guards against: blocks that share a row and send into memory behind the mailboxes."""
    fields = plugin_core.read_fields(PLUGINS["ScoreDrafts"], {"vocab_size": 200_000})
    scratch, most = Scratch(1, 2, 3), 0
    for rows in (1, 2, 3, 5, 31, 66, 131, 132, 133, 661, 5000):
        shapes = [(rows, 1, 200_000), (rows,), (8,), (1,), (rows,)]
        inputs = [Binding(1, shape, "f32") for shape in shapes]
        outputs = [Binding(1, (rows, 1, 1), "f32"), Binding(1, (rows, 1), "f32")]
        (launch,) = plugin_launch.launches(
            "ScoreDrafts", fields, inputs, outputs, scratch, processors
        )
        splits = launch.grid[0]
        uses_mailboxes = launch.arguments[9].value == scratch.mailboxes
        assert uses_mailboxes == (splits > 1)
        if splits > 1:
            most = max(most, rows * splits * 8)
    assert 0 < most <= plugin_launch.mailbox_bytes("ScoreDrafts", processors)


def test_tensors_that_a_kernel_would_misread() -> None:
    """Guards against: strides or types that are read as if they were contiguous and float32."""
    shapes = SHAPES["TrimDrafts"][0]
    inputs = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    for confidence in (torch.zeros(4, 7).double(), torch.zeros(7, 4).T):
        with pytest.raises(UsageError, match=r"confidence is torch.*pass contiguous f32"):
            plugin_runtime.run("TrimDrafts", confidence, *inputs[1:])


def test_item_sizes_cover_all_types() -> None:
    """Guards against: a type that is added without its size."""
    assert set(ITEM_BYTES) == set(DTYPES)
