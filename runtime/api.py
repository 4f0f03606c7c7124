"""Prompts in, texts out: the Python face of the runtime, shaped like TensorRT-LLM's LLM API.

Invariants: outputs come back in the order of the prompts; either all prompts of a call are accepted or
none runs on; an abandoned or failed call leaves no request behind in the engine.

An LLM may be used from several threads at once: each round runs under one lock, and calls share the
batch. Outputs handed out are snapshots that nothing changes afterwards.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trtllm_av.runtime.errors import RequestError, UsageError
from trtllm_av.runtime.loading import load_engine
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.output_stream import FinishReason
from trtllm_av.runtime.params import REFUSED, SamplingParams, SpeculativeConfig
from trtllm_av.runtime.request import TokenEvent

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "SpeculativeConfig"]

Prompt = str | Sequence[int]

# A template's own errors, and what its expressions raise: 1/0, a missing key, text plus a number.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


@dataclass(slots=True)
class CompletionOutput:
    """What one request has produced so far.

    ``token_ids`` include a final stop token, ``text`` does not. ``logprobs``: the target's
    log-probability of each token before temperature, None unless asked for.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its (always one) completion; ``prompt`` is None if it came as token ids."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False


class LLM:
    """A target model, its drafter and the engine that decodes with both.

    ``model``: ``"smollm2"``, a local Hugging Face folder, an engine directory of ``trtllm-av-build``, or a
    loaded model (several LLMs may share it).
    ``speculative_config`` None decodes without drafts; a mapping takes the keys of SpeculativeConfig.
    Sizes and ``dtype`` that are None are those of ``load_engine``. ``cost_table`` replaces the measured step
    costs. Raises UsageError for wrong or unknown arguments, CheckpointError and CostTableError for files
    that cannot be used.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        *,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        dtype: str | None = None,
        cost_table: str | Path | dict[str, Any] | None = None,
        prefill_chunk: int | None = None,
        device: str = "cpu",
        **unknown: Any,
    ) -> None:
        for name, value in unknown.items():
            reason = REFUSED.get(name)
            raise UsageError(
                f"LLM: unknown argument {name!r} (value {value!r}); remove it"
                if reason is None
                else f"LLM: {name}={value!r} is not supported: {reason}"
            )
        if not isinstance(model, (str, Path, LoadedModel)):
            raise UsageError(f"model={model!r} must be a name, a folder or a loaded model")
        if isinstance(speculative_config, Mapping):
            speculative_config = SpeculativeConfig(**speculative_config)
        if not isinstance(speculative_config, (SpeculativeConfig, type(None))):
            raise UsageError(
                f"speculative_config={speculative_config!r} must be a SpeculativeConfig or a mapping"
            )
        self.engine = load_engine(
            str(model) if isinstance(model, Path) else model,
            speculative_config,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            dtype=dtype,
            cost_table=cost_table,
            prefill_chunk=prefill_chunk,
            device=device,
        )
        self._lock = threading.Lock()
        self._live: dict[int, RequestOutput] = {}

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, or None."""
        return self.engine.tokenizer

    @property
    def has_chat_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    def apply_chat_template(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (a text is one user message), ready for the model's answer.

        Raises UsageError without a chat template, RequestError for messages that it refuses.
        """
        if not self.has_chat_template:
            raise UsageError("this model has no chat template; pass the prompt as plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages:
            raise RequestError("messages=[] is empty; give at least one message")
        for message in messages:
            for value in message.values():
                _check_unicode(value, "a message")
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except _TEMPLATE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {reason}") from None
        return [int(token) for token in ids]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode all prompts and return their outputs in the same order.

        ``prompts``: a text, a list of token ids, or a list of such. ``sampling_params``: one for all or
        one for each. ``on_tokens`` is told after each round how many tokens these prompts gained.
        Raises RequestError if a prompt is empty or too long or cannot be served as asked.
        """
        batch = _as_batch(prompts)
        params = _one_for_each(sampling_params, len(batch))
        encoded = [self._encode(prompt, _place(n, len(batch))) for n, prompt in enumerate(batch)]
        requests: list[RequestOutput] = []
        try:
            for n, (prompt, ids) in enumerate(zip(batch, encoded, strict=True)):
                try:
                    requests.append(self._submit(prompt, ids, params[n]))
                except RequestError as error:
                    raise RequestError(f"{_place(n, len(batch))}: {error}") from None
            num_tokens = 0
            while not all(request.finished for request in requests):
                self._advance()
                gained = sum(len(request.outputs[0].token_ids) for request in requests) - num_tokens
                num_tokens += gained
                if on_tokens is not None and gained:
                    on_tokens(gained)
        finally:
            self._drop(requests)
        return requests

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The output so far after each round that added to it; the last one is ``finished``.

        The request starts with the first item asked for; closing the iterator cancels it.
        """
        ids = self._encode(prompt, "prompt")
        return self._follow(prompt, ids, _one_for_each(sampling_params, 1)[0])

    def report(self) -> RoundReport:
        """Counters of all rounds since the start or the last ``reset_report``."""
        with self._lock:
            return self.engine.report()

    def reset_report(self) -> None:
        with self._lock:
            self.engine.reset_report()

    def _follow(
        self, prompt: Prompt, token_ids: list[int], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        request = self._submit(prompt, token_ids, params)
        try:
            num_seen = 0
            is_finished = False
            while not is_finished:
                self._advance()
                with self._lock:  # another thread's round may be extending it
                    output = _snapshot(request)
                is_finished = output.finished  # perhaps by a round of another call
                if is_finished or len(output.outputs[0].token_ids) > num_seen:
                    num_seen = len(output.outputs[0].token_ids)
                    yield output
        finally:
            self._drop([request])

    def _encode(self, prompt: Prompt, place: str) -> list[int]:
        if not isinstance(prompt, str):
            token_ids = _as_token_ids(prompt, place)
        elif self.tokenizer is None:
            raise RequestError(f"{place} is text, and this model has no tokenizer; pass token ids")
        else:
            _check_unicode(prompt, place)
            token_ids = [int(token) for token in self.tokenizer.encode(prompt)] if prompt else []
        if not token_ids:
            raise RequestError(f"{place} is empty; give at least one token")
        return token_ids

    def _submit(
        self, prompt: Prompt, token_ids: list[int], params: SamplingParams
    ) -> RequestOutput:
        with self._lock:
            request_id = self.engine.submit(token_ids, params)
            request = RequestOutput(
                request_id,
                prompt if isinstance(prompt, str) else None,
                token_ids,
                [CompletionOutput(logprobs=[] if params.logprobs else None)],
            )
            self._live[request_id] = request
        return request

    def _advance(self) -> None:
        """Run one round for everyone."""
        with self._lock:
            for event in self.engine.step():
                if (request := self._live.get(event.request_id)) is not None:
                    _extend(request, event)

    def _drop(self, requests: Sequence[RequestOutput]) -> None:
        with self._lock:
            for request in requests:
                del self._live[request.request_id]
                self.engine.cancel(request.request_id)  # no effect on a finished one


def _extend(request: RequestOutput, event: TokenEvent) -> None:
    output = request.outputs[0]
    output.token_ids += event.token_ids
    output.text += event.text
    if output.logprobs is not None and event.logprobs is not None:
        output.logprobs += event.logprobs
        output.cumulative_logprob = sum(output.logprobs)
    output.finish_reason = event.finish_reason
    output.stop_reason = event.stop_reason
    request.finished = event.finish_reason is not None


def _snapshot(request: RequestOutput) -> RequestOutput:
    output = request.outputs[0]
    logprobs = None if output.logprobs is None else list(output.logprobs)
    output = replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
    return replace(request, outputs=[output])


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise UsageError(
            f"prompts={prompts!r} is neither a text nor a list; decode bytes, make a list of others"
        )
    if not prompts:
        raise UsageError("prompts=[] is empty; give at least one prompt")
    if all(isinstance(prompt, int) for prompt in prompts):
        return [[int(token) for token in prompts]]  # type: ignore[arg-type]
    for n, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise UsageError(f"prompts[{n}]={prompt!r} is neither a text nor a list of token ids")
    return list(prompts)  # type: ignore[arg-type]


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise UsageError(f"sampling_params={params!r} must be SamplingParams, or a list of them")
    for n, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise UsageError(f"sampling_params[{n}]={one!r} must be SamplingParams")
    if len(params) != count:
        raise UsageError(
            f"{len(params)} sampling_params for {count} prompts; give one, or one each"
        )
    return list(params)


def _as_token_ids(prompt: Sequence[int], place: str) -> list[int]:
    """The ids as plain integers; UsageError for anything that would have to be rounded or parsed."""
    if isinstance(prompt, (bytes, bytearray)):
        raise UsageError(f"{place} is {prompt!r}; decode it to text, or pass a list of token ids")
    token_ids = []
    for token in prompt:
        try:
            token_ids.append(operator.index(token))
        except TypeError:
            raise UsageError(f"{place} holds {token!r}, which is no token id") from None
    return token_ids


def _check_unicode(text: object, place: str) -> None:
    """RequestError for half a surrogate pair, which no tokenizer takes (bytes that were not UTF-8)."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{place} holds {text[error.start]!r} at character {error.start}, which is no "
                "Unicode character; was it read as UTF-8?"
            ) from None


def _place(index: int, count: int) -> str:
    return "prompt" if count == 1 else f"prompt {index} of {count} (counted from 0)"
