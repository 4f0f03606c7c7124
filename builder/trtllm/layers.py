"""The layers that adaptive verification adds to an EAGLE network, on TensorRT-LLM's functional layer.

Invariants: the order of a plugin's inputs and outputs is the one its specification names; a padded column
of the logits never counts; no layer here reads or writes host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_av.builder.trtllm.modules import TrtllmModules
from trtllm_av.plugins.plugin_spec import NAMESPACE, PLUGINS, VERSION
from trtllm_av.runtime.errors import BuildError


class AvLayers:
    """Adds layers to the network that is being built.

    Tensors are TensorRT-LLM's. R requests, K drafts (nodes of a tree), L levels, Vp padded vocabulary.
    """

    def __init__(self, modules: TrtllmModules) -> None:
        self._modules = modules

    def mask_paths(self, paths: Any, draft_lens: Any) -> Any:
        """``paths`` [R,K+1,L+1] int32 with −1 for nodes that were trimmed, i.e. above ``draft_lens`` [R].

        Index 0 is the root and node k is draft k−1. Acceptance walks a path up to −1 and would go on into
        drafts that were never verified, where it reads memory that no one wrote.
        """
        ops = self._modules.functional
        lens = ops.unsqueeze(ops.unsqueeze(draft_lens, 1), 2)
        return ops.where(ops.lt(paths, ops.add(lens, 1)), paths, -1)

    def score_level(
        self,
        logits: Any,
        num_rows: Any,
        paths: Any,
        draft_lens: Any,
        *,
        level: int,
        vocab_size: int,
        max_non_leaves: int,
    ) -> tuple[Any, Any]:
        """Features [R,K] f32 of the drafts of one level, and ``draft_lens`` bit for bit.

        ``logits`` [rows,Vp] of level ``level``, ``num_rows`` [] int32 of them valid. Whoever takes the
        lengths returned here runs after the logits were scored.
        """
        features, passed_lens = self._add_plugin(
            "ScoreLevel",
            [logits, num_rows, paths, draft_lens],
            {"level": level, "vocab_size": vocab_size, "max_non_leaves": max_non_leaves},
        )
        return features, passed_lens

    def trim_tree(
        self,
        features: Any,
        draft_lens: Any,
        paths: Any,
        previous_lens: Any,
        num_accepted: Any,
        accepted_paths: Any,
        *,
        min_draft_len: int,
    ) -> tuple[Any, Any]:
        """Lengths [R] int32 of what the next step verifies, and ``av_trace`` [R,8+K] f32.

        ``features`` [R,K] and ``draft_lens`` [R] of the new drafts; ``previous_lens``, ``num_accepted``
        and ``accepted_paths`` [R] of the step that runs, for the trace.
        """
        trimmed_lens, trace = self._add_plugin(
            "TrimTree",
            [features, draft_lens, paths, previous_lens, num_accepted, accepted_paths],
            {"min_draft_len": min_draft_len},
        )
        return trimmed_lens, trace

    def _add_plugin(self, name: str, inputs: list[Any], fields: dict[str, int]) -> list[Any]:
        trt, functional = self._modules.tensorrt, self._modules.functional
        creator = trt.get_plugin_registry().get_creator(name, VERSION, NAMESPACE)
        if creator is None:
            raise BuildError(
                f"TensorRT plugin {name} is not registered; load the plugin library first (set "
                "TRTLLM_AV_PLUGIN, or run trtllm-av-doctor --build-plugin INCLUDE_FOLDER)"
            )
        collection = trt.PluginFieldCollection(
            [
                trt.PluginField(field, np.array([value], np.int32), trt.PluginFieldType.INT32)
                for field, value in fields.items()
            ]
        )
        plugin = creator.create_plugin(name, collection, trt.TensorRTPhase.BUILD)
        if plugin is None:  # the C++ form logs the reason
            raise BuildError(
                f"TensorRT plugin {name} refuses {fields}; the reason is in the log above, "
                "--adaptive_verification_plugin disable builds without it"
            )
        network = self._modules.common.default_trtnet()
        layer = network.add_plugin_v3([tensor.trt_tensor for tensor in inputs], [], plugin)
        return [
            functional._create_tensor(layer.get_output(index), layer)
            for index in range(len(PLUGINS[name].outputs))
        ]
