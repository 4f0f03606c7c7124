"""From the input tensors of a Triton request to what the engine is asked for.

Invariants: every input is used or refused by name; token-level and text-level requests share one set of
sampling fields, named as in TensorRT-LLM's repository. As there, a token-level request that sets neither
top-k nor top-p is greedy; a text-level one is greedy if it does not set a temperature either. Nothing here
needs Triton.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_av.runtime.detokenizer import REPLACEMENT
from trtllm_av.runtime.errors import RequestError, UsageError
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.triton_model_repo.fields import Fields, word_lists
from trtllm_av.triton_model_repo.refusals import refuse_unsupported


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One row: a prompt and how to decode it."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt_text: str = ""
    pad_id: int = 0


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One Triton request. ``is_stop`` asks to end the running request of ``stop_key``, or of the same id."""

    rows: list[RowRequest]
    is_streaming: bool = False
    is_input_excluded: bool = False
    is_stop: bool = False
    stop_key: int | None = None


def read_token_request(
    fields: Fields,
    tokenizer: Any,
    eos_token_ids: Collection[int] = (),
    *,
    is_input_excluded: bool = False,
) -> ModelRequest:
    """A request to the model ``tensorrt_llm``; ``is_input_excluded`` is the model's default."""
    key = fields.scalar("av_call", 0, None)
    if fields.scalar("stop", 0, False):
        return ModelRequest([], is_stop=True, stop_key=key)
    if key is not None:
        raise RequestError(f"av_call={key} names a running request for stop; leave it out here")
    refuse_unsupported(fields)
    for name in ("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"):
        fields.row(name, 0)  # these outputs are always there for the asking
    rows = [_token_row(fields, index, tokenizer, eos_token_ids) for index in range(fields.num_rows)]
    request = ModelRequest(
        rows,
        is_streaming=bool(fields.scalar("streaming", 0, False)),
        is_input_excluded=bool(fields.scalar("exclude_input_in_output", 0, is_input_excluded)),
    )
    fields.check_all_read()
    return request


def read_text_request(fields: Fields, tokenizer: Any) -> ModelRequest:
    """A request to the model ``llm``."""
    if fields.num_rows != 1:
        raise RequestError(f"text_input has {fields.num_rows} values; send one text a request")
    text = fields.scalar("text_input", 0)
    assert isinstance(text, str)  # Triton sees to it that the input is there
    stop = fields.texts("stop_words", 0)
    bad_words = [
        tokenizer.encode(word, add_special_tokens=False) for word in fields.texts("bad_words", 0)
    ]
    sampling = _sampling(fields, 0, top_k="top_k", top_p="top_p", max_tokens="max_tokens")
    if "temperature" in fields:
        sampling["temperature"] = fields.scalar("temperature", 0)
    params = _params(sampling | {"stop": stop, "bad_words_ids": bad_words})
    row = RowRequest(list(tokenizer.encode(text)) if text else [], params, text)
    request = ModelRequest(
        [row],
        is_streaming=bool(fields.scalar("stream", 0, False)),
        is_input_excluded=bool(fields.scalar("exclude_input_in_output", 0, True)),
    )
    fields.check_all_read()
    return request


def _token_row(
    fields: Fields, index: int, tokenizer: Any, eos_token_ids: Collection[int]
) -> RowRequest:
    prompt = fields.ids("input_ids", index)
    length = fields.scalar("input_lengths", index)
    if not 1 <= length <= len(prompt):
        raise RequestError(
            f"input_lengths={length} in row {index} must be from 1 to the {len(prompt)} input_ids"
        )
    stop_token_ids, stop = _stops(fields, index, tokenizer)
    options = _sampling(
        fields, index, top_k="runtime_top_k", top_p="runtime_top_p", max_tokens="request_output_len"
    )
    end_id = fields.scalar("end_id", index)
    if end_id is not None and end_id not in eos_token_ids:  # else the model's own ends hold
        options["ignore_eos"] = True
        stop_token_ids += [end_id] if end_id >= 0 else []
    bias = fields.row("embedding_bias", index)
    if bias is not None:
        bias = bias.reshape(-1)
        options["logit_bias"] = {int(token): float(bias[token]) for token in np.flatnonzero(bias)}
    options["bad_words_ids"] = word_lists("bad_words_list", fields.row("bad_words_list", index))
    options |= {"stop_token_ids": stop_token_ids, "stop": stop}
    pad_id = fields.scalar("pad_id", index, end_id if end_id is not None else 0)
    prompt = prompt[:length]
    if (lowest := min(prompt)) < 0:  # no tokenizer decodes it; the engine refuses ids too high
        raise RequestError(f"input_ids holds {lowest} in row {index}; token ids start at 0")
    text = "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=True)
    return RowRequest(prompt, _params(options), text, pad_id)


def _stops(fields: Fields, index: int, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Stop tokens and stop strings of a row.

    A sequence with a text ends the output wherever the text appears, whatever tokens bring it; a single
    token without one (a special token, part of a character) ends it as a token.
    """
    token_ids: list[int] = []
    texts: list[str] = []
    for word in word_lists("stop_words_list", fields.row("stop_words_list", index)):
        try:
            text = "" if tokenizer is None else tokenizer.decode(word, skip_special_tokens=True)
        except (OverflowError, IndexError, TypeError) as error:
            raise RequestError(f"stop_words_list holds {word}, which is no text: {error}") from None
        if text and REPLACEMENT not in text:
            texts.append(text)
        elif len(word) == 1:
            token_ids += word
        else:
            raise RequestError(
                f"stop_words_list holds {word}, which is no text; send single tokens"
            )
    return token_ids, texts


def _sampling(
    fields: Fields, index: int, *, top_k: str, top_p: str, max_tokens: str
) -> dict[str, Any]:
    """The fields that both models have; unset ones are left out."""
    seeds = {
        value for name in ("seed", "random_seed")
        if (value := fields.scalar(name, index)) is not None
    }  # fmt: skip
    if len(seeds) > 1:
        raise RequestError(f"seed and random_seed differ: {sorted(seeds)}; send one of them")
    k, p = fields.scalar(top_k, index, 0), fields.scalar(top_p, index, 0.0)
    temperature = fields.scalar("temperature", index, 1.0)
    options = {
        "max_tokens": fields.scalar(max_tokens, index),
        "temperature": 0.0 if k == 0 and p == 0.0 and temperature >= 0.0 else temperature,
        "top_k": k,
        "top_p": 1.0 if p == 0.0 else p,
        "seed": seeds.pop() if seeds else None,
        "min_tokens": fields.scalar("min_tokens", index),
        "repetition_penalty": fields.scalar("repetition_penalty", index),
        "presence_penalty": fields.scalar("presence_penalty", index),
        "frequency_penalty": fields.scalar("frequency_penalty", index),
        "logprobs": fields.scalar("return_log_probs", index),
        "adaptive": fields.scalar("av_enable", index),
        "num_speculative_tokens": fields.scalar("num_draft_tokens", index),
    }
    return {name: value for name, value in options.items() if value is not None}


def _params(options: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except UsageError as error:
        raise RequestError(str(error).removeprefix("SamplingParams: ")) from None
