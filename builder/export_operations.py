"""``ScoreDrafts`` and ``TrimDrafts`` as networks of one node each.

The runtime draws between them, so that each is a plan of its own. Invariants: the number of requests R is
dynamic, everything else fixed; the node's local function is in the same file. TensorRT takes a registered
plugin before the function where a node names the plugin's namespace, which the others ignore.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtllm_av.builder.export import finish, import_onnx
from trtllm_av.plugins import onnx_functions
from trtllm_av.plugins.plugin_spec import NAMESPACE, VERSION
from trtllm_av.runtime.adaptive_options import FEATURE_BOUND, TEMPERATURE_FLOOR

if TYPE_CHECKING:
    from onnx import FunctionProto, ValueInfoProto


def export_score(vocab_size: int, num_positions: int, dtype: torch.dtype, path: Path) -> None:
    """Write ``ScoreDrafts`` of logits [R, 1, ``vocab_size``] in ``dtype``, for ``num_positions`` = K."""
    onnx = import_onnx()
    kinds = onnx.TensorProto
    logits = {
        torch.float32: kinds.FLOAT,
        torch.float16: kinds.FLOAT16,
        torch.bfloat16: kinds.BFLOAT16,
    }[dtype]
    value = onnx.helper.make_tensor_value_info
    inputs = [
        value("draft_logits", logits, ["R", 1, vocab_size]),
        value("temperature", kinds.FLOAT, ["R"]),
        value("coefficients", kinds.FLOAT, [1 + num_positions]),
        value("position", kinds.INT32, [1]),
        value("draft_lens", kinds.INT32, ["R"]),
    ]
    outputs = [
        value("features", kinds.FLOAT, ["R", 1, 1]),
        value("confidence", kinds.FLOAT, ["R", 1]),
    ]
    _export_node(
        onnx_functions.score_drafts_function(),
        inputs,
        outputs,
        path,
        vocab_size=vocab_size,
        feature_bound=FEATURE_BOUND,
        temperature_floor=TEMPERATURE_FLOOR,
    )


def export_trim(num_positions: int, path: Path) -> None:
    """Write ``TrimDrafts`` for ``num_positions`` = K."""
    onnx = import_onnx()
    value, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    inputs = [
        value("confidence", kinds.FLOAT, ["R", num_positions]),
        value("draft_lens", kinds.INT32, ["R"]),
        value("base_lens", kinds.INT32, ["R"]),
        value("min_verify_lens", kinds.INT32, ["R"]),
        value("draft_budget", kinds.INT32, [1]),
    ]
    outputs = [
        value("survival", kinds.FLOAT, ["R", num_positions]),
        value("verify_lens", kinds.INT32, ["R"]),
        value("cu_seqlens", kinds.INT32, ["R_plus_1"]),
        value("pack_index", kinds.INT32, ["capacity"]),
    ]
    _export_node(onnx_functions.trim_drafts_function(num_positions), inputs, outputs, path)


def _export_node(
    function: FunctionProto,
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
    path: Path,
    **attributes: Any,
) -> None:
    helper = import_onnx().helper
    node = helper.make_node(
        function.name,
        [value.name for value in inputs],
        [value.name for value in outputs],
        domain=function.domain,
        plugin_namespace=NAMESPACE,
        plugin_version=VERSION,
        **attributes,
    )
    model = helper.make_model(
        helper.make_graph([node], path.stem, inputs, outputs),
        opset_imports=[helper.make_opsetid("", onnx_functions.OPSET)],
        ir_version=10,  # the oldest with all that opset 23 needs
    )
    finish(model, [function], path)
