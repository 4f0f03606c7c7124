"""The C++ core, compiled here with g++, answers what the Python form answers. Needs no TensorRT, no GPU."""

from __future__ import annotations

import itertools
import shutil
import uuid
from pathlib import Path

import pytest

from tests.plugins.csrc_library import Core, Refused
from tests.plugins.test_tensorrt_plugin import EXPRESSIONS, REQUIRED, SHAPES
from trtllm_av.plugins import plugin_build, plugin_core, plugin_launch
from trtllm_av.plugins.control_block import SIZE, ControlBlock
from trtllm_av.plugins.plugin_launch import Binding, Scratch
from trtllm_av.plugins.plugin_spec import DTYPES, PLUGINS, DType
from trtllm_av.runtime.errors import BuildError, MissingDependencyError, UsageError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_build, "_FLAGS", (*plugin_build._FLAGS, "-Werror"))
        return plugin_build.build_core(tmp_path_factory.mktemp("csrc") / "core.so")


@pytest.fixture(scope="module")
def core(library: Path) -> Core:
    return Core(library)


@pytest.mark.parametrize("name", PLUGINS)
def test_shapes_and_types(core: Core, name: str) -> None:
    """Guards against: an engine built by one form whose buffers the other form overruns."""
    spec = PLUGINS[name]
    for count in range(spec.num_required, len(spec.inputs) + 1):
        ranks = [len(tensor.shape) for tensor in spec.inputs[:count]]
        assert core.output_shapes(name, ranks) == EXPRESSIONS[name]
        for position in range(count + len(spec.outputs) + 1):
            for code, dtype in enumerate((*DTYPES, None)):
                number = -1 if dtype is None else code
                for is_linear in (True, False):
                    wanted = plugin_core.supports(spec, position, dtype, is_linear, count)
                    assert core.supports(name, position, number, is_linear, count) == wanted
    for output, tensor in enumerate(spec.outputs):
        assert (core.output_dtype(name, output),) == tensor.dtypes
    with pytest.raises(Refused, match="inputs and gives"):
        core.output_shapes(name, [1] * (spec.num_required - 1))
    with pytest.raises(Refused, match="has 4 dimensions; pass"):
        core.output_shapes(name, [4, *ranks[1:]])


@pytest.mark.parametrize("name", PLUGINS)
def test_fields(core: Core, name: str) -> None:
    """Guards against: defaults and bounds that differ, so that one engine scores in two ways."""
    spec = PLUGINS[name]
    assert core.fields(name, REQUIRED[name]) == plugin_core.read_fields(spec, REQUIRED[name])
    for field in spec.fields:
        for value in (field.least, field.most):
            given = {**REQUIRED[name], field.name: value}
            assert core.fields(name, given) == plugin_core.read_fields(spec, given)
        for value in (field.least - 1, field.most * 2 + 2, float("nan")):
            given = {**REQUIRED[name], field.name: value}
            with pytest.raises(UsageError) as in_python:
                plugin_core.read_fields(spec, given)
            with pytest.raises(Refused) as in_cpp:
                core.fields(name, given)
            assert str(in_cpp.value) == str(in_python.value)
        if field.default is None:
            without = {k: v for k, v in REQUIRED[name].items() if k != field.name}
            with pytest.raises(Refused, match=f"{name} needs the field {field.name}"):
                core.fields(name, without)
    with pytest.raises(Refused, match=f"{name} has no field budget"):
        core.fields(name, {**REQUIRED[name], "budget": 1})


@pytest.mark.parametrize("name", PLUGINS)
def test_sizes_that_do_not_fit(core: Core, name: str) -> None:
    """Guards against: a shape that only one form refuses. Every dimension of every input in turn."""
    spec, shapes = PLUGINS[name], SHAPES[name][0]
    fields = plugin_core.read_fields(spec, REQUIRED[name])
    num_refused = 0
    for tensor, axis in ((t, a) for t, shape in enumerate(shapes) for a in range(len(shape))):
        for size in (-1, 0, 1, 5, 17, 33, 34, 257, 513, 1025, 70000):
            changed = [list(shape) for shape in shapes]
            changed[tensor][axis] = size
            try:
                plugin_core.check_shapes(spec, fields, [tuple(shape) for shape in changed])
            except UsageError as refusal:
                num_refused += 1
                start = str(refusal).partition("; pass")[0]
                with pytest.raises(Refused) as in_cpp:
                    core.check_shapes(name, REQUIRED[name], changed)
                assert str(in_cpp.value)[:30] == start[:30]
            else:
                core.check_shapes(name, REQUIRED[name], changed)
    assert num_refused > 20


def bindings(name: str, rows: int, width: int, logits: DType, masked: bool) -> list[list[Binding]]:
    """Inputs and outputs of a plugin for ``rows`` requests, at addresses of their own."""
    sizes = {"R": rows, "P": 3, "V": width, "C": 8, "K": 7, "N": 8, "D": 5, "M": 2 * rows, "": 0}
    spec, made = PLUGINS[name], []
    for base, tensors in ((1 << 20, spec.inputs), (1 << 40, spec.outputs)):
        made.append(
            [
                Binding(
                    base + (i << 12),
                    tuple(
                        sizes[dim[0].name] + dim[0].plus
                        if len(dim) == 1
                        else sizes[dim[0].name] * (sizes[dim[1].name] + dim[1].plus)
                        for dim in tensor.shape
                    ),
                    logits if logits in tensor.dtypes else tensor.dtypes[0],
                )
                for i, tensor in enumerate(tensors)
                if masked or not tensor.is_optional
            ]
        )
    return made


@pytest.mark.parametrize("name", PLUGINS)
def test_what_is_enqueued(core: Core, name: str) -> None:
    """Guards against: a kernel that one form launches with other arguments, a grid too small, a workspace
    whose parts overlap."""
    spec = PLUGINS[name]
    fields = plugin_core.read_fields(spec, REQUIRED[name])
    dtypes: tuple[DType, ...] = ("f32", "f16", "bf16")
    cases = itertools.product(
        (0, 1, 5, 33, 300), (96, 5003, 129281), dtypes, (False, True), (1, 132)
    )
    num_launches = 0
    scratch = Scratch(workspace=1 << 50, mailboxes=1 << 52, control=1 << 55)
    for rows, width, dtype, masked, processors in cases:
        inputs, outputs = bindings(name, rows, width, dtype, masked)
        wanted = []
        for launch in plugin_launch.launches(name, fields, inputs, outputs, scratch, processors):
            num_launches += 1
            arguments = [argument.hex() for argument in plugin_launch.argument_bytes(launch)]
            sizes = [str(size) for size in (*launch.grid, launch.num_threads)]
            wanted.append([launch.source, launch.kernel, *sizes, *arguments])
        given = (name, REQUIRED[name], inputs, outputs)
        assert core.launches(*given, scratch=scratch, num_processors=processors) == wanted
        shapes = [tensor.dims for tensor in inputs]
        assert core.workspace_bytes(name, shapes) == plugin_launch.workspace_bytes(name, shapes)
        assert core.mailbox_bytes(name, processors) == plugin_launch.mailbox_bytes(name, processors)
    assert num_launches > 100


def test_without_a_driver(core: Core) -> None:
    """Guards against: a crash in place of a line on a machine that has no GPU driver."""
    try:
        core.prepare("TrimTree")
    except Refused as refusal:
        assert "\n" not in str(refusal)
    else:
        pytest.skip("this machine has a GPU")


@needs_compiler
def test_control_block_in_shared_memory(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: a worker process that reads a page of its own while the runtime writes another."""
    own = Core(Path(shutil.copy(library, tmp_path / "own.so")))
    assert own.control_block % SIZE == 0
    name = f"av_test_{uuid.uuid4().hex}"
    monkeypatch.setenv("TRTLLM_AV_CONTROL_BLOCK", name)
    absent = Core(Path(shutil.copy(library, tmp_path / "absent.so")))
    assert absent.control_block == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    block = ControlBlock.shared(f"{name}.1", create=True)
    try:
        block.write(budget=12, coefficients=[1, 2], round=3)
        path = Path(shutil.copy(library, tmp_path / "rank.so"))
        seen = ControlBlock.of_library(path)
        found = seen.read(4)
        assert found is not None and found.budget == 12 and found.coefficients[:2] == (1, 2)
        block.write(budget=13, coefficients=[1, 2], round=3)
        found = seen.read(4)
        assert found is not None and found.budget == 13
    finally:
        block.unlink()


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against: a traceback of subprocess where g++ is not installed."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependencyError, match=r"no-such-compiler is missing; install g\+\+"):
        plugin_build.build_core(tmp_path / "core.so")


def test_missing_headers(tmp_path: Path) -> None:
    """Guards against: a compiler's page of errors where the include folder is wrong."""
    with pytest.raises(BuildError, match=r"has no NvInferRuntime.h; pass the include folder"):
        plugin_build.build_plugin(tmp_path, tmp_path / "plugin.so")


@needs_compiler
def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: half a library that loads, and headers of a TensorRT that is too old."""
    monkeypatch.setattr(plugin_build, "_CORE", ())  # the adapter alone, to be quick
    (tmp_path / "NvInferRuntime.h").write_text("#error not this one\n")
    with pytest.raises(BuildError, match=r"plugin.so does not compile with .*error") as raised:
        plugin_build.build_plugin(tmp_path, tmp_path / "out" / "plugin.so", architectures=())
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "out").iterdir())


@needs_compiler
def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    """Guards against: a traceback for a mistyped output path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot be written .*; choose another place"):
        plugin_build.build_core(tmp_path / "file" / "core.so")
