"""The network for TensorRT-LLM's EAGLE as a graph, and as a machine that decodes on toy models.

The rules are those of the seam ``next_draft_lens``: (a) no zero drafts, (b) masked paths for acceptance,
(c) original paths for drafting, (d) prefixes only, (e) score before decode, (f) the tail of the tokens
passes through, (g) the posterior threshold reaches acceptance alone, (h) limits, (i) all levels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.builder.eagle_double import EagleDouble
from tests.builder.eagle_graph import Layer, Tensor
from tests.builder.eagle_runtime import RuntimeDouble
from tests.builder.toy_models import CHAIN, TREE, VOCAB, draft_logits, greedy
from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.builder.trtllm.build import check_limits
from trtllm_av.builder.trtllm.eagle import make_adaptive_eagle
from trtllm_av.builder.trtllm.settings import AvSettings
from trtllm_av.plugins.plugin_spec import PLUGINS, VERSION
from trtllm_av.plugins.tree_reference import decode_tree
from trtllm_av.runtime.errors import BuildError, UsageError

PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7]]
ACCEPT, PREPARE, DECODE = (
    "EagleSampleAndAcceptDraftTokens",
    "EaglePrepareDrafterInputs",
    "EagleDecodeDraftTokens",
)


def build(choices: Sequence[Sequence[int]] = CHAIN, **config: Any) -> EagleDouble:
    double = EagleDouble(choices)
    double.build(make_adaptive_eagle(double.modules), **config)
    return double


@pytest.fixture(params=[CHAIN, TREE], ids=["chain", "tree"])
def double(request: pytest.FixtureRequest) -> EagleDouble:
    return build(request.param)


def inputs_of(layer: Layer) -> dict[str, Tensor]:
    """The tensors of a plugin layer by the names that its description gives them."""
    if layer.kind in PLUGINS:
        names = [tensor.name for tensor in PLUGINS[layer.kind].inputs]
    else:
        names = list(assumptions().upstream_plugins[layer.kind].inputs)
    return dict(zip(names, layer.inputs, strict=True))


def sources(tensor: Tensor) -> set[str]:
    """Names of the network inputs and outputs of plugins and nets that ``tensor`` is made of, by plain layers."""
    if tensor.producer is None or tensor.producer.kind[0].isupper():
        return {tensor.name}
    return set().union(*(sources(before) for before in tensor.producer.inputs))


def test_one_layer_of_each_plugin_per_level(double: EagleDouble) -> None:
    """(i) Guards against a level that is not run, scored or decoded, or that is trimmed more than once."""
    levels = list(range(double.num_levels))
    for kind, field in (
        (PREPARE, "layer_idx"),
        ("EagleNet", "level"),
        ("ScoreLevel", "level"),
        (DECODE, "layer_idx"),
    ):
        assert [layer.fields[field] for layer in double.graph.of(kind)] == levels, kind
    assert len(double.graph.of(ACCEPT)) == len(double.graph.of("TrimTree")) == 1


def test_acceptance_sees_masked_paths(double: EagleDouble) -> None:
    """(b) Guards against acceptance that walks into drafts which were never verified."""
    (accept,) = double.graph.of(ACCEPT)
    paths = inputs_of(accept)["paths"]
    assert sources(paths) == {"draft_paths", "draft_lens"}
    for prepare in double.graph.of(PREPARE):
        assert inputs_of(prepare)["prev_draft_paths"] is paths
        assert inputs_of(prepare)["prev_draft_lens"].name == "draft_lens"


def test_masked_paths_end_before_the_first_trimmed_node(double: EagleDouble) -> None:
    """(b) Guards against a mask that is one off: the last verified draft lost, or one too many kept."""
    (accept,) = double.graph.of(ACCEPT)
    mask = inputs_of(accept)["paths"]
    values: dict[Tensor, Any] = {}

    def value(tensor: Tensor) -> Any:
        if tensor.producer is None:
            return feeds[tensor.name]
        if tensor not in values:
            taken = [value(before) for before in tensor.producer.inputs]
            values.update(
                zip(tensor.producer.outputs, tensor.producer.compute(*taken), strict=True)
            )
        return values[tensor]

    lens = np.arange(double.num_nodes + 1, dtype=np.int32)
    feeds = {"draft_lens": lens, "draft_paths": np.tile(double.paths, (lens.size, 1, 1))}
    masked = value(mask)
    for row, length in enumerate(lens):
        expected = np.where(double.paths <= length, double.paths, -1)
        np.testing.assert_array_equal(masked[row], expected)
        assert (masked[row, 0, 0]) == 0  # the root stays, also for a context request


def test_drafting_sees_the_original_paths(double: EagleDouble) -> None:
    """(c) Guards against a template that shrinks with every trim, until nothing is drafted any more."""
    paths: Tensor | None = None
    for prepare, score, decode in zip(
        *(double.graph.of(kind) for kind in (PREPARE, "ScoreLevel", DECODE)), strict=True
    ):
        used = inputs_of(decode)["input_paths"]
        assert inputs_of(prepare)["next_draft_paths"] is used
        assert inputs_of(score)["paths"] is used
        assert used.name == "draft_paths" if paths is None else used is paths
        paths = decode.outputs[2]
    assert double.graph.outputs["next_draft_paths"] is paths
    (trim,) = double.graph.of("TrimTree")
    assert inputs_of(trim)["paths"] is paths


def test_only_lengths_are_changed(double: EagleDouble) -> None:
    """(d), (f) Guards against drafts that are reordered or cut out: tokens and paths leave as decoded."""
    last = double.graph.of(DECODE)[-1]
    (trim,) = double.graph.of("TrimTree")
    assert double.graph.outputs["next_draft_tokens"] is last.outputs[0]
    assert double.graph.outputs["next_draft_paths"] is last.outputs[2]
    assert double.graph.outputs["next_draft_lens"] is trim.outputs[0]
    assert inputs_of(trim)["next_draft_lens"] is last.outputs[1]


def test_decoding_takes_its_lengths_from_the_scorer(double: EagleDouble) -> None:
    """(e) Guards against scores of logits that decoding has overwritten with probabilities."""
    for net, score, decode in zip(
        *(double.graph.of(kind) for kind in ("EagleNet", "ScoreLevel", DECODE)), strict=True
    ):
        assert inputs_of(score)["logits"] is inputs_of(decode)["logits"] is net.outputs[0]
        assert inputs_of(decode)["input_draft_lens"] is score.outputs[1]
        assert inputs_of(score)["num_rows"] is inputs_of(decode)["num_last_token_indices"]


def test_padded_columns_do_not_count(double: EagleDouble) -> None:
    """Guards against confidences that fall with the padding of the vocabulary."""
    assert {layer.fields["vocab_size"] for layer in double.graph.of("ScoreLevel")} == {VOCAB}


def test_plugins_read_no_posterior_threshold(double: EagleDouble) -> None:
    """(g) Guards against a request's sampling setting that changes how its drafts are trimmed."""
    (accept,) = double.graph.of(ACCEPT)
    for name in ("posterior_threshold", "posterior_alpha", "greedy_sampling"):
        assert inputs_of(accept)[name].name == name
        readers = [layer.kind for layer in double.graph.layers if name in map(_name, layer.inputs)]
        assert readers == [ACCEPT]


def _name(tensor: Tensor) -> str:
    return tensor.name


def test_trim_reads_every_level_and_this_step(double: EagleDouble) -> None:
    """Guards against features of one level only, and a trace that mixes steps."""
    (trim,) = double.graph.of("TrimTree")
    given = inputs_of(trim)
    scores = {layer.outputs[0] for layer in double.graph.of("ScoreLevel")}

    def summed(tensor: Tensor) -> set[Tensor]:
        if tensor in scores:
            return {tensor}
        assert tensor.producer is not None and tensor.producer.kind == "add"
        return set().union(*(summed(before) for before in tensor.producer.inputs))

    assert summed(given["features"]) == scores
    assert given["draft_lens"].name == "draft_lens"
    (accept,) = double.graph.of(ACCEPT)
    assert given["num_accepted_tokens"] is accept.outputs[1]
    assert given["accepted_paths"] is accept.outputs[2]


def test_a_level_is_prepared_with_the_steps_inputs(double: EagleDouble) -> None:
    """Guards against two of the many inputs of a level swapped, or one that another level was given."""
    same = {name: name for name in assumptions().helper_inputs}
    same["input_spec_decoding_generation_lengths"] = "spec_decoding_generation_lengths"
    same |= {name: name for name in ("spec_decoding_use", "hidden_states")}
    same |= {"prev_draft_lens": "draft_lens"}
    (accept,) = double.graph.of(ACCEPT)
    nets = double.graph.of("EagleNet")
    for level, given in enumerate(double.prepared):
        names = {name: value.name for name, value in given.items() if isinstance(value, Tensor)}
        expected = {name: source for name, source in same.items() if name in names}
        if level > 0:
            before, states = double.prepared[level - 1], given["hidden_states"]
            for name in ("kv_cache_params", "attention_params"):
                assert given[f"input_{name}"] is before["net_inputs"][name]
            # The states of all levels so far, in their order.
            made = states.producer.inputs if level > 1 else [states]
            assert made[:-1] == ([before["hidden_states"]] if level > 1 else [])
            assert made[-1] is nets[level - 1].outputs[1]
            expected["hidden_states"] = states.name
        assert {name: names[name] for name in expected} == expected
        for name, index in (("token_ids", 0), ("lens", 1), ("path_ids", 2)):
            assert given[f"accepted_{name}"] is accept.outputs[index]
    assert len(double.prepared) == double.num_levels


def test_search_state_of_dynamic_trees_passes_from_level_to_level(double: EagleDouble) -> None:
    """Guards against the five state tensors swapped or stuck at the engine's inputs."""
    names = assumptions().upstream_plugins[DECODE].inputs[7:]
    before: list[Tensor] | None = None
    for decode in double.graph.of(DECODE):
        state = [inputs_of(decode)[name] for name in names]
        if before is None:
            assert [f"input_{tensor.name}" for tensor in state] == list(names)
        else:
            assert state == before
        before = decode.outputs[3:]


def test_later_levels_start_from_the_first_ones_length(double: EagleDouble) -> None:
    """Guards against lengths that grow by every level's drafts, which shifts positions and the cache."""
    first, *later = double.graph.of(PREPARE)
    assert inputs_of(first)["sequence_length"].name == "sequence_length"
    for prepare in later:
        assert inputs_of(prepare)["sequence_length"] is first.outputs[0]
        assert inputs_of(prepare)["context_lengths"] is first.outputs[0]
        assert inputs_of(prepare)["hidden_size_batch_level_starts"].index == 10


@pytest.mark.parametrize("trace", [True, False])
def test_outputs_are_the_stock_ones_and_the_trace(trace: bool) -> None:
    """Guards against an output that the runtime waits for, and a trace that nobody asked for."""
    double = build(adaptive_verification={"trace": trace})
    expected = [*assumptions().engine_outputs, *(["av_trace"] if trace else [])]
    assert list(double.graph.outputs) == expected


def test_disabled_plugin_builds_the_stock_network() -> None:
    """Guards against a network that is ours although the plugin is off."""
    double = build(adaptive_verification={"plugin": False})
    assert [layer.kind for layer in double.graph.layers] == ["stock"]
    assert not hasattr(double.model.config, "adaptive_verification_version")


def test_settings_reach_the_engines_configuration() -> None:
    """Guards against an engine of the stock trtllm-build that does not say what it is."""
    config = build().model.config
    assert config.adaptive_verification == AvSettings().to_dict()
    assert config.adaptive_verification_version == VERSION
    given = {"min_draft_len": 2, "trace": False}
    model = build(adaptive_verification=given).model
    assert model.config.adaptive_verification == {"plugin": True, **given}


def run(double: EagleDouble, length: int) -> RuntimeDouble:
    runtime = RuntimeDouble(double, PROMPTS)
    assert runtime.outputs(length) == [greedy(prompt, length) for prompt in PROMPTS]
    return runtime


def set_budget(double: EagleDouble, budget: int) -> None:
    double.control.budget = budget
    double.control.coefficients = [0.5] + [-0.2] * double.num_levels


def test_tokens_are_those_of_plain_decoding_at_every_budget(double: EagleDouble) -> None:
    """Guards against a trim that changes what is generated."""
    most = double.num_nodes * len(PROMPTS)
    verified = []
    for budget in (None, most, most // 2, len(PROMPTS), 0):
        double.control.budget = None
        if budget is not None:
            set_budget(double, budget)
        runtime = run(double, 24)
        verified.append(sum(sum(record.draft_lens) for record in runtime.records[1:]))
        lens = [length for record in runtime.records for length in record.next_draft_lens]
        assert min(lens) >= 1, "(a) a request with zero drafts would be taken for a new one"
    assert verified[0] == verified[1] > verified[2] > verified[3]
    # Drafts that are right make up for it: fewer drafts take more steps.
    assert len(runtime.records) > 1


def test_budget_may_change_every_step(double: EagleDouble) -> None:
    """Guards against state of one step's trim that leaks into the next, as by a template that shrank."""
    prompts = PROMPTS[:2]
    runtime = RuntimeDouble(double, prompts)
    full = double.num_nodes * len(prompts)
    for step in range(100):
        set_budget(double, (step * 7) % (full + 1))
        runtime.step()
        assert (runtime.paths == double.paths).all(), "(c) the template changed"
    set_budget(double, full)
    runtime.step()
    assert runtime.records[-1].next_draft_lens == [double.num_nodes] * len(prompts)
    for history, prompt in zip(runtime.histories, prompts, strict=True):
        assert history[len(prompt) :] == greedy(prompt, len(history) - len(prompt))


def test_features_are_log_odds_of_the_drafts(double: EagleDouble) -> None:
    """Guards against features of another request's or node's row, of overwritten logits, or of padding."""
    runtime = RuntimeDouble(double, PROMPTS)
    set_budget(double, len(PROMPTS))
    for _ in range(3):
        runtime.step()
        features = runtime.records[-1].trace[:, 8:]
        for request, history in enumerate(runtime.histories):
            parent, _ = decode_tree(double.paths)
            for node in range(1, double.num_nodes + 1):
                path = next(p for p in double.paths if node in p)
                above = path[1 : list(path).index(node)]
                prefix = history + [int(runtime.draft_tokens[request, n - 1]) for n in above]
                logits = draft_logits(prefix)[:VOCAB].astype(np.float64)
                siblings = np.flatnonzero(parent == parent[node]).tolist()
                token = np.argsort(-logits, kind="stable")[siblings.index(node)]
                assert token == runtime.draft_tokens[request, node - 1]
                others = np.log(np.exp(np.delete(logits, token)).sum())
                assert features[request, node - 1] == pytest.approx(
                    logits[token] - others, abs=1e-4
                )


def test_plugins_that_are_not_made_are_one_line() -> None:
    """Guards against an error of TensorRT's that names neither the plugin nor what to do."""
    double = EagleDouble()
    registry = double.modules.tensorrt.get_plugin_registry()
    model_cls = make_adaptive_eagle(double.modules)
    registry.get_creator = lambda *key: None
    with pytest.raises(BuildError, match=r"ScoreLevel is not registered; .*--build-plugin"):
        double.build(model_cls)
    registry.get_creator = lambda *key: SimpleNamespace(create_plugin=lambda *given: None)
    with pytest.raises(BuildError, match=r"ScoreLevel refuses .*'vocab_size': 40"):
        double.build(model_cls)


def test_class_can_be_pickled_by_name() -> None:
    """Guards against builds with several workers, which import the class by module and name."""
    made = make_adaptive_eagle(EagleDouble().modules, "trtllm_av.builder.trtllm.installed")
    assert made.__module__ == "trtllm_av.builder.trtllm.installed"
    assert made.__qualname__ == made.__name__ == "AdaptiveEagleForCausalLM"
    own = set(vars(made)) - {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__"}
    assert own == {"_eagle_fwd_helper"}, "only the helper may be overridden"


def config_of(**changes: Any) -> tuple[Any, Any]:
    model = {
        "architecture": "EagleForCausalLM",
        "max_draft_len": 4,
        "pp_size": 1,
        "num_eagle_layers": 4,
    }
    sizes = {"max_batch_size": 8, "max_draft_len": 0, "max_beam_width": 1}
    model |= {name: value for name, value in changes.items() if name in model}
    sizes |= {name: value for name, value in changes.items() if name not in model or name in sizes}
    mapping = SimpleNamespace(pp_size=model.pop("pp_size"))
    return SimpleNamespace(**model, mapping=mapping), SimpleNamespace(**sizes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_batch_size": 513}, "--max_batch_size 513"),
        ({"max_beam_width": 2}, "--max_beam_width 2"),
        ({"max_draft_len": 257}, "--max_draft_len 257"),
        ({"pp_size": 2}, "pp_size=2"),
        ({"num_eagle_layers": 33}, "num_eagle_layers=33"),
        ({"architecture": "LlamaForCausalLM"}, "LlamaForCausalLM"),
    ],
)
def test_limits_are_refused_before_the_build(changes: dict[str, Any], named: str) -> None:
    """(h) Guards against an assertion of TensorRT-LLM after minutes of building, or none at all."""
    check_limits(*config_of(), AvSettings())
    with pytest.raises(UsageError, match=named):
        check_limits(*config_of(**changes), AvSettings())


def test_floor_of_zero_is_refused() -> None:
    """(a) Guards against settings that let a running request end up without a draft."""
    with pytest.raises(UsageError, match="av_min_draft_len=0"):
        AvSettings(min_draft_len=0)
    with pytest.raises(UsageError, match="--av_min_draft_len 5"):
        check_limits(*config_of(), AvSettings(min_draft_len=5))
    double = build(adaptive_verification={"min_draft_len": 2})
    (trim,) = double.graph.of("TrimTree")
    assert trim.fields["min_draft_len"] == 2
