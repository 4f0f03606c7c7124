"""Networks to ONNX files: packed layout, local functions inside, weights beside.

Three files make an engine: ``verify.onnx`` (the target), ``draft_step.onnx`` (one step of the drafter and
its score) and ``trim.onnx``. Invariants: every node outside the standard has its local function in the
same file, so that any engine can run it; all sizes that change from round to round are dynamic; weights
are stored once, as external data next to the file, in the dtype asked for.

Sizes by name: T packed tokens, B slots of the cache, M queries per slot after padding, N rows whose
logits are wanted, R requests.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trtllm_av.builder.networks import DraftStepNetwork, TargetNetwork
from trtllm_av.plugins import onnx_functions
from trtllm_av.runtime.errors import MissingDependencyError
from trtllm_av.runtime.models.config import LlamaConfig

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
VERIFY, DRAFT_STEP, TRIM = "verify.onnx", "draft_step.onnx", "trim.onnx"
#: Any sizes do for tracing, as long as no two are equal and none is 0 or 1.
_TRACED_SIZES = {"T": 11, "B": 3, "B_plus_1": 4, "M": 5, "N": 7}


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


def export_target(network: TargetNetwork, dtype: torch.dtype, max_len: int, path: Path) -> None:
    """Write the verify pass; ``max_len`` positions per slot of the cache."""
    caches = cache_inputs(network.config, dtype, max_len)
    inputs = [Input("input_ids", torch.int64, ("T",)), *PACKING_INPUTS]
    outputs = ["logits", "hidden", *(_updated_name(cache.name) for cache in caches)]
    functions = [onnx_functions.kv_cache_update_function(), onnx_functions.attention_function()]
    _export(network, inputs, caches, outputs, functions, path)


def export_draft_step(
    network: DraftStepNetwork, dtype: torch.dtype, max_len: int, num_positions: int, path: Path
) -> None:
    """Write one step of the drafter with ``ScoreDrafts`` for ``num_positions`` = K."""
    head = network.head.config
    caches = cache_inputs(head.as_layer(), dtype, max_len)
    inputs = [
        Input("input_ids", torch.int64, ("T",)),
        Input("hidden", dtype, ("T", head.hidden_size)),
        *PACKING_INPUTS,
        Input("temperature", torch.float32, ("N",)),
        Input("coefficients", torch.float32, (1 + num_positions,)),
        Input("position", torch.int32, (1,)),
        Input("draft_lens", torch.int32, ("N",)),
    ]
    names = ["draft_logits", "state", "features", "confidence"]
    outputs = [*names, *(_updated_name(cache.name) for cache in caches)]
    functions = [
        onnx_functions.kv_cache_update_function(),
        onnx_functions.attention_function(),
        onnx_functions.score_drafts_function(),
    ]
    _export(network, inputs, caches, outputs, functions, path)


def export_trim(num_positions: int, path: Path) -> None:
    """Write ``TrimDrafts`` for ``num_positions`` = K as a network of its own."""
    onnx = import_onnx()
    helper, kinds = onnx.helper, onnx.TensorProto
    per_request = ["draft_lens", "base_lens", "min_verify_lens"]
    inputs = [
        helper.make_tensor_value_info("confidence", kinds.FLOAT, ["R", num_positions]),
        *(helper.make_tensor_value_info(name, kinds.INT32, ["R"]) for name in per_request),
        helper.make_tensor_value_info("draft_budget", kinds.INT32, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("survival", kinds.FLOAT, ["R", num_positions]),
        helper.make_tensor_value_info("verify_lens", kinds.INT32, ["R"]),
        helper.make_tensor_value_info("cu_seqlens", kinds.INT32, ["R_plus_1"]),
    ]
    node = helper.make_node(
        "TrimDrafts",
        [value.name for value in inputs],
        [value.name for value in outputs],
        domain=onnx_functions.DOMAIN,
    )
    model = helper.make_model(
        helper.make_graph([node], "trim", inputs, outputs),
        opset_imports=[helper.make_opsetid("", onnx_functions.OPSET)],
        ir_version=10,  # the oldest with all that opset 23 needs
    )
    _finish(model, [onnx_functions.trim_drafts_function(num_positions)], path)


def cache_inputs(config: LlamaConfig, dtype: torch.dtype, max_len: int) -> list[Input]:
    """Keys and values of each layer in turn, [B, kv_heads, max_len, head_dim]."""
    shape = ("B", config.num_kv_heads, max_len, config.head_dim)
    return [
        Input(f"{kind}_cache_{layer}", dtype, shape)
        for layer in range(config.num_layers)
        for kind in "kv"
    ]


def _updated_name(cache: str) -> str:
    return cache.replace("_cache_", "_out_")


def _export(
    network: nn.Module,
    inputs: Sequence[Input],
    caches: Sequence[Input],
    outputs: list[str],
    functions: Sequence[FunctionProto],
    path: Path,
) -> None:
    onnx = import_onnx()
    sizes = {name: torch.export.Dim(name) for name in _TRACED_SIZES}

    def example(value: Input) -> torch.Tensor:
        shape = [_TRACED_SIZES[size] if isinstance(size, str) else size for size in value.shape]
        return torch.zeros(shape, dtype=value.dtype)

    def dynamic(value: Input) -> dict[int, Any]:
        return {axis: sizes[size] for axis, size in enumerate(value.shape) if isinstance(size, str)}

    with _quiet_exporter():
        program = torch.onnx.export(
            network.eval(),
            (*map(example, inputs), [example(cache) for cache in caches]),
            dynamo=True,
            opset_version=onnx_functions.OPSET,
            input_names=[value.name for value in (*inputs, *caches)],
            output_names=outputs,
            dynamic_shapes=(*map(dynamic, inputs), [dynamic(cache) for cache in caches]),
            verbose=False,
        )
        assert program is not None  # only without dynamo=True
        program.save(os.fspath(path), external_data=True)
    _finish(onnx.load(os.fspath(path), load_external_data=False), functions, path)


def _finish(model: ModelProto, functions: Sequence[FunctionProto], path: Path) -> None:
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
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting needs the package {error.name}; install it with: "
            "pip install 'trtllm-adaptive-verification[onnx]'"
        ) from None
    return onnx
