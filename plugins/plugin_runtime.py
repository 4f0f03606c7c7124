"""Puts a plugin's steps on a stream, for the Python form: loaded kernels and the control block's address.

Invariants: everything slow (compiling, loading, locking the control block's page) happens in ``prepare``,
before any capture; ``enqueue`` neither allocates nor waits and uses the given stream only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_av.plugins import nvrtc, plugin_core
from trtllm_av.plugins.control_block import SIZE, ControlBlock, process_block
from trtllm_av.plugins.cuda_launch import check, kernels
from trtllm_av.plugins.plugin_core import Fields
from trtllm_av.plugins.plugin_launch import (
    Binding,
    Scratch,
    launches,
    mailbox_bytes,
    workspace_bytes,
)
from trtllm_av.plugins.plugin_spec import DType
from trtllm_av.runtime.errors import UsageError

#: Kernel sources of each plugin.
_SOURCES = {
    "ScoreDrafts": "score",
    "TrimDrafts": "trim_pack",
    "ScoreLevel": "tree_score",
    "TrimTree": "tree_trim",
}
DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.bool: "bool",
}


def prepare(name: str) -> Tensor:
    """Load what the plugin ``name`` needs on the current device; returns the mailboxes of one context.

    Raises DeviceError without a usable device.
    """
    device = torch.cuda.current_device()
    kernels(_SOURCES[name], device)
    if name == "TrimTree":
        device_address(process_block())
    num_bytes = mailbox_bytes(name, _num_processors(device))
    mailboxes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # the engine's stream does not wait for torch's
    return mailboxes


def enqueue(
    name: str,
    fields: Fields,
    inputs: Sequence[Binding],
    outputs: Sequence[Binding],
    *,
    workspace: int,
    mailboxes: Tensor,
    stream: int,
) -> None:
    """Put one execution on ``stream``, an address of a CUstream, with memory of the current device.

    ``mailboxes`` are those of ``prepare``, for one execution at a time.
    """
    device = torch.cuda.current_device()
    control = device_address(process_block()) if name == "TrimTree" else 0
    scratch = Scratch(workspace, mailboxes.data_ptr(), control)
    for launch in launches(name, fields, inputs, outputs, scratch, _num_processors(device)):
        kernel = kernels(launch.source, device)[launch.kernel]
        kernel.launch(launch.grid, launch.num_threads, launch.arguments, stream)


def _num_processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def device_address(block: ControlBlock) -> int:
    """Lock the page of ``block`` in memory and return its address on every device of this process."""
    driver = nvrtc.cuda_bindings("driver")
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    (status,) = driver.cuMemHostRegister(block.address, SIZE, flags)
    check(driver, status, "locking the control block in memory")
    status, address = driver.cuMemHostGetDevicePointer(block.address, 0)
    check(driver, status, "mapping the control block")
    return int(address)


def run(name: str, *inputs: Tensor, **fields: float) -> tuple[list[Tensor], Tensor]:
    """The plugin ``name`` on contiguous CUDA tensors, on torch's current stream: outputs and workspace.

    What an engine does with it, checks included: for executors without TensorRT and for tests. Raises
    UsageError for what the plugin refuses.
    """
    spec = plugin_core.find_plugin(name)
    values = plugin_core.read_fields(spec, fields)
    shapes = [tuple(tensor.shape) for tensor in inputs]
    plugin_core.check_counts(spec, len(inputs), len(spec.outputs))
    plugin_core.check_shapes(spec, values, shapes)
    for position, tensor in enumerate(inputs):
        dtype = DTYPES.get(tensor.dtype)
        if not plugin_core.supports(spec, position, dtype, tensor.is_contiguous(), len(inputs)):
            raise UsageError(
                f"{name}: {spec.inputs[position].name} is {tensor.dtype} with strides {tensor.stride()}; "
                f"pass contiguous {' or '.join(spec.inputs[position].dtypes)}"
            )
    mailboxes = prepare(name)
    dtypes = {kind: dtype for dtype, kind in DTYPES.items()}
    outputs = [
        inputs[0].new_empty(shape, dtype=dtypes[output.dtypes[0]])
        for output, shape in zip(spec.outputs, plugin_core.output_dims(spec, shapes), strict=True)
    ]
    workspace = inputs[0].new_empty(workspace_bytes(name, shapes), dtype=torch.uint8)
    enqueue(
        name,
        values,
        list(map(binding_of, inputs)),
        list(map(binding_of, outputs)),
        workspace=workspace.data_ptr(),
        mailboxes=mailboxes,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    return outputs, workspace


def binding_of(tensor: Tensor) -> Binding:
    return Binding(tensor.data_ptr(), tuple(tensor.shape), DTYPES[tensor.dtype])
