"""What the plugins put on a stream: kernels with their grids and arguments, from sizes and addresses alone.

The C++ form is ``csrc/launch.cpp``; a test compares the two, argument by argument. Invariants: nothing is
allocated, nothing waits, and nothing but outputs and scratch is written (and the progress word of the
control block), so that a capture records all of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

from trtllm_av.plugins import cuda_score, cuda_trim
from trtllm_av.plugins.plugin_core import Dims, Fields
from trtllm_av.plugins.plugin_spec import ITEM_BYTES, DType

#: Of tree.cuh, tree_score.cu and tree_trim.cu.
_NODE_THREADS = 256
_LEVEL_THREADS = 1024
_READ_THREADS = 64
_SNAPSHOT_BYTES = 256
_WARP = 32
_ALIGNMENT = 256


class Binding(NamedTuple):
    """A tensor as ``enqueue`` gets it; address 0 is an absent one."""

    address: int
    dims: Dims
    dtype: DType


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of ``kernels/<source>.cu`` with its arguments by value."""

    source: str
    kernel: str
    grid: tuple[int, int, int]
    num_threads: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory besides the tensors, by address. ``workspace`` is undefined between executions; ``mailboxes``, of
    ``mailbox_bytes``, are the context's own and 0 between them; ``control``: the control block on the device."""

    workspace: int
    mailboxes: int
    control: int


def workspace_bytes(name: str, inputs: Sequence[Dims]) -> int:
    """Bytes that one execution needs besides its outputs, at most, for inputs of these dimensions."""
    if name == "ScoreLevel":
        rows, nodes, _ = inputs[2]
        return _aligned(rows * nodes * 4) + rows * 4
    if name == "TrimTree":
        rows, drafts = inputs[0]
        return _SNAPSHOT_BYTES + 2 * _aligned(rows * drafts * 4)
    return 0


def mailbox_bytes(name: str, num_processors: int) -> int:
    """Bytes that a context keeps at 0 for the plugin: a word for every block that shares a row."""
    return cuda_score.RESIDENT_BLOCKS * num_processors * 8 if name == "ScoreDrafts" else 0


def launches(
    name: str,
    fields: Fields,
    inputs: Sequence[Binding],
    outputs: Sequence[Binding],
    scratch: Scratch,
    num_processors: int,
) -> list[Launch]:
    """What the plugin ``name`` enqueues, in order."""
    if name == "ScoreDrafts":
        return _score_drafts(fields, inputs, outputs, scratch.mailboxes, num_processors)
    if name == "TrimDrafts":
        return _trim_drafts(inputs, outputs)
    if name == "ScoreLevel":
        return _score_level(fields, inputs, outputs, scratch.workspace)
    return _trim_tree(fields, inputs, outputs, scratch)


def _score_drafts(
    fields: Fields,
    inputs: Sequence[Binding],
    outputs: Sequence[Binding],
    mailboxes: int,
    num_processors: int,
) -> list[Launch]:
    logits, temperature, coefficients, position, draft_lens = inputs[:5]
    mask = inputs[5] if len(inputs) > 5 else None
    rows, columns, width = logits.dims
    if rows * columns == 0:
        return []
    vocab_size = int(fields["vocab_size"])
    vectors = vocab_size * ITEM_BYTES[logits.dtype] // cuda_score.VECTOR_BYTES
    splits = cuda_score.splits_of_row(rows * columns, vectors, num_processors)
    shape = cuda_score.Shape(
        columns * width,
        width,
        0 if mask is None else width,
        columns,
        coefficients.dims[0] - 1,
        vocab_size,
        -(-vectors // splits),
    )
    launch = Launch(
        "score",
        f"score_{'' if mask is None else 'masked_'}{logits.dtype}",
        (splits, columns, rows),
        cuda_score.THREADS,
        (
            c_void_p(logits.address),
            shape,
            c_void_p(temperature.address),
            c_float(fields["temperature_floor"]),
            c_void_p(coefficients.address),
            c_float(fields["feature_bound"]),
            c_void_p(position.address),
            c_void_p(0 if mask is None else mask.address),
            c_void_p(draft_lens.address),
            c_void_p(mailboxes if splits > 1 else 0),
            c_void_p(outputs[0].address),
            c_void_p(outputs[1].address),
        ),
    )
    return [launch]


def _trim_drafts(inputs: Sequence[Binding], outputs: Sequence[Binding]) -> list[Launch]:
    rows, positions = inputs[0].dims
    arguments = (
        *(c_void_p(tensor.address) for tensor in inputs),
        c_int(rows),
        c_int(positions),
        *(c_void_p(tensor.address) for tensor in outputs),
        c_int(positions + 1),
        c_int(rows * (positions + 1)),
        cuda_trim.Gather(),
    )
    kernel = cuda_trim.kernel_name(positions)
    return [Launch("trim_pack", kernel, (1, 1, 1), cuda_trim.num_threads(rows), arguments)]


def _score_level(
    fields: Fields, inputs: Sequence[Binding], outputs: Sequence[Binding], workspace: int
) -> list[Launch]:
    logits, num_rows, paths, draft_lens = inputs
    rows, nodes, depths = paths.dims
    if rows == 0:
        return []
    level = int(fields["level"])
    words, counts = workspace, workspace + _aligned(rows * nodes * 4)
    decode = (c_void_p(paths.address), *map(c_int, (nodes, depths, level)))
    score = (
        c_void_p(logits.address),
        c_longlong(logits.dims[1]),
        c_int(int(fields["vocab_size"])),
        c_void_p(num_rows.address),
        c_void_p(words),
        c_void_p(counts),
        c_int(nodes),
        c_int(level),
        c_float(fields["feature_bound"]),
        c_void_p(draft_lens.address),
        c_void_p(outputs[0].address),
        c_void_p(outputs[1].address),
    )
    grid = (int(fields["max_non_leaves"]), rows, 1)
    return [
        Launch(
            "tree_score",
            "tree_nodes",
            (rows, 1, 1),
            _NODE_THREADS,
            (*decode, c_void_p(words), c_void_p(counts)),
        ),
        Launch("tree_score", f"score_level_{logits.dtype}", grid, _LEVEL_THREADS, score),
    ]


def _trim_tree(
    fields: Fields,
    inputs: Sequence[Binding],
    outputs: Sequence[Binding],
    scratch: Scratch,
) -> list[Launch]:
    features, lens, paths, *of_last_round = inputs
    rows, nodes, depths = paths.dims
    drafts = nodes - 1
    snapshot, confidence = scratch.workspace, scratch.workspace + _SNAPSHOT_BYTES
    keys = confidence + _aligned(rows * drafts * 4)
    trimmed, trace = (c_void_p(tensor.address) for tensor in outputs)
    read = Launch(
        "tree_trim",
        "read_control",
        (1, 1, 1),
        _READ_THREADS,
        (c_void_p(scratch.control), c_void_p(snapshot)),
    )
    if rows == 0:
        return [read]
    give_keys = (
        *(c_void_p(address) for address in (features.address, lens.address, paths.address)),
        c_void_p(snapshot),
        c_int(nodes),
        c_int(depths),
        c_void_p(confidence),
        c_void_p(keys),
        trace,
    )
    trim = (
        *(c_void_p(address) for address in (keys, lens.address, snapshot)),
        *(c_void_p(tensor.address) for tensor in of_last_round),
        *map(c_int, (rows, drafts, int(fields["min_draft_len"]), int(fields["total_multiple"]))),
        trimmed,
        trace,
    )
    num_threads = -(-rows // _WARP) * _WARP
    return [
        read,
        Launch("tree_trim", "tree_keys", (rows, 1, 1), _NODE_THREADS, give_keys),
        Launch("tree_trim", "tree_trim", (1, 1, 1), num_threads, trim),
    ]


def argument_bytes(launch: Launch) -> list[bytes]:
    """The arguments as the driver reads them."""
    return [ctypes.string_at(ctypes.addressof(a), ctypes.sizeof(a)) for a in launch.arguments]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
