"""The two Triton models that hold an engine: ``tensorrt_llm`` (tokens) and ``llm`` (text).

Invariants: ``execute`` only reads requests and hands them on, so one instance serves any number of streams;
a request that cannot be read fails alone. Importable only inside Triton's Python backend.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_av.runtime.engine_thread import EngineThread
from trtllm_av.runtime.errors import AdaptiveVerificationError
from trtllm_av.triton_model_repo.backend import (
    BLS_PREFIX,
    read_tensors,
    refuse_parameters,
    to_load_error,
    to_triton_error,
)
from trtllm_av.triton_model_repo.calls import Call, Calls
from trtllm_av.triton_model_repo.fields import Fields
from trtllm_av.triton_model_repo.metrics import Metrics
from trtllm_av.triton_model_repo.model_request import (
    ModelRequest,
    read_text_request,
    read_token_request,
)
from trtllm_av.triton_model_repo.parameters import Parameters
from trtllm_av.triton_model_repo.progress import (
    TEXT_OUTPUTS,
    TOKEN_OUTPUTS,
    Outputs,
    build_outputs,
)

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class ResponseClient:
    """A request's response sender.

    ``is_bls``: the request is another model's (BLS), which takes an end without a finish reason for a
    failure. On its way to such a model release 24.10 loses the address of an error behind other responses:
    the model would wait for ever for an end in it, and the error can reach another request. So none is sent.
    """

    def __init__(self, sender: Any, to_tensor: Callable[[str, Any], Any], *, is_bls: bool) -> None:
        self._sender = sender
        self._to_tensor = to_tensor
        self._is_bls = is_bls
        self._has_sent = False

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        tensors = [self._to_tensor(name, values) for name, values in outputs.items()]
        self._has_sent = True
        self._sender.send(
            pb_utils.InferenceResponse(output_tensors=tensors), flags=_FINAL if is_final else 0
        )

    def fail(self, error: AdaptiveVerificationError | str) -> None:
        with contextlib.suppress(Exception):  # the client may be gone
            if self._is_bls and self._has_sent:
                self._sender.send(flags=_FINAL)
            else:
                response = pb_utils.InferenceResponse(error=to_triton_error(error))
                self._sender.send(response, flags=_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class EngineModel:
    """What both models share; subclasses say how requests are read and responses built."""

    has_rows: bool  # tensors carry Triton's batch dimension
    builders: Mapping[str, Callable[..., Any]]

    def read(self, fields: Fields) -> ModelRequest:
        raise TypeError(f"{type(self).__name__} has to define read()")

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.parameters = Parameters(config)
        try:
            for name in self.parameters.check():
                pb_utils.Logger.log_warn(f"parameter {name} has no effect on this engine")
            engine = self.parameters.load_engine()
            max_waiting = self.parameters.get("max_queue_size", int, 0) or None
        except AdaptiveVerificationError as error:
            raise to_load_error(error) from None
        self.tokenizer = engine.tokenizer
        self.eos_token_ids = engine.eos_token_ids
        self._input_names = [entry["name"] for entry in config["input"]]
        self._metrics = Metrics(pb_utils, args["model_name"], args["model_version"])
        self._engine = EngineThread(
            engine,
            max_waiting=max_waiting,
            on_round=self._metrics.update,
            on_end=self._metrics.count_request,
        )
        self._calls = Calls(self._engine)

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            client = ResponseClient(
                request.get_response_sender(),
                self._to_tensor,
                is_bls=request.request_id().startswith(BLS_PREFIX),
            )
            try:
                refuse_parameters(request)
                model_request = self.read(self._fields(request))
            except AdaptiveVerificationError as error:
                client.fail(error)
                continue
            except Exception as bug:  # raised from here, it would fail every request of this batch
                client.fail(f"{type(bug).__name__}: {bug}")
                continue
            if model_request.is_stop:
                self._calls.stop(request.request_id(), model_request.stop_key)
                client.send({}, is_final=True)
                continue
            names = list(request.requested_output_names())
            self._calls.start(
                Call(request.request_id(), model_request, client, self._builder(names))
            )

    def finalize(self) -> None:
        self._engine.close()
        self._calls.close()
        self._metrics.close()

    def _builder(self, names: list[str]) -> Callable[..., Outputs]:
        return lambda rows, has_input: build_outputs(
            self.builders, names, rows, has_input=has_input
        )

    def _fields(self, request: Any) -> Fields:
        tensors = read_tensors(request, self._input_names)
        if not self.has_rows:
            tensors = {name: values[None] for name, values in tensors.items()}
        return Fields(tensors)

    def _to_tensor(self, name: str, values: Any) -> Any:
        return pb_utils.Tensor(name, values if self.has_rows else values[0])


class TokenModel(EngineModel):
    """``tensorrt_llm``: token ids in, token ids out."""

    has_rows = True
    builders = TOKEN_OUTPUTS

    def read(self, fields: Fields) -> ModelRequest:
        is_input_excluded = bool(self.parameters.get("exclude_input_in_output", bool, False))
        return read_token_request(
            fields, self.tokenizer, self.eos_token_ids, is_input_excluded=is_input_excluded
        )


class TextModel(EngineModel):
    """``llm``: a text in, a text out."""

    has_rows = False
    builders = TEXT_OUTPUTS

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        if self.tokenizer is None:
            raise pb_utils.TritonModelException(
                "this model has no tokenizer; serve the model tensorrt_llm instead"
            )

    def read(self, fields: Fields) -> ModelRequest:
        return read_text_request(fields, self.tokenizer)
