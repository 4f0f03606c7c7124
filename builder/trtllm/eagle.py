"""EAGLE of TensorRT-LLM 1.0-1.2 with trimmed drafts: one method of its model class, composed anew.

The engine's output ``next_draft_lens`` decides what the next step verifies, so a plugin in front of it is
enough. One step runs the target, accepts, and drafts level by level; every level is scored before its
tokens are decoded, and the lengths are trimmed after the last one.

Invariants:
- acceptance sees paths without the drafts that were trimmed; drafting sees the original ones, since what
  acceptance hands on as ``next_draft_paths`` is the template of all later steps and would shrink for good;
- decoding a level takes its lengths from the scorer, which orders the two: decoding may overwrite logits;
- all levels run, and tokens and paths leave as the stock network makes them: only lengths are changed;
- with the plugin disabled the stock method builds the network.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from trtllm_av.builder.trtllm.layers import AvLayers
from trtllm_av.builder.trtllm.modules import TrtllmModules
from trtllm_av.builder.trtllm.settings import CONFIG_KEY, AvSettings, find_settings
from trtllm_av.plugins.plugin_spec import VERSION
from trtllm_av.runtime.engines.trtllm_engine import VERSION_KEY

TRACE = "av_trace"
CLASS_NAME = "AdaptiveEagleForCausalLM"

# Arguments of the helper that preparing a level takes under the same name.
_PREPARED = (
    "input_ids",
    "chunked_context_next_tokens",
    "host_ctx_eagle_net_request_types",
    "host_ctx_eagle_net_context_lengths",
    "host_ctx_eagle_net_past_key_value_lengths",
    "host_gen_eagle_net_request_types",
    "host_gen_eagle_net_context_lengths",
    "host_gen_eagle_net_past_key_value_lengths",
    "input_gen_tokens",
)
# What decoding a level hands to the next one beside tokens, lengths and paths (for dynamic trees).
_SEARCH = (
    "prev_scores",
    "current_expand_indices",
    "all_layers_scores",
    "all_layers_draft_token_ids",
    "all_layers_draft_token_ids_predecessor",
)


def make_adaptive_eagle(modules: TrtllmModules, module: str = __name__) -> type[Any]:
    """The model class on top of the EagleForCausalLM in ``modules``.

    ``module`` is where it can be imported from: builds with several workers pickle it by that name.
    """
    base = modules.eagle.EagleForCausalLM

    def _eagle_fwd_helper(
        self: Any, lm_logits: Any, hidden_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        settings = find_settings(self.config, modules.common.default_net().plugin_config)
        # Kept in the engine's config.json, wherever the settings came from.
        setattr(self.config, CONFIG_KEY, settings.to_dict())
        if not settings.plugin:
            return base._eagle_fwd_helper(self, lm_logits, hidden_states, *args, **kwargs)
        setattr(self.config, VERSION_KEY, VERSION)
        return _Step(modules, self, settings, kwargs).build(lm_logits, hidden_states)

    # new_class, since the base class has a metaclass of its own.
    made = types.new_class(
        CLASS_NAME,
        (base,),
        exec_body=lambda body: body.update(
            {
                "__module__": module,
                "__qualname__": CLASS_NAME,
                "__doc__": "EAGLE whose drafts are trimmed before they are verified.",
                "_eagle_fwd_helper": _eagle_fwd_helper,
            }
        ),
    )
    return made


@dataclass(slots=True)
class _Drafts:
    """Drafts while levels add to them: ``tokens`` [R,K], ``lens`` [R], ``paths`` [R,K+1,L+1], int32."""

    tokens: Any
    lens: Any
    paths: Any
    search: dict[str, Any]


class _Step:
    """One network under construction: acceptance, the levels of drafting, the trim, the outputs."""

    def __init__(
        self, modules: TrtllmModules, model: Any, settings: AvSettings, inputs: dict[str, Any]
    ) -> None:
        self._eagle = modules.eagle
        self._functional = modules.functional
        self._layers = AvLayers(modules)
        self._model = model
        self._settings = settings
        self._inputs = inputs

    def build(self, lm_logits: Any, hidden_states: Any) -> Any:
        """Add everything behind the target's logits; returns the drafted tokens, as the stock method."""
        inputs = self._inputs
        template = inputs["tree_params"].paths
        verified_paths = self._layers.mask_paths(template, inputs["draft_lens"])
        accepted, tokens, lens, level_starts = self._accept(lm_logits, verified_paths)
        drafts = _Drafts(tokens, lens, template, {name: inputs[name] for name in _SEARCH})
        features = self._draft(drafts, accepted, verified_paths, hidden_states, level_starts)
        accepted_tokens, num_accepted, accepted_paths = accepted
        trimmed_lens, trace = self._layers.trim_tree(
            features,
            drafts.lens,
            drafts.paths,
            inputs["draft_lens"],
            num_accepted,
            accepted_paths,
            min_draft_len=self._settings.min_draft_len,
        )
        outputs = {
            "accepted_tokens": accepted_tokens,
            "num_accepted_tokens": num_accepted,
            "accepted_paths": accepted_paths,
            "next_draft_tokens": drafts.tokens,
            "next_draft_lens": trimmed_lens,
            "next_draft_paths": drafts.paths,
        }
        if self._settings.trace:
            outputs[TRACE] = trace
        for name, tensor in outputs.items():
            tensor.mark_output(name)
        return drafts.tokens

    def _accept(self, lm_logits: Any, paths: Any) -> tuple[tuple[Any, Any, Any], Any, Any, Any]:
        """((accepted tokens, their number, accepted path), room for tokens, for lengths, level starts)."""
        inputs = self._inputs
        outputs = self._eagle.eagle_sample_and_accept_draft_plugin(
            lm_logits=lm_logits,
            draft_tokens=inputs["draft_tokens"],
            draft_lens=inputs["draft_lens"],
            eagle_temperature=inputs["eagle_temperature"],
            rand_data_validation=inputs["rand_data_validation"],
            posterior_alpha=inputs["posterior_alpha"],
            posterior_threshold=inputs["posterior_threshold"],
            tree_params=self._eagle.TreeParams(paths=paths),
            greedy_sampling=inputs["greedy_sampling"],
            use_dynamic_tree=inputs["use_dynamic_tree"],
        )
        accepted_tokens, num_accepted, accepted_paths, tokens, lens, _, level_starts = outputs
        return (accepted_tokens, num_accepted, accepted_paths), tokens, lens, level_starts

    def _draft(
        self,
        drafts: _Drafts,
        accepted: tuple[Any, Any, Any],
        verified_paths: Any,
        hidden_states: Any,
        level_starts: Any,
    ) -> Any:
        """Run every level, updating ``drafts``; returns the features [R,K] f32 of all of them."""
        inputs, model = self._inputs, self._model
        accepted_tokens, num_accepted, accepted_paths = accepted
        spec = inputs["spec_decoding_params"]
        attention, kv_cache = inputs["attention_params"], inputs["kv_cache_params"]
        first_sequence_length = features = None
        for level in range(model.num_eagle_layers):
            net_inputs, level_starts, num_rows = model._prepare_drafter_inputs(
                layer_idx=level,
                accepted_token_ids=accepted_tokens,
                accepted_lens=num_accepted,
                accepted_path_ids=accepted_paths,
                next_draft_tokens=drafts.tokens,
                next_draft_lens=drafts.lens,
                next_draft_paths=drafts.paths,
                prev_draft_lens=inputs["draft_lens"],
                prev_draft_paths=verified_paths,
                input_attention_params=attention,
                input_kv_cache_params=kv_cache,
                hidden_states=hidden_states,
                hidden_size_batch_level_starts=level_starts,
                input_spec_decoding_generation_lengths=spec.spec_decoding_generation_lengths,
                spec_decoding_use=spec.spec_decoding_use,
                **{name: inputs[name] for name in _PREPARED},
            )
            logits, level_states, _ = model.eagle_nets[level](**net_inputs)
            level_features = self._score_and_decode(level, drafts, logits, num_rows)
            attention, kv_cache = net_inputs["attention_params"], net_inputs["kv_cache_params"]
            if level == 0:
                # The target's hidden states served level 0; later levels read what levels made.
                first_sequence_length = attention.sequence_length
                hidden_states, features = level_states, level_features
            else:
                hidden_states = self._functional.concat([hidden_states, level_states])
                features = self._functional.add(features, level_features)  # each node has one level
            attention.context_lengths = first_sequence_length
            attention.sequence_length = first_sequence_length
        return features

    def _score_and_decode(self, level: int, drafts: _Drafts, logits: Any, num_rows: Any) -> Any:
        model = self._model
        features, lens = self._layers.score_level(
            logits,
            num_rows,
            drafts.paths,
            drafts.lens,
            level=level,
            vocab_size=model.config.eagle_net_config.vocab_size,
            max_non_leaves=model.max_non_leaves_per_layer,
        )
        outputs = self._eagle.eagle_draft_decoder_plugin(
            layer_idx=level,
            num_eagle_layers=model.num_eagle_layers,
            top_k_sampling=True,
            logits=logits,
            num_last_token_indices=num_rows,
            input_paths=drafts.paths,
            use_dynamic_tree=self._inputs["use_dynamic_tree"],
            dynamic_tree_max_topK=self._inputs["dynamic_tree_max_topK"],
            input_draft_token_ids=drafts.tokens,
            input_draft_lens=lens,
            **{f"input_{name}": tensor for name, tensor in drafts.search.items()},
        )
        drafts.tokens, drafts.lens, drafts.paths, *search = outputs
        drafts.search = dict(zip(_SEARCH, search, strict=True))
        return features
