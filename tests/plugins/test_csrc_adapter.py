"""The C++ ``IPluginV3`` compiled against TensorRT's public headers and driven through its own interfaces.

Needs the headers, which are in no package: TENSORRT_INCLUDE names their folder. No TensorRT is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.csrc_library import Adapter, Refused
from tests.plugins.test_csrc_core import bindings
from tests.plugins.test_tensorrt_plugin import EXPRESSIONS, REQUIRED
from trtllm_av.plugins import plugin_build, plugin_core, plugin_launch
from trtllm_av.plugins.plugin_spec import DTYPES, NAMESPACE, PLUGINS, VERSION

INCLUDE = os.environ.get("TENSORRT_INCLUDE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not INCLUDE or shutil.which("g++") is None,
        reason="needs g++ and TENSORRT_INCLUDE, the folder of TensorRT's headers",
    ),
]
#: TensorRT's numbers of f32 and int32.
TRT_NUMBERS = {"f32": "0", "i32": "3"}


@pytest.fixture(scope="module")
def plugin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("adapter") / plugin_build.LIBRARY_NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_build, "_FLAGS", (*plugin_build._FLAGS, "-Werror"))
        return plugin_build.build_plugin(Path(INCLUDE), output, architectures=())


@pytest.fixture(scope="module")
def adapter(plugin_library: Path) -> Adapter:
    source, driver = (
        Path(__file__).with_name("adapter_driver.cpp"),
        plugin_library.with_name("d.so"),
    )
    flags = ("-std=c++17", "-fPIC", "-shared", *plugin_build.header_flags(Path(INCLUDE)))
    subprocess.run(["g++", *flags, str(source), "-o", str(driver), "-ldl"], check=True)
    return Adapter(driver, plugin_library)


def test_links_nothing_and_exports_its_entry_points(plugin_library: Path) -> None:
    """Guards against: a library that needs one patch version of TensorRT or CUDA, or hides its creators."""
    shown = subprocess.run(
        ["readelf", "-dW", "--dyn-syms", str(plugin_library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = [line for line in shown.splitlines() if "NEEDED" in line]
    assert not [line for line in needed if "nvinfer" in line or "cuda" in line or "stdc++" in line]
    functions = {
        line.split()[-1]
        for line in shown.splitlines()
        if " FUNC    GLOBAL DEFAULT" in line and " UND " not in line
    }
    assert functions == {
        "getCreators",
        "setLoggerFinder",
        "initAvPlugins",
        "av_control_block",
        "createInferRuntime_INTERNAL",
    }


def test_creators(adapter: Adapter) -> None:
    """Guards against: a plugin that the ONNX parser or a network looks for under another name."""
    names = [line.split()[0] for line in adapter.creators]
    assert names == [f"{name}/{VERSION}/{NAMESPACE}" for name in PLUGINS]
    for line, spec in zip(adapter.creators, PLUGINS.values(), strict=True):
        assert [field.partition(":")[0] for field in line.split()[1:]] == [
            f.name for f in spec.fields
        ]


@pytest.mark.parametrize("name", PLUGINS)
def test_build_phase(adapter: Adapter, name: str) -> None:
    """Guards against: an adapter that passes tensors, types or fields of the core on wrongly."""
    spec = PLUGINS[name]
    plugin = adapter.create(name, REQUIRED[name])
    for count in range(spec.num_required, len(spec.inputs) + 1):
        ranks = [len(tensor.shape) for tensor in spec.inputs[:count]]
        *shapes, types = adapter.outputs(plugin, ranks)
        assert [shape.split() for shape in shapes] == EXPRESSIONS[name]
        assert types.split() == [TRT_NUMBERS[output.dtypes[0]] for output in spec.outputs]
        for position in range(count + len(spec.outputs)):
            for code, dtype in enumerate((*DTYPES, None)):
                number = -1 if dtype is None else code
                for is_linear in (True, False):
                    wanted = plugin_core.supports(spec, position, dtype, is_linear, count)
                    assert adapter.supports(plugin, position, number, is_linear, count) == wanted
    inputs, outputs = bindings(name, 5, 96, "f16", True)
    size = adapter.configure(plugin, inputs, outputs)
    assert size == plugin_launch.workspace_bytes(name, [tensor.dims for tensor in inputs])
    with pytest.raises(Refused, match=f"trtllm_av: {name} takes"):
        adapter.configure(plugin, inputs[:3], outputs)
    clone = adapter.clone(plugin)
    stored = adapter.serialized(plugin)
    adapter.destroy(plugin)
    assert adapter.serialized(clone) == stored
    values = plugin_core.read_fields(spec, REQUIRED[name])
    assert [field.split("=")[0].split(":")[0] for field in stored.split()] == list(values)
    assert [float(field.split("=")[1]) for field in stored.split()] == list(values.values())
    adapter.destroy(clone)


@pytest.mark.parametrize(("name", "rows"), [("TrimDrafts", 1024), ("TrimTree", 512)])
def test_sizes_that_are_not_known_yet(adapter: Adapter, name: str, rows: int) -> None:
    """Guards against: an engine whose profile goes beyond the kernels, which fails while it serves."""
    plugin = adapter.create(name, REQUIRED[name])
    adapter.configure_dynamic(plugin, *bindings(name, rows, 96, "f16", True))
    with pytest.raises(Refused, match=f"R={rows + 1} exceeds {rows}, the most of its kernels"):
        adapter.configure_dynamic(plugin, *bindings(name, rows + 1, 96, "f16", True))
    adapter.destroy(plugin)


def test_a_process_that_preloads_registers_with_its_first_runtime(plugin_library: Path) -> None:
    """Guards against: a worker process whose engine names plugins that nobody registered, a second
    registration, and one that nobody asked for."""
    header = Path(INCLUDE, "NvInferVersion.h").read_text()
    major = next(
        n
        for n in range(10, 20)
        if f"MAJOR_ENTERPRISE {n}" in header or f"TENSORRT_MAJOR {n}" in header
    )
    fake = plugin_library.with_name(f"libnvinfer.so.{major}")
    source = Path(__file__).with_name("fake_nvinfer.cpp")
    flags = ("-std=c++17", "-fPIC", "-shared", *plugin_build.header_flags(Path(INCLUDE)))
    soname = f"-Wl,-soname,{fake.name}"
    subprocess.run(["g++", *flags, "-w", soname, str(source), "-o", str(fake)], check=True)
    user = plugin_library.with_name("user.so")
    calls = 'extern "C" void* createInferRuntime_INTERNAL(void*, int);'
    calls += 'extern "C" void* use() { return createInferRuntime_INTERNAL(nullptr, 1); }'
    command = [
        "g++",
        "-x",
        "c++",
        "-fPIC",
        "-shared",
        "-",
        "-x",
        "none",
        str(fake),
        "-o",
        str(user),
    ]
    subprocess.run(command, input=calls, text=True, check=True)
    script = (
        "import ctypes, sys\n"
        "fake, user = (ctypes.CDLL(path) for path in sys.argv[1:3])\n"
        "text = ctypes.create_string_buffer(999)\n"
        "user.use.restype = ctypes.c_void_p\n"
        "made = bool(user.use()) and bool(user.use())\n"
        "print(made, fake.fake_registered(text, 999), text.value.decode())\n"
    )
    registered = {}
    for wanted in ("0", "1"):
        environment = {
            **os.environ,
            "LD_PRELOAD": str(plugin_library),
            "TRTLLM_AV_LOAD_PLUGINS": wanted,
            "LD_LIBRARY_PATH": str(fake.parent),
        }
        command = [sys.executable, "-c", script, str(fake), str(user)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        registered[wanted] = done.stdout.strip()
    assert registered["0"] == "True 2"
    assert registered["1"] == "True 2 " + " ".join(f"{name}@{NAMESPACE}" for name in PLUGINS)


def test_registering_without_tensorrt(plugin_library: Path) -> None:
    """Guards against: a null registry that is used."""
    script = (
        "import ctypes, sys\n"
        "entry = ctypes.CDLL(sys.argv[1]).initAvPlugins\n"
        "entry.restype = ctypes.c_bool\n"
        "print(entry(None, None))\n"
    )
    command = [sys.executable, "-c", script, str(plugin_library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert done.stderr.strip().startswith("trtllm_av: TensorRT is not loaded in this process")


def test_refusals_are_logged(adapter: Adapter) -> None:
    """Guards against: a null plugin without a word why."""
    with pytest.raises(Refused, match="trtllm_av: ScoreDrafts needs the field vocab_size"):
        adapter.create("ScoreDrafts", {})
    with pytest.raises(Refused, match="trtllm_av: TrimTree: total_multiple=0 must be in 1"):
        adapter.create("TrimTree", {"total_multiple": 0})
