"""Finding and loading the plugins: the C++ library, or the Python form where that is enough."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_av.plugins.control_block import process_block
from trtllm_av.runtime.engines import trtllm_library
from trtllm_av.runtime.engines.trtllm_library import (
    find_plugin_library,
    load_plugin_library,
    register_for_build,
    register_plugins,
    worker_environment,
)
from trtllm_av.runtime.errors import BuildError, MissingDependencyError


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules that the Python form was registered with."""
    names: list[str] = []
    monkeypatch.setitem(sys.modules, "tensorrt", type(sys)("tensorrt"))
    monkeypatch.setattr(
        trtllm_library.tensorrt_plugin, "register", lambda trt: names.append(trt.__name__)
    )
    return names


def compile_library(folder: Path, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (folder / "plugin.c").write_text(source)
    library = folder / "libplugin.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "plugin.c")], check=True
    )
    return library


def test_library_is_never_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a library of another build that happens to lie somewhere."""
    monkeypatch.setenv("TRTLLM_AV_PLUGIN", str(tmp_path / "named.so"))
    with pytest.raises(MissingDependencyError, match=r"named\.so.*--build-plugin"):
        find_plugin_library()
    given = tmp_path / "given.so"
    given.touch()
    assert find_plugin_library(given) == given
    (tmp_path / "named.so").touch()
    assert find_plugin_library() == tmp_path / "named.so"


def test_library_registers_itself_once(tmp_path: Path) -> None:
    """Guards against engines whose plugins are unknown, or are registered twice, which TensorRT refuses."""
    library = compile_library(
        tmp_path,
        "int calls = 0; _Bool initAvPlugins(void* logger, char const* ns) { ++calls; return 1; }",
    )
    load_plugin_library(library)
    load_plugin_library(library)
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "calls").value == 1


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("int other;", "does not load"),
        ("_Bool initAvPlugins(void* a, char const* b) { return 0; }", "no plugin registry"),
    ],
)
def test_wrong_libraries_are_one_line(tmp_path: Path, source: str, named: str) -> None:
    """Guards against a traceback, or an engine that fails later, for a library that is of no use."""
    with pytest.raises(BuildError, match=named):
        load_plugin_library(compile_library(tmp_path, source))


def test_python_form_serves_one_process(registered: list[str]) -> None:
    """Guards against a runtime that writes one block while its plugins read another."""
    assert register_plugins("python") is process_block()
    assert registered == ["tensorrt"]


def test_python_form_needs_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an ImportError's traceback on a machine without TensorRT."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match="install tensorrt-llm"):
        register_plugins("python")


def test_builds_need_no_library(
    tmp_path: Path,
    registered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against a build that fails, or says nothing, where no C++ library was built."""
    monkeypatch.setenv("TRTLLM_AV_PLUGIN", str(tmp_path / "none.so"))
    assert register_for_build() == "python"
    assert registered == ["tensorrt"] and "Python form" in caplog.text
    monkeypatch.setattr(trtllm_library, "load_plugin_library", lambda: tmp_path)
    assert register_for_build() == "library"


def test_workers_preload_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against workers without plugins, or without what was preloaded already."""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libother.so")
    environment = worker_environment(Path("/x/plugin.so"), "av_job")
    assert environment == {
        "LD_PRELOAD": "/x/plugin.so:/usr/lib/libother.so",
        "TRTLLM_AV_LOAD_PLUGINS": "1",
        "TRTLLM_AV_CONTROL_BLOCK": "av_job",
    }
    monkeypatch.delenv("LD_PRELOAD")
    assert worker_environment(Path("/x/plugin.so")) == {
        "LD_PRELOAD": "/x/plugin.so",
        "TRTLLM_AV_LOAD_PLUGINS": "1",
    }
