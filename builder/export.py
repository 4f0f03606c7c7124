"""Networks to ONNX files: packed layout, local functions inside, weights beside.

Four files make an engine: ``verify.onnx`` (the target), ``draft_step.onnx`` (one step of the drafter),
``score.onnx`` and ``trim.onnx`` (``export_operations``). Invariants: every node outside the standard has
its local function in the same file, so that any engine can run it; all sizes that change from round to
round are dynamic; weights are stored once, as external data next to the file, in the dtype asked for.

Sizes by name: T packed tokens, B slots of the cache, M queries per slot after padding, N rows whose
logits are wanted, R requests.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trtllm_av.builder.networks import DecoderNetwork, HeadStepNetwork
from trtllm_av.builder.networks_block import BlockStepNetwork, ChainNetwork
from trtllm_av.plugins import onnx_functions
from trtllm_av.runtime.errors import MissingDependencyError
from trtllm_av.runtime.models.config import LlamaConfig

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
VERIFY, DRAFT_STEP, SCORE, TRIM = "verify.onnx", "draft_step.onnx", "score.onnx", "trim.onnx"
#: Only for a block drafter with a sequential head.
DRAFT_CHAIN = "draft_chain.onnx"
#: Any sizes do for tracing, as long as no two are equal and none is 0 or 1.
_TRACED_SIZES = {"T": 11, "B": 3, "B_plus_1": 4, "M": 5, "N": 7, "R": 6}


@dataclass(frozen=True, slots=True)
class Input:
    """``shape`` names the sizes that are dynamic."""

    name: str
    dtype: torch.dtype
    shape: tuple[str | int, ...]


PACKING_INPUTS = (
    Input("position_ids", torch.int64, ("T",)),
    Input("cu_q", torch.int32, ("B_plus_1",)),
    Input("kv_write", torch.int32, ("B",)),
    Input("kv_len", torch.int32, ("B",)),
    Input("pad_idx", torch.int64, ("B", "M")),
    Input("pack_idx", torch.int64, ("T",)),
    Input("logit_idx", torch.int64, ("N",)),
)


def export_decoder(network: DecoderNetwork, dtype: torch.dtype, max_len: int, path: Path) -> None:
    """Write a verify pass or a decoder's draft step; ``max_len`` positions per slot of the cache."""
    caches = cache_inputs(network.config, dtype, max_len, network.layer_indices)
    inputs = [Input("input_ids", torch.int64, ("T",)), *PACKING_INPUTS]
    _export(network, inputs, caches, ["logits", "hidden"], path)


def export_head_step(
    network: HeadStepNetwork, dtype: torch.dtype, max_len: int, path: Path
) -> None:
    """Write one step of a head on the target's hidden state."""
    head = network.head.config
    caches = cache_inputs(head.as_layer(), dtype, max_len, range(1))
    inputs = [
        Input("input_ids", torch.int64, ("T",)),
        Input("hidden", dtype, ("T", head.hidden_size)),
        *PACKING_INPUTS,
    ]
    if isinstance(network, BlockStepNetwork):
        inputs.append(Input("mask_idx", torch.int64, ("T",)))
    _export(network, inputs, caches, ["logits", "state"], path)


def export_chain(network: ChainNetwork, dtype: torch.dtype, path: Path) -> None:
    """Write one position of a sequential head."""
    vocab_size, state_size = network.bias.shape
    inputs = [
        Input("block_state", dtype, ("R", network.embedding.shape[1])),
        Input("block_logits", dtype, ("R", vocab_size)),
        Input("input_ids", torch.int64, ("R",)),
        Input("carried", dtype, ("R", state_size)),
    ]
    _export(network, inputs, [], ["logits", "next_carried", "confidence_logit"], path)


def share_weights(path: Path, owner: Path) -> None:
    """Make ``path`` read the weights that it has in common with ``owner`` from that file's data.

    Both were exported from the same tensors in one dtype; a weight has one name in both. If no other is
    left, the data file of ``path`` is removed.
    """
    onnx = import_onnx()
    model = onnx.load(os.fspath(path), load_external_data=False)
    source = onnx.load(os.fspath(owner), load_external_data=False)
    owned = {one.name: one for one in source.graph.initializer if one.external_data}
    mine = [one for one in model.graph.initializer if one.external_data]
    for tensor in mine:
        other = owned.get(tensor.name)
        if other is not None and (other.dims, other.data_type) == (tensor.dims, tensor.data_type):
            del tensor.external_data[:]
            tensor.external_data.extend(other.external_data)
    onnx.save(model, os.fspath(path))
    data = path.name + ".data"
    if not any(entry.value == data for tensor in mine for entry in tensor.external_data):
        path.with_name(data).unlink(missing_ok=True)
    onnx.checker.check_model(os.fspath(path))


def cache_inputs(
    config: LlamaConfig, dtype: torch.dtype, max_len: int, layers: Iterable[int]
) -> list[Input]:
    """Keys and values of each of ``layers`` in turn, [B, kv_heads, max_len, head_dim]."""
    shape = ("B", config.num_kv_heads, max_len, config.head_dim)
    return [Input(f"{kind}_cache_{layer}", dtype, shape) for layer in layers for kind in "kv"]


def _updated_name(cache: str) -> str:
    return cache.replace("_cache_", "_out_")


def _export(
    network: nn.Module,
    inputs: Sequence[Input],
    caches: Sequence[Input],
    outputs: list[str],
    path: Path,
) -> None:
    onnx = import_onnx()
    sizes = {name: torch.export.Dim(name) for name in _TRACED_SIZES}

    def example(value: Input) -> torch.Tensor:
        shape = [_TRACED_SIZES[size] if isinstance(size, str) else size for size in value.shape]
        return torch.zeros(shape, dtype=value.dtype)

    def dynamic(value: Input) -> dict[int, Any]:
        return {axis: sizes[size] for axis, size in enumerate(value.shape) if isinstance(size, str)}

    lists = ([example(cache) for cache in caches],) if caches else ()
    list_shapes = ([dynamic(cache) for cache in caches],) if caches else ()
    with _quiet_exporter():
        program = torch.onnx.export(
            network.eval(),
            (*map(example, inputs), *lists),
            dynamo=True,
            opset_version=onnx_functions.OPSET,
            input_names=[value.name for value in (*inputs, *caches)],
            output_names=[*outputs, *(_updated_name(cache.name) for cache in caches)],
            dynamic_shapes=(*map(dynamic, inputs), *list_shapes),
            verbose=False,
        )
        assert program is not None  # only without dynamo=True
        program.save(os.fspath(path), external_data=True)
    functions = [onnx_functions.kv_cache_update_function(), onnx_functions.attention_function()]
    finish(onnx.load(os.fspath(path), load_external_data=False), functions, path)


def finish(model: ModelProto, functions: Sequence[FunctionProto], path: Path) -> None:
    """Add the local functions and write the file; its external data stay where they are."""
    onnx = import_onnx()
    model.functions.extend(functions)
    imported = {opset.domain for opset in model.opset_import}
    for function in functions:
        if function.domain not in imported:
            imported.add(function.domain)
            model.opset_import.append(onnx.helper.make_opsetid(function.domain, 1))
    onnx.save(model, os.fspath(path))
    onnx.checker.check_model(os.fspath(path))


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without its remarks on its own internals and on packages that nothing here uses."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def import_onnx() -> Any:
    """The ``onnx`` module. Raises MissingDependencyError without it or without the exporter."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch.onnx.export imports it)
        import torch._dynamo  # noqa: F401 (the exporter does: its own memory is not the export's)
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting needs the package {error.name}; install it with: "
            "pip install 'trtllm-adaptive-verification[onnx]'"
        ) from None
    return onnx
