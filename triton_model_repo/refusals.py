"""Inputs of TensorRT-LLM's repository that this runtime does not implement, each with its reason.

Invariants: an input is implemented, or its presence is an error that names it; a value that asks for
nothing (``beam_width`` 1) is accepted, because clients send it with every request.
"""

from __future__ import annotations

from trtllm_av.runtime.errors import RequestError
from trtllm_av.triton_model_repo.fields import Fields

# Value that asks for nothing, by input; every other value is refused.
NEUTRAL: dict[str, tuple[tuple[float, ...], str]] = {
    "num_return_sequences": ((1,), "send the request that many times, with different seeds"),
    "beam_width": ((1,), "there is no beam search"),
    "len_penalty": ((0.0, 1.0), "it only ranks beams, and there is no beam search"),
    "length_penalty": ((0.0, 1.0), "it only ranks beams, and there is no beam search"),
    "early_stopping": ((0, 1), "it only ends beam search, and there is none"),
    "beam_search_diversity_rate": ((0.0,), "there is no beam search"),
    "runtime_top_p_decay": ((1.0,), "top-p is constant over a request"),
    "runtime_top_p_min": ((0.0, 1e-6), "top-p is constant over a request"),
    "runtime_top_p_reset_ids": ((-1,), "top-p is constant over a request"),
    "return_context_logits": ((0,), "logits are not kept; ask for return_log_probs"),
    "return_generation_logits": ((0,), "logits are not kept; ask for return_log_probs"),
    "return_kv_cache_reuse_stats": ((0,), "the cache has a row per request and reuses nothing"),
    "use_draft_logits": ((0,), "the engine drafts by itself, with its own probabilities"),
}

_ENCODER = "there are no encoder-decoder models"
_LORA = "LoRA is not implemented"
_GUIDED = "guided decoding is not implemented"
_LOOKAHEAD = "the engine has its own drafter; num_draft_tokens bounds it"
_DRAFT = "the engine drafts by itself; send the prompt only"
_PROMPT_TABLE = "prompt tables are not implemented"
_IMAGES = "multimodal models are not implemented"
_RETENTION = "the cache has a row per request, freed at its end"

REFUSED: dict[str, str] = {
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "decoder_input_ids": _ENCODER,
    "decoder_input_lengths": _ENCODER,
    "decoder_text_input": _ENCODER,
    "draft_input_ids": _DRAFT,
    "draft_logits": _DRAFT,
    "draft_acceptance_threshold": "acceptance is exact rejection sampling, without a threshold",
    "prompt_embedding_table": _PROMPT_TABLE,
    "prompt_vocab_size": _PROMPT_TABLE,
    "prompt_table_extra_id": _PROMPT_TABLE,
    "lora_task_id": _LORA,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "context_phase_params": "prefill and decoding run in one engine",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "guided_decoding_guide_type": _GUIDED,
    "guided_decoding_guide": _GUIDED,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
    "image_input": _IMAGES,
    "image_bytes_input": _IMAGES,
    "image_url_input": _IMAGES,
}


def refuse_unsupported(fields: Fields) -> None:
    """RequestError for the first input that asks for something that is not there."""
    for name, reason in REFUSED.items():
        if fields.row(name, 0) is not None:
            raise RequestError(f"{name} is not supported: {reason}; leave it out")
    for name, (neutral, reason) in NEUTRAL.items():
        for index in range(fields.num_rows if name in fields else 0):
            value = fields.scalar(name, index)
            if not any(abs(value - accepted) < 1e-9 for accepted in neutral):
                raise RequestError(f"{name}={value} is not supported: {reason}; leave it out")
