"""Compiling and caching kernels without a GPU, and the errors of a machine that cannot."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest

from trtllm_av.plugins import kernel_cache, nvrtc
from trtllm_av.runtime.errors import DeviceError, MissingDependencyError

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-python (the `cuda` extra)"
)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the compiler by one that notes its calls."""
    calls: list[str] = []

    def compile_source(source: str, architecture: int) -> nvrtc.Compiled:
        calls.append(source)
        return nvrtc.Compiled(f"{source} for {architecture}".encode(), ())

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 0))
    return calls


@needs_compiler
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_every_kernel_compiles_without_spills(architecture: int) -> None:
    """Guards against: code that only the developer's GPU accepts, registers that spill to memory, and a
    kernel that is renamed in one place."""
    for source, names in nvrtc.SOURCES.items():
        compiled = nvrtc.compile_source(source, architecture)
        for kernel in compiled.resources:
            print(f"sm_{architecture} {kernel}")
        assert compiled.cubin[:4] == b"\x7fELF"
        assert {kernel.kernel for kernel in compiled.resources} == set(names)
        assert not [kernel for kernel in compiled.resources if kernel.spill_bytes]


@needs_compiler
def test_report_shows_spills() -> None:
    """Guards against: a parser that reads "no spills" from a report that has some."""
    live = 120
    text = (
        'extern "C" __global__ void __launch_bounds__(1024, 1) f(float* x) {\n'
        f"  float v[{live}];\n"
        f"  for (int i = 0; i < {live}; ++i) v[i] = x[i * 32 + threadIdx.x];\n"
        "  __syncthreads();\n"
        f"  for (int i = 0; i < {live}; ++i) x[i * 64 + threadIdx.x] = v[i] * v[{live - 1} - i];\n"
        "}\n"
    )
    options = ("--std=c++17", "--no-cache", "--maxrregcount=32")
    (kernel,) = nvrtc.compile_source("score", 90, options, text=text).resources
    assert kernel.kernel == "f" and kernel.spill_bytes > 0


@needs_compiler
def test_broken_source_is_one_line() -> None:
    """Guards against: a compiler's whole log, or its success code, in place of an error."""
    with pytest.raises(
        DeviceError, match=r"score\.cu does not compile for sm_90: .*error"
    ) as raised:
        nvrtc.compile_source("score", 90, text="__global__ void f() { undeclared(); }")
    assert "\n" not in str(raised.value)


@needs_compiler
@pytest.mark.parametrize(("architecture", "name"), [(75, "7.5"), (999, "99.9")])
def test_unsupported_architecture(architecture: int, name: str) -> None:
    """Guards against: old or unknown GPUs that fail inside the compiler or, worse, at a launch."""
    with pytest.raises(DeviceError, match=f"compute capability {name} is not supported"):
        nvrtc.compile_source("score", architecture)


def test_missing_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: an ImportError from deep inside that does not say what to install."""

    def import_module(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(
        MissingDependencyError, match=r"cuda-python is missing.*pip install .*\[cuda\]"
    ):
        nvrtc.compiler_version()


def test_missing_compiler_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: bindings without their library, whose error is a page of search paths."""

    class Bindings:
        @staticmethod
        def nvrtcVersion() -> tuple[int, int, int]:
            raise RuntimeError("Failure finding libnvrtc.so\nsearched: everywhere")

    monkeypatch.setattr(nvrtc, "cuda_bindings", lambda module: Bindings)
    with pytest.raises(MissingDependencyError, match="NVRTC is missing") as raised:
        nvrtc.compiler_version()
    assert "\n" not in str(raised.value)


def test_cache_spares_the_compiler(compilations: list[str], tmp_path: Path) -> None:
    """Guards against: every process compiling again, or one architecture's code served to another."""
    first = nvrtc.load_cubin("score", 90, tmp_path)
    assert nvrtc.load_cubin("score", 90, tmp_path) == first
    assert compilations == ["score"]
    assert nvrtc.load_cubin("score", 80, tmp_path) != first
    assert compilations == ["score", "score"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_entry_is_rebuilt(
    damage: str, compilations: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against: machine code with a flipped bit being run, or an entry that fails for ever."""
    cubin = nvrtc.load_cubin("score", 90, tmp_path)
    (entry,) = tmp_path.iterdir()
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    entry.write_bytes({"truncate": content[:-3], "flip": content, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert nvrtc.load_cubin("score", 90, tmp_path) == cubin
    assert "damaged" in caplog.text
    assert nvrtc.load_cubin("score", 90, tmp_path) == cubin
    assert compilations == ["score", "score"]


def test_cache_key_covers_what_decides_the_code(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: stale kernels after an edit of a source or header, or another compiler."""
    sources = tmp_path / "kernels"
    sources.mkdir()
    for path in Path(nvrtc._FOLDER).iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(nvrtc, "_FOLDER", sources)

    def entry() -> Path:
        return nvrtc._cache_path("score", 90, tmp_path)

    seen = [entry()]
    for name in ("score.cu", "intrinsics.cuh", "pack.cuh"):
        with (sources / name).open("a") as file:
            file.write("\n// edited\n")
        seen.append(entry())
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 1))
    seen.append(entry())
    monkeypatch.setattr(nvrtc, "_OPTIONS", ("--std=c++20",))
    seen.append(entry())
    assert len(set(seen)) == len(seen)


def test_failed_write_leaves_nothing_and_no_error(
    compilations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against: half an entry under its final name, and a full disk stopping the engine."""

    def replace(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_cache.os, "replace", replace)
    with caplog.at_level(logging.WARNING):
        assert nvrtc.load_cubin("score", 90, tmp_path) == b"score for 90"
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against: a cache that ignores where the user wants it and fills a home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRTLLM_AV_CACHE", raising=False)
    assert kernel_cache.default_folder() == tmp_path / "trtllm-av" / "kernels"
    monkeypatch.setenv("TRTLLM_AV_CACHE", str(tmp_path / "mine"))
    assert kernel_cache.default_folder() == tmp_path / "mine" / "kernels"
