"""Builds the C++ form of the plugins with g++: tables from ``plugin_spec``, kernels from NVRTC inside.

TensorRT's headers are needed, its libraries and those of CUDA are not: the driver is opened at run time, and
TensorRT is what the process has loaded. Invariants: the result appears whole or not at all; a build needs no GPU;
every error is one line that says what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trtllm_av.plugins import kernel_cache, nvrtc
from trtllm_av.plugins.plugin_spec import DTYPES, PLUGINS, Factor, Field, PluginSpec, Tensor
from trtllm_av.runtime.errors import BuildError, MissingDependencyError

LIBRARY_NAME = "libtrtllm_av_plugin.so"
#: Kernel sources of the plugins.
SOURCES = ("score", "trim_pack", "tree_score", "tree_trim")
_FOLDER = Path(__file__).with_name("csrc")
_CORE = ("core.cpp", "launch.cpp", "driver.cpp", "control_block.cpp")
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
#: Nothing of the build machine's C++ library is needed where the plugin runs.
_LINK = (
    "-static-libstdc++",
    "-static-libgcc",
    "-ldl",
    "-lrt",
    "-pthread",
    "-Wl,--no-undefined",
    "-Wl,--exclude-libs,ALL",
)
_TENSORRT_HEADER = "NvInferRuntime.h"


def build_plugin(
    include_dir: Path, output: Path, architectures: Sequence[int] = nvrtc.ARCHITECTURES
) -> Path:
    """Build the plugin library ``output`` against the TensorRT headers in ``include_dir``.

    ``architectures``: compute capabilities (major · 10 + minor) that it brings kernels for. Raises BuildError
    or MissingDependencyError.
    """
    if not (include_dir / _TENSORRT_HEADER).is_file():
        raise BuildError(
            f"{include_dir} has no {_TENSORRT_HEADER}; pass the include folder of TensorRT 10.11 or newer"
        )
    return _build((*_CORE, "adapter.cpp"), output, architectures, header_flags(include_dir))


def header_flags(include_dir: Path) -> tuple[str, ...]:
    """Compiler flags for TensorRT's headers; those of others are not held to our warnings."""
    return "-isystem", str(include_dir.resolve()), "-isystem", str(_FOLDER / "cuda_types")


def default_library() -> Path:
    """Where the library is built to and looked for: ``$TRTLLM_AV_PLUGIN``, by default in the cache folder."""
    given = os.environ.get("TRTLLM_AV_PLUGIN")
    return (
        Path(given) if given else kernel_cache.default_folder().with_name("plugins") / LIBRARY_NAME
    )


def build_core(output: Path, architectures: Sequence[int] = ()) -> Path:
    """Build the part without TensorRT, with C entry points (``csrc/c_api.cpp``), as library ``output``."""
    return _build((*_CORE, "c_api.cpp"), output, architectures, ())


def _build(
    sources: Sequence[str], output: Path, architectures: Sequence[int], flags: Sequence[str]
) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise MissingDependencyError(
            f"the C++ compiler {os.environ.get('CXX', 'g++')} is missing; install g++ 9 or newer, or set CXX"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            folder = Path(scratch)
            (folder / "plugin_tables.h").write_text(cpp_tables(), "utf-8")
            _write_cubins(folder, architectures)
            command = [compiler, *_FLAGS, f"-I{folder}", f"-I{_FOLDER}", *flags]
            command += [str(_FOLDER / source) for source in sources]
            command += [str(folder / "cubins.cpp"), "-o", str(folder / output.name), *_LINK]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.splitlines()
                first = next((line for line in lines if "error" in line), "no message")
                raise BuildError(f"{output.name} does not compile with {compiler}: {first}")
            os.replace(folder / output.name, output)
    except OSError as error:
        raise BuildError(
            f"{output} cannot be written ({error.strerror}); choose another place"
        ) from None
    return output


def cpp_tables() -> str:
    """``plugin_tables.h``: ``plugin_spec`` and the kernels' names as C++ constants."""
    names = [
        f"    {{{_quoted(source)}, {_quoted(kernel)}}},"
        for source in SOURCES
        for kernel in nvrtc.SOURCES[source]
    ]
    lines = [
        "// Generated from plugins/plugin_spec.py and plugins/nvrtc.py.",
        "#pragma once",
        '#include "tables.h"',
        "namespace av {",
        "constexpr Plugin PLUGINS[] = {",
        *map(_cpp_plugin, PLUGINS.values()),
        "};",
        "constexpr KernelName KERNEL_NAMES[] = {",
        *names,
        "};",
        "}  // namespace av",
    ]
    return "\n".join(lines) + "\n"


def _cpp_plugin(spec: PluginSpec) -> str:
    counts = (
        len(spec.inputs),
        spec.num_required,
        len(spec.outputs),
        len(spec.fields),
        len(spec.limits),
    )
    limits = ", ".join(f"{{{_quoted(limit.name)}, {limit.most}}}" for limit in spec.limits)
    return (
        f"    {{{_quoted(spec.name)}, {', '.join(map(str, counts))},\n"
        f"     {{{', '.join(map(_cpp_tensor, spec.inputs))}}},\n"
        f"     {{{', '.join(map(_cpp_tensor, spec.outputs))}}},\n"
        f"     {{{', '.join(map(_cpp_field, spec.fields))}}},\n"
        f"     {{{limits}}}}},"
    )


def _cpp_tensor(tensor: Tensor) -> str:
    dtypes = sum(1 << DTYPES.index(dtype) for dtype in tensor.dtypes)
    dims = ", ".join(map(_cpp_dim, tensor.shape))
    flags = f"{len(tensor.shape)}, {{{dims}}}, {_cpp_bool(tensor.is_optional)}"
    return f"{{{_quoted(tensor.name)}, {dtypes}u, {flags}}}"


def _cpp_dim(factors: tuple[Factor, ...]) -> str:
    inner = ", ".join(f"{{{_quoted(factor.name)}, {factor.plus}}}" for factor in factors)
    return f"{{{len(factors)}, {{{inner}}}}}"


def _cpp_field(field: Field) -> str:
    has_default = field.default is not None
    bounds = f"{field.least!r}, {field.most!r}, {_cpp_bool(has_default)}, {field.default or 0!r}"
    return f"{{{_quoted(field.name)}, {_cpp_bool(field.dtype == 'f32')}, {bounds}}}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _cpp_bool(value: bool) -> str:
    return "true" if value else "false"


def _write_cubins(folder: Path, architectures: Sequence[int]) -> None:
    """``cubins.cpp``, which takes the machine code of all kernels from files beside it."""
    declarations, entries = [], []
    for architecture in architectures:
        for source in SOURCES:
            symbol = f"av_{source}_{architecture}"
            (folder / f"{symbol}.cubin").write_bytes(nvrtc.load_cubin(source, architecture))
            declarations.append(
                f'asm(".section .rodata\\n.balign 64\\n{symbol}:\\n.incbin \\"{symbol}.cubin\\"\\n.previous\\n");\n'
                f"extern unsigned char const {symbol}[];"
            )
            entries.append(f"    {{{_quoted(source)}, {architecture}, {symbol}}},")
    lines = [
        '#include "driver.h"',
        'extern "C" {',
        *declarations,
        "}",
        "namespace av {",
        "Cubin const CUBINS[] = {",
        *entries,
        "    {nullptr, 0, nullptr},",
        "};",
        f"int const NUM_CUBINS = {len(entries)};",
        "}  // namespace av",
    ]
    (folder / "cubins.cpp").write_text("\n".join(lines) + "\n", "utf-8")
