"""``tensorrt_llm_bls``: preprocessing and the engine's model behind one text interface.

Invariants: one thread looks for clients that left, also while their request waits for a slot, and stops it
by id; rows of a batch are decoded together; without streaming there is one response with all rows; an
engine's responses outlive what this backend still does with them.
Importable only inside Triton's Python backend.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtllm_av.runtime.errors import AdaptiveVerificationError, UsageError
from trtllm_av.triton_model_repo.backend import (
    BLS_PREFIX,
    read_tensors,
    refuse_parameters,
    stop_engine_request,
    to_load_error,
    to_triton_error,
)
from trtllm_av.triton_model_repo.calls import CANCELLED, CHECK_SECONDS
from trtllm_av.triton_model_repo.fields import Fields, decode_text
from trtllm_av.triton_model_repo.parameters import Parameters
from trtllm_av.triton_model_repo.refusals import refuse_unsupported

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MAX_THREADS = 128  # requests beyond it wait their turn
# Of them at most so many wait for a first response of the engine's model. Each of these holds one of the 32
# threads that Triton gives this model by default to ask others; with none left nobody could be stopped.
_MAX_UNANSWERED = 24
# A thread of this backend drops its reference to a request's responses some time after the last of them.
# If that reference is the last one, releases before 24.12 free their arrays there, without the interpreter's
# lock, and the stub crashes; later ones can wait for that lock for ever. So ours are dropped later.
_KEEP_SECONDS = 1.0

_TO_PREPROCESSING = {
    "text_input": "QUERY", "max_tokens": "REQUEST_OUTPUT_LEN", "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT", "end_id": "END_ID", "pad_id": "PAD_ID",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
}  # fmt: skip
_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len", "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list", "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id", "OUT_PAD_ID": "pad_id",
}  # fmt: skip
_TO_ENGINE = {
    "top_k": "runtime_top_k", "top_p": "runtime_top_p",
    **{name: name for name in (
        "temperature", "repetition_penalty", "min_tokens", "presence_penalty", "frequency_penalty",
        "seed", "random_seed", "return_log_probs", "av_enable", "num_draft_tokens",
    )},
}  # fmt: skip
_COUNTS = (
    "cum_log_probs", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
    "av_verified_draft_tokens", "av_trimmed_draft_tokens", "num_input_tokens", "num_output_tokens",
    "finish_reason",
)  # fmt: skip


@dataclass(slots=True)
class _Row:
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        return bool(self.counts) and bool(self.counts["finish_reason"].reshape(-1)[0])

    def add(self, tensors: Mapping[str, Any]) -> None:
        self.text += decode_text("av_text", tensors["av_text"].reshape(-1)[0])
        self.log_probs += tensors["output_log_probs"].reshape(-1).tolist()
        self.counts = {name: tensors[name] for name in _COUNTS}


class BlsModel:
    """One instance serves up to ``_MAX_THREADS`` requests at once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = Parameters(config)
        try:
            for name in ("tensorrt_llm_draft_model_name", "multimodal_encoders_name"):
                if (value := parameters.get(name, str)) is not None:
                    raise UsageError(f"parameter {name}={value!r} is not supported; leave it empty")
            self._is_accumulating = bool(parameters.get("accumulate_tokens", bool, False))
        except AdaptiveVerificationError as error:
            raise to_load_error(error) from None
        self._engine_model = parameters.get("tensorrt_llm_model_name", str) or "tensorrt_llm"
        self._input_names = [entry["name"] for entry in config["input"]]
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="bls")
        self._open: dict[str, Any] = {}  # request id of the engine's model -> sender of ours
        self._lock = threading.Lock()  # guards _open, whose requests have no final response yet
        self._ended: deque[tuple[float, Any]] = deque()  # when, and the responses of a request
        self._unanswered = threading.BoundedSemaphore(_MAX_UNANSWERED)
        self._is_closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch_clients, name="clients", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._pool.submit(self._serve, request, request.get_response_sender())

    def finalize(self) -> None:
        self._pool.shutdown()
        self._is_closing.set()
        self._watcher.join()

    def _watch_clients(self) -> None:
        """Stop the engine's requests of clients that left; each then ends with the engine's error.

        Asked again until it has ended: the first time the engine's model may not have the request yet. Old
        responses are dropped here too.
        """
        while not self._is_closing.wait(CHECK_SECONDS):
            while self._ended and self._ended[0][0] < time.monotonic() - _KEEP_SECONDS:
                self._ended.popleft()
            with self._lock:
                request_ids = list(self._open)
            for request_id in request_ids:
                if self._is_left(request_id):
                    stop_engine_request(self._engine_model, request_id)

    def _is_left(self, request_id: str) -> bool:
        """Whether the client of an open request has left.

        Under the lock, so that no final response is sent meanwhile: the server dies of this question once
        a request has got its last one.
        """
        with self._lock:
            sender = self._open.get(request_id)
            return sender is not None and bool(sender.is_cancelled())

    def _serve(self, request: Any, sender: Any) -> None:
        error: Any
        try:
            refuse_parameters(request)
            self._generate(request, sender)
        except AdaptiveVerificationError as refusal:
            error = to_triton_error(refusal)
        except _ChildError as failure:
            error = failure.error
        except Exception as bug:  # a request may fail; the model must not
            error = to_triton_error(f"{type(bug).__name__}: {bug}")
        else:
            return
        with contextlib.suppress(Exception):  # the client may be gone
            sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)

    def _generate(self, request: Any, sender: Any) -> None:
        tensors = read_tensors(request, self._input_names)
        fields = Fields(tensors)
        refuse_unsupported(fields)
        is_streaming = bool(fields.scalar("stream", 0, False))
        has_input = not fields.scalar("exclude_input_in_output", 0, False) and not is_streaming
        names = list(request.requested_output_names())
        rows = [_Row() for _ in range(fields.num_rows)]
        request_id = f"{BLS_PREFIX}{uuid.uuid4()}"
        inputs = self._engine_inputs(tensors)
        with self._lock:
            self._open[request_id] = sender
        try:
            self._relay(
                self._engine_responses(inputs, request_id), rows, names, sender, is_streaming
            )
        except _ChildError:
            raise
        except Exception:  # a response could not be sent: nobody waits for the rest
            stop_engine_request(self._engine_model, request_id)
            raise
        finally:
            with self._lock:
                self._open.pop(request_id, None)
        if is_streaming:
            sender.send(flags=_FINAL)
            return
        if has_input:
            for index, row in enumerate(rows):
                row.text = fields.scalar("text_input", index) + row.text
        sender.send(_response(names, rows, list(range(len(rows)))), flags=_FINAL)

    def _relay(
        self,
        responses: Iterator[dict[str, Any]],
        rows: list[_Row],
        names: list[str],
        sender: Any,
        is_streaming: bool,
    ) -> None:
        """Collect the engine's responses in ``rows``; send each on where the client streams.

        The engine's model sends no error behind its first response (``ResponseClient``): rows that are not
        finished at the end tell of it.
        """
        for response in responses:
            index = int(response["batch_index"].reshape(-1)[0])
            row = rows[index]
            row.add(response)
            if is_streaming:
                sender.send(_response(names, [row], [index]))
                if not self._is_accumulating:
                    row.text = ""
                row.log_probs = []
        if not all(row.is_finished for row in rows):
            raise _ChildError(
                to_triton_error(
                    f"{self._engine_model} ended this request early: it was cancelled or the engine "
                    "failed; the server's log says which"
                )
            )

    def _engine_inputs(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Run preprocessing; the engine's inputs as tensors."""
        inference = pb_utils.InferenceRequest(
            model_name="preprocessing",
            requested_output_names=list(_FROM_PREPROCESSING),
            inputs=_renamed(tensors, _TO_PREPROCESSING),
        )
        response = inference.exec()
        if response.has_error():
            raise _ChildError(response.error())
        encoded = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        num_rows = len(encoded["INPUT_ID"])
        always = {"streaming": np.ones((num_rows, 1), dtype=bool)}
        return [
            *_renamed(encoded, _FROM_PREPROCESSING),
            *_renamed(tensors, _TO_ENGINE),
            *_renamed(always, {"streaming": "streaming"}),
        ]

    def _wait_for_turn(self, request_id: str) -> None:
        """Until few enough requests wait for the engine's first response; raises if the client leaves."""
        while not self._unanswered.acquire(timeout=CHECK_SECONDS):
            if self._is_left(request_id):
                raise _ChildError(to_triton_error(CANCELLED))

    def _engine_responses(self, inputs: list[Any], request_id: str) -> Iterator[dict[str, Any]]:
        inference = pb_utils.InferenceRequest(
            model_name=self._engine_model,
            request_id=request_id,
            requested_output_names=["av_text", "output_log_probs", "batch_index", *_COUNTS],
            inputs=inputs,
        )
        self._wait_for_turn(request_id)
        with contextlib.ExitStack() as unanswered:
            unanswered.callback(self._unanswered.release)
            responses = inference.exec(decoupled=True)
            error = None
            try:
                for response in responses:  # to the last, also after an error
                    unanswered.close()
                    if response.has_error():
                        error = response.error()
                    elif tensors := {
                        tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()
                    }:
                        yield tensors
            finally:
                self._ended.append((time.monotonic(), responses))
        if error is not None:
            raise _ChildError(error)


class _ChildError(Exception):
    """Another model refused; ``error`` goes on to the client as it is."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error))
        self.error = error


def _renamed(tensors: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
    return [pb_utils.Tensor(new, tensors[name]) for name, new in names.items() if name in tensors]


def _response(names: Sequence[str], rows: Sequence[_Row], indices: Sequence[int]) -> Any:
    width = max(len(row.log_probs) for row in rows)
    log_probs = np.zeros((len(rows), 1, width), dtype=np.float32)
    for n, row in enumerate(rows):
        log_probs[n, 0, : len(row.log_probs)] = row.log_probs
    outputs = {
        "text_output": np.array([[row.text.encode()] for row in rows], dtype=np.object_),
        "output_log_probs": log_probs,
        "batch_index": np.array(indices, dtype=np.int32)[:, None],
    }
    for name in _COUNTS:
        outputs[name] = np.concatenate([row.counts[name] for row in rows])
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, outputs[name]) for name in names if name in outputs]
    )
