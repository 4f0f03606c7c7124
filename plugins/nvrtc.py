"""CUDA sources to machine code of one architecture, with NVRTC: no toolkit and no GPU needed.

Invariants: a cubin is a function of the sources, the options, the architecture and the compiler version,
which together name its cache entry; every kernel compiles without spilling registers, which
``python -m trtllm_av.plugins.nvrtc`` prints and checks for all architectures.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_av.plugins import kernel_cache
from trtllm_av.runtime.errors import DeviceError, MissingDependencyError

#: Compute capabilities (major · 10 + minor) that are compiled and checked; 80 is the oldest accepted,
#: for packed bf16 maxima and warp reductions.
ARCHITECTURES = (80, 89, 90, 100, 120)

#: The kernels of each ``kernels/<source>.cu``.
SOURCES = {
    "score": (
        "score_bf16",
        "score_f16",
        "score_f32",
        "score_masked_bf16",
        "score_masked_f16",
        "score_masked_f32",
        "score_features",
    ),
    "trim_pack": ("trim_pack_4", "trim_pack_8", "trim_pack_16", "pack_lengths"),
    "training": ("label_drafts", "accumulate_statistics", "overlap_mass"),
    "tree_score": ("tree_nodes", "score_level_bf16", "score_level_f16", "score_level_f32"),
    "tree_trim": ("read_control", "tree_keys", "tree_trim"),
}
_FOLDER = Path(__file__).with_name("kernels")
_HEADERS = ("intrinsics.cuh", "pack.cuh", "tree.cuh")
#: NVRTC's own cache is off: what it serves comes without the compiler's report.
_OPTIONS = ("--std=c++17", "--no-cache")
_INSTALL = "install it with `pip install 'trtllm-adaptive-verification[cuda]'`"


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says one kernel needs."""

    kernel: str
    registers: int
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one source file, and what its kernels need."""

    cubin: bytes
    resources: tuple[Resources, ...]


def cuda_bindings(module: str) -> Any:
    """``cuda.bindings.<module>``; MissingDependencyError says what to install."""
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise MissingDependencyError(f"cuda-python is missing ({error}); {_INSTALL}") from None


def compiler_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that would compile; MissingDependencyError without one."""
    nvrtc = cuda_bindings("nvrtc")
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there, the library that they load is not
        reason = str(error).partition("\n")[0]
        raise MissingDependencyError(f"NVRTC is missing ({reason}); {_INSTALL}") from None
    return int(major), int(minor)


def load_cubin(source: str, architecture: int, folder: Path | None = None) -> bytes:
    """Machine code of ``kernels/<source>.cu`` from the cache in ``folder``, compiled if it is not there."""
    path = _cache_path(source, architecture, folder or kernel_cache.default_folder())
    cubin = kernel_cache.read(path)
    if cubin is None:
        cubin = compile_source(source, architecture).cubin
        kernel_cache.write(path, cubin)
    return cubin


def compile_source(
    source: str, architecture: int, options: tuple[str, ...] = _OPTIONS, *, text: str | None = None
) -> Compiled:
    """Compile ``kernels/<source>.cu`` (or ``text`` in its place) for one architecture.

    Raises DeviceError for an architecture that the kernels or this NVRTC do not support, with the
    compiler's first message for a source that does not compile.
    """
    version = compiler_version()
    nvrtc = cuda_bindings("nvrtc")
    supported = nvrtc.nvrtcGetSupportedArchs()[1]
    if architecture < ARCHITECTURES[0] or architecture not in supported:
        raise DeviceError(
            f"compute capability {architecture // 10}.{architecture % 10} is not supported by these "
            f"kernels with NVRTC {version[0]}.{version[1]}; 8.0 is the oldest, newer ones need a newer "
            "nvidia-cuda-nvrtc"
        )
    headers = [(_FOLDER / name).read_bytes() for name in _HEADERS]
    body = _source_path(source).read_text("utf-8") if text is None else text
    _, program = nvrtc.nvrtcCreateProgram(
        body.encode(),
        f"{source}.cu".encode(),
        len(headers),
        headers,
        [name.encode() for name in _HEADERS],
    )
    try:
        arguments = (f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v", *options)
        encoded = [argument.encode() for argument in arguments]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        report = log.decode("utf-8", "replace")
        if int(status):
            first = next((line for line in report.splitlines() if "error" in line), status.name)
            raise DeviceError(f"{source}.cu does not compile for sm_{architecture}: {first}")
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, tuple(parse_report(report)))


def parse_report(report: str) -> list[Resources]:
    """What ``ptxas -v`` says of each kernel, in its order."""
    found = []
    for part in report.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        if registers is None or not spills:
            raise DeviceError(f"the compiler's report is not understood: {part.splitlines()[0]!r}")
        found.append(
            Resources(
                kernel=part.partition("'")[0],
                registers=int(registers[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                spill_bytes=sum(map(int, spills)),
            )
        )
    return found


def _source_path(source: str) -> Path:
    return _FOLDER / f"{source}.cu"


def _cache_path(source: str, architecture: int, folder: Path) -> Path:
    """Cache entry of one source: its name holds a digest of all that decides the machine code."""
    digest = hashlib.sha256(repr((compiler_version(), architecture, _OPTIONS)).encode())
    for path in (_source_path(source), *(_FOLDER / name for name in _HEADERS)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return folder / f"{source}-sm_{architecture}-{digest.hexdigest()[:32]}.cubin"


def _read(size: Any, fill: Any, program: Any) -> bytes:
    """A byte string that NVRTC writes into a buffer of the size it names."""
    _, length = size(program)
    buffer = bytes(length)
    fill(program, buffer)
    return buffer


def main() -> int:
    """Compile everything for every architecture and print what the kernels need; 1 if any spills."""
    rows = [
        (architecture, kernel)
        for architecture in ARCHITECTURES
        for source in SOURCES
        for kernel in compile_source(source, architecture).resources
    ]
    print(f"NVRTC {'.'.join(map(str, compiler_version()))}")
    for architecture, kernel in rows:
        print(
            f"sm_{architecture:<4}{kernel.kernel:<24}{kernel.registers:>4} registers"
            f"{kernel.shared_bytes:>7} bytes shared{kernel.spill_bytes:>4} bytes spilled"
        )
    return int(any(kernel.spill_bytes for _, kernel in rows))


if __name__ == "__main__":
    sys.exit(main())
