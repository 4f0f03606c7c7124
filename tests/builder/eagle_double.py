"""A double of TensorRT-LLM's EAGLE model and plugins, on toy language models.

What upstream plugins do is written from their description: acceptance walks a path up to −1 and reads
memory that nobody wrote for nodes that were not verified; decoding overwrites logits.

Invariants: everything is greedy and deterministic; only static templates (EAGLE-1, chains and trees).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.builder.eagle_graph import Compute, Graph, Tensor, functional_module, tensorrt_module
from tests.builder.toy_models import (
    CHAIN,
    GARBAGE,
    PADDED_VOCAB,
    VOCAB,
    draft_logits,
    template,
)
from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.builder.trtllm.modules import TrtllmModules
from trtllm_av.plugins import tree_reference
from trtllm_av.plugins.control_block import PROGRESS, ControlBlock


@dataclass
class Control:
    """What the control block says; ``budget`` None is verify-all. Counts rounds as the plugin does.

    With a ``block`` that is read, and told how far the plugin is, as the plugin does it.
    """

    budget: int | None = None
    coefficients: Sequence[float] = ()
    total_multiple: int = 1
    round: int = 0
    version: int = 1
    block: ControlBlock | None = None

    def begin_round(self) -> None:
        if self.block is None:
            self.round += 1
            return
        self.round = self.block.progress().round + 1  # the block counts, over all engines
        settings = self.block.read(self.round)
        self.budget = None if settings is None else settings.budget
        self.version = -1 if settings is None else settings.version
        self.coefficients = () if settings is None else settings.coefficients
        self.block._words[PROGRESS] = self.round | (self.version & 0xFFFFFFFF) << 32


@dataclass
class EagleDouble:
    """Modules, a model instance and the graph that it adds to; ``prepared``: what each level was prepared with."""

    choices: Sequence[Sequence[int]] = field(default_factory=lambda: CHAIN)
    control: Control = field(default_factory=Control)
    prepared: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = template(self.choices)
        self.num_nodes, self.num_levels = self.paths.shape[0] - 1, self.paths.shape[1] - 1
        self.graph = Graph({"ScoreLevel": _score_level, "TrimTree": self._trim_tree})
        common = ModuleType("tensorrt_llm._common")
        common.__dict__.update(default_net=lambda: self.graph, default_trtnet=lambda: self.graph)
        self.modules = TrtllmModules(
            tensorrt=tensorrt_module(),
            common=common,
            functional=functional_module(self.graph),
            eagle=eagle_module(self.graph, self.prepared),
        )

    def build(self, model_cls: type[Any], **config: Any) -> Any:
        """Run the helper of a ``model`` of ``model_cls`` once; the graph then holds the network."""
        model = self.model = model_cls.__new__(model_cls)
        model.num_eagle_layers = self.num_levels
        model.max_non_leaves_per_layer = 4
        model.config = SimpleNamespace(eagle_net_config=SimpleNamespace(vocab_size=VOCAB), **config)
        model.eagle_nets = [_EagleNet(self.graph, level) for level in range(self.num_levels)]
        inputs: dict[str, Any] = {
            name: self.graph.input(name) for name in assumptions().helper_inputs
        }
        inputs["tree_params"] = self.modules.eagle.TreeParams(self.graph.input("draft_paths"))
        inputs["attention_params"] = SimpleNamespace(
            sequence_length=self.graph.input("sequence_length"),
            context_lengths=self.graph.input("context_lengths"),
            host_request_types=None,
            host_context_lengths=None,
        )
        inputs["kv_cache_params"] = SimpleNamespace(host_past_key_value_lengths=None)
        inputs["spec_decoding_params"] = SimpleNamespace(
            spec_decoding_generation_lengths=self.graph.input("spec_decoding_generation_lengths"),
            spec_decoding_use=self.graph.input("spec_decoding_use"),
        )
        hidden = self.graph.input("hidden_states")
        return model._eagle_fwd_helper(self.graph.input("lm_logits"), hidden, **inputs)

    def _trim_tree(self, fields: dict[str, int]) -> Compute:
        def compute(
            features: Any, lens: Any, paths: Any, previous: Any, accepted: Any, accepted_paths: Any
        ) -> list[Any]:
            control = self.control
            control.begin_round()
            trimmed = lens
            if control.budget is not None:
                coefficients = control.coefficients[: self.num_levels + 1]
                confidence = tree_reference.node_confidence(features, paths, coefficients)
                trimmed = tree_reference.trim_tree(
                    confidence,
                    lens,
                    paths,
                    budget=control.budget,
                    floor=fields["min_draft_len"],
                    total_multiple=control.total_multiple,
                )
            version = -1 if control.budget is None else control.version
            head = [16726, control.round, version]
            trace = np.concatenate(
                [
                    np.tile(np.float32(head), (len(lens), 1)),
                    np.stack([previous, accepted, accepted_paths, lens, trimmed], 1),
                    features,
                ],
                1,
                dtype=np.float32,
            )
            return [trimmed, trace]

        return compute


def _score_level(fields: dict[str, int]) -> Compute:
    def compute(logits: Any, num_rows: Any, paths: Any, lens: Any) -> list[Any]:
        features = tree_reference.score_level(
            logits, int(num_rows), paths, level=fields["level"], vocab_size=fields["vocab_size"]
        )
        return [features, lens.copy()]

    return compute


def _non_leaves(paths: Any, level: int) -> list[tuple[int, list[int]]]:
    """(node, its children) of the nodes of ``level`` that have children, both ascending."""
    parent, depth = tree_reference.decode_tree(paths)
    children: dict[int, list[int]] = {}
    for node in np.flatnonzero(depth == level + 1):
        children.setdefault(int(parent[node]), []).append(int(node))
    return sorted(children.items())


def _accept(lm_logits: Any, draft_tokens: Any, draft_lens: Any, *others: Any) -> list[Any]:
    paths = others[4]
    num_requests, num_nodes, length = paths.shape
    targets = np.full((num_requests, num_nodes), GARBAGE, np.int32)
    first = 0
    for request, draft_len in enumerate(draft_lens):
        rows = lm_logits[first : first + draft_len + 1]
        targets[request, : draft_len + 1] = rows.argmax(1)
        first += draft_len + 1
    tokens = np.full((num_requests, length), -1, np.int32)
    lens, best = np.zeros((2, num_requests), np.int32)
    for request in range(num_requests):
        for row, path in enumerate(paths[request]):
            if path[0] != 0:
                continue
            walked = [targets[request, 0]]
            for node in path[1:]:
                if node < 0 or draft_tokens[request, node - 1] != walked[-1]:
                    break
                walked.append(targets[request, node])
            if len(walked) > lens[request]:
                lens[request], best[request] = len(walked), row
                tokens[request, : len(walked)] = walked
    room = np.full((num_requests, num_nodes - 1), -7, np.int32)
    starts = np.zeros(num_requests * length + 1, np.int32)
    return [tokens, lens, best, room, np.full(num_requests, -9, np.int32), paths.copy(), starts]


def _prepare(level: int) -> Compute:
    def compute(*inputs: Any) -> list[Any]:
        names = assumptions().upstream_plugins["EaglePrepareDrafterInputs"].inputs
        given = dict(zip(names, inputs, strict=True))
        prefixes = []
        for request, history in enumerate(given["input_ids"]):
            accepted_len = given["accepted_lens"][request]
            accepted = given["accepted_token_ids"][request][:accepted_len]
            # Where the hidden states of accepted tokens lie, read along the accepted path.
            best = given["prev_draft_paths"][request, given["accepted_path_ids"][request]]
            assert (best[:accepted_len] >= 0).all()
            paths = given["next_draft_paths"][request]
            start = [*history, *(int(token) for token in accepted)]
            for node, _ in _non_leaves(paths, level):
                path = next((p for p in paths if p[level] == node), paths[0])
                drafts = [
                    int(given["next_draft_tokens"][request, n - 1]) for n in path[1 : level + 1]
                ]
                prefixes.append(start + drafts)
        zeros = np.zeros(1, np.int32)
        return [*[zeros] * 5, prefixes, *[zeros] * 3, np.int32(len(prefixes)), zeros]

    return compute


class _EagleNet:
    def __init__(self, graph: Graph, level: int) -> None:
        self._graph, self._level = graph, level

    def __call__(self, **inputs: Any) -> list[Tensor]:
        def compute(prefixes: Any) -> list[Any]:
            rows = [draft_logits(prefix) for prefix in prefixes]
            # Rows beyond the valid ones hold anything.
            logits = np.stack([*rows, np.full(PADDED_VOCAB, 99.0, np.float32)])
            return [logits, np.zeros((len(rows), 1)), None]

        names = ["logits", "hidden_states", "cache"]
        return self._graph.add("EagleNet", [inputs["input_ids"]], names, compute, level=self._level)


def _decode(level: int) -> Compute:
    def compute(logits: Any, paths: Any, num_rows: Any, *others: Any) -> list[Any]:
        tokens, lens = others[2].copy(), others[3].copy()
        row = 0
        for request, tree in enumerate(paths):
            count = 0 if level == 0 else lens[request]
            for _, children in _non_leaves(tree, level):
                assert row < num_rows
                best = np.argsort(-logits[row], kind="stable")
                tokens[request, np.array(children) - 1] = best[: len(children)]
                count += len(children)
                row += 1
            lens[request] = count
        # Softmax in place: whoever reads the logits later gets probabilities.
        weights = np.exp(logits - logits.max(1, keepdims=True))
        logits[:] = weights / weights.sum(1, keepdims=True)
        return [tokens, lens, paths.copy(), *others[4:]]

    return compute


def eagle_module(graph: Graph, prepared: list[dict[str, Any]]) -> ModuleType:
    """``tensorrt_llm.models.eagle.model``: functions and class with the assumed signatures."""
    module = ModuleType("tensorrt_llm.models.eagle.model")
    plugins = assumptions().upstream_plugins

    def add_plugin(
        name: str, given: dict[str, Any], compute: Compute, **fields: int
    ) -> list[Tensor]:
        spec = plugins[name]
        inputs = [given[input_name] for input_name in spec.inputs]
        return graph.add(name, inputs, [t.name for t in spec.outputs], compute, **fields)

    class TreeParams:
        def __init__(self, paths: Any = None) -> None:
            self.paths = paths

    def eagle_sample_and_accept_draft_plugin(
        lm_logits: Any = None, draft_tokens: Any = None, draft_lens: Any = None,
        eagle_temperature: Any = None, rand_data_validation: Any = None,
        posterior_alpha: Any = None, posterior_threshold: Any = None, tree_params: Any = None,
        greedy_sampling: Any = None, use_dynamic_tree: Any = None,
    ) -> list[Tensor]:  # fmt: skip
        given = dict(locals())
        given["paths"] = tree_params.paths
        return add_plugin("EagleSampleAndAcceptDraftTokens", given, _accept)

    def eagle_draft_decoder_plugin(
        layer_idx: Any, num_eagle_layers: Any, top_k_sampling: Any, logits: Any,
        num_last_token_indices: Any, input_paths: Any, use_dynamic_tree: Any,
        dynamic_tree_max_topK: Any, input_draft_token_ids: Any, input_draft_lens: Any,
        input_prev_scores: Any, input_current_expand_indices: Any, input_all_layers_scores: Any,
        input_all_layers_draft_token_ids: Any, input_all_layers_draft_token_ids_predecessor: Any,
    ) -> list[Tensor]:  # fmt: skip
        assert top_k_sampling is True
        given = dict(locals())
        return add_plugin("EagleDecodeDraftTokens", given, _decode(layer_idx), layer_idx=layer_idx)

    class EagleForCausalLM:
        def _eagle_fwd_helper(
            self, lm_logits: Any, hidden_states: Any, *args: Any, **kwargs: Any
        ) -> Any:
            return graph.add("stock", [lm_logits], ["tokens"], lambda x: [x])[0]

        def _prepare_drafter_inputs(
            self, layer_idx: Any, input_ids: Any, chunked_context_next_tokens: Any,
            accepted_token_ids: Any, accepted_lens: Any, accepted_path_ids: Any,
            next_draft_tokens: Any, next_draft_lens: Any, next_draft_paths: Any,
            prev_draft_lens: Any, prev_draft_paths: Any, input_attention_params: Any,
            input_kv_cache_params: Any, hidden_states: Any, host_ctx_eagle_net_request_types: Any,
            host_ctx_eagle_net_context_lengths: Any, host_ctx_eagle_net_past_key_value_lengths: Any,
            host_gen_eagle_net_request_types: Any, host_gen_eagle_net_context_lengths: Any,
            host_gen_eagle_net_past_key_value_lengths: Any, hidden_size_batch_level_starts: Any,
            input_gen_tokens: Any, input_spec_decoding_generation_lengths: Any,
            spec_decoding_use: Any,
        ) -> Any:  # fmt: skip
            given = dict(locals())
            prepared.append(given.copy())
            given["sequence_length"] = input_attention_params.sequence_length
            given["context_lengths"] = input_attention_params.context_lengths
            out = add_plugin(
                "EaglePrepareDrafterInputs", given, _prepare(layer_idx), layer_idx=layer_idx
            )
            # Shared objects are written to, as upstream does.
            input_attention_params.sequence_length = out[0]
            input_attention_params.context_lengths = out[1]
            phase = "ctx" if layer_idx == 0 else "gen"
            input_attention_params.host_request_types = given[
                f"host_{phase}_eagle_net_request_types"
            ]
            net_inputs = {
                "input_ids": out[5],
                "attention_params": input_attention_params,
                "kv_cache_params": SimpleNamespace(**vars(input_kv_cache_params)),
            }
            prepared[-1]["net_inputs"] = net_inputs
            return net_inputs, out[10], out[9]

    for value in (
        TreeParams,
        eagle_sample_and_accept_draft_plugin,
        eagle_draft_decoder_plugin,
        EagleForCausalLM,
    ):
        setattr(module, value.__name__, value)
    return module
