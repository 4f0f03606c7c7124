"""Loading compiled kernels into a GPU and launching them on torch's current stream.

Invariants: a launch neither synchronises nor allocates device memory, so that it can be captured in a
graph; everything slow (compiling, loading) happens at the first launch of a source file on a device,
which therefore must come before a capture; a refused launch raises DeviceError with the kernel's name.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trtllm_av.plugins import nvrtc
from trtllm_av.runtime.errors import DeviceError, UsageError

_Argument = ctypes.c_void_p | ctypes.c_int | ctypes.c_longlong | ctypes.c_float | ctypes.Structure


def architecture(device: torch.device | int = 0) -> int:
    """Compute capability (major · 10 + minor) of ``device``; DeviceError if no kernel can run there."""
    if torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch or use "
            "device 'cpu'"
        )
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device was found; check `nvidia-smi` or use device 'cpu'")
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor < nvrtc.ARCHITECTURES[0]:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; these kernels "
            "need 8.0 or newer: use device 'cpu'"
        )
    return major * 10 + minor


class Kernel:
    """One kernel on one device."""

    def __init__(self, name: str, function: Any, device: int) -> None:
        self.name = name
        self._function = function
        self._device = device
        self._driver = nvrtc.cuda_bindings("driver")

    def launch(
        self,
        grid: tuple[int, int, int],
        num_threads: int,
        arguments: Sequence[_Argument],
        stream: int | None = None,
    ) -> None:
        """Enqueue the kernel with ``arguments`` by value, in the order of its parameters.

        ``stream`` is a CUstream's address; None means torch's current one.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        call = (self._function, *grid, num_threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        with torch.cuda.device(self._device):
            (status,) = self._driver.cuLaunchKernel(*call)
            if status == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
                _make_current(self._driver, self._device)  # this thread's first use of the device
                (status,) = self._driver.cuLaunchKernel(*call)
        check(self._driver, status, f"kernel {self.name} on cuda:{self._device}")


@functools.cache
def kernels(source: str, device: int) -> dict[str, Kernel]:
    """All kernels of ``kernels/<source>.cu`` on a device by name, compiled and loaded at first use."""
    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"{source}.cu is used for the first time inside a graph capture; run its operator once before"
        )
    driver = nvrtc.cuda_bindings("driver")
    what = f"loading {source}.cu on cuda:{device}"
    cubin = nvrtc.load_cubin(source, architecture(device))
    _make_current(driver, device)
    status, library = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
    check(driver, status, what)
    loaded = {}
    for name in nvrtc.SOURCES[source]:
        status, handle = driver.cuLibraryGetKernel(library, name.encode())
        check(driver, status, what)
        status, function = driver.cuKernelGetFunction(handle)
        check(driver, status, what)
        loaded[name] = Kernel(name, function, device)
    return loaded


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of a tensor's first element as an argument; null for none."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def floats(tensor: Tensor) -> Tensor:
    """``tensor`` as kernels read it; nothing is copied if it is contiguous float32 already."""
    return tensor.to(torch.float32).contiguous()


def common_device(**tensors: Tensor | None) -> int:
    """Index of the CUDA device that all ``tensors`` lie on.

    Raises UsageError for one that lies elsewhere or is float64: a kernel would misread it.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    device = next(tensor.device for tensor in given.values() if tensor.is_cuda)
    for name, tensor in given.items():
        if tensor.device != device:
            raise UsageError(f"{name} is on {tensor.device}; move it to {device} like the others")
        if tensor.dtype == torch.float64:
            raise UsageError(f"{name} is float64, which only the CPU computes in; pass float32")
    index: int = device.index
    return index


def _make_current(driver: Any, device: int) -> None:
    """Bind the calling thread to the context of ``device`` that torch uses."""
    torch.cuda.init()
    status, handle = driver.cuDeviceGet(device)
    check(driver, status, f"opening cuda:{device}")
    status, context = driver.cuDevicePrimaryCtxRetain(handle)
    check(driver, status, f"opening cuda:{device}")
    (status,) = driver.cuCtxSetCurrent(context)
    check(driver, status, f"opening cuda:{device}")


def check(driver: Any, status: Any, what: str) -> None:
    """Raise DeviceError if the driver's ``status`` is no success; ``what`` was tried."""
    if int(status):
        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else "no description"
        raise DeviceError(f"{what} failed: {status.name} ({reason})")
