"""``preprocessing`` and ``postprocessing``: the text ends of the ensemble.

Invariants: a request that cannot be read fails alone. Importable only inside Triton's Python backend.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtllm_av.runtime.errors import AdaptiveVerificationError, UsageError
from trtllm_av.triton_model_repo.backend import (
    read_tensors,
    refuse_parameters,
    stop_engine_request,
    to_load_error,
    to_triton_error,
)
from trtllm_av.triton_model_repo.fields import Fields
from trtllm_av.triton_model_repo.parameters import Parameters
from trtllm_av.triton_model_repo.text_codec import decode_tokens, encode_request, load_tokenizer

_REMEMBERED = 1024  # requests that were stopped already


class _TextModel:
    transform: Callable[..., dict[str, Any]]

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.parameters = Parameters(config)
        self._input_names = [entry["name"] for entry in config["input"]]
        try:
            folder = self.parameters.get("tokenizer_dir", str)
            if folder is None:
                raise UsageError("parameter tokenizer_dir is empty; name the tokenizer's folder")
            self.tokenizer = load_tokenizer(folder)
        except AdaptiveVerificationError as error:
            raise to_load_error(error) from None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            refuse_parameters(request)
            outputs = self.transform(read_tensors(request, self._input_names))
        except AdaptiveVerificationError as error:
            return pb_utils.InferenceResponse(error=to_triton_error(error))
        except Exception as bug:  # raised from here, it would fail every request of this batch
            return pb_utils.InferenceResponse(error=to_triton_error(f"{type(bug).__name__}: {bug}"))
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(name, values) for name, values in outputs.items()]
        )


class Preprocessing(_TextModel):
    def transform(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        add_special_tokens = bool(self.parameters.get("add_special_tokens", bool, True))
        return encode_request(
            Fields(tensors), self.tokenizer, add_special_tokens=add_special_tokens
        )


class Postprocessing(_TextModel):
    """With AV_TEXT, the engine's own incremental text; without, the decoded tokens of each response.

    It also looks for clients that left: an ensemble tells the steps that it starts, and not the one that
    runs, so the engine hears of it from here.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._engine_model = self.parameters.get("tensorrt_llm_model_name", str) or "tensorrt_llm"
        self._stopped: deque[int] = deque(maxlen=_REMEMBERED)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        for request in requests:
            key = pb_utils.get_input_tensor_by_name(request, "AV_CALL")
            if key is not None and request.is_cancelled():
                self._stop(int(key.as_numpy().reshape(-1)[0]))
        return super().execute(requests)

    def _stop(self, key: int) -> None:
        """Once per request, however many of its responses are still on their way."""
        if key not in self._stopped:
            self._stopped.append(key)
            stop_engine_request(self._engine_model, key=key)

    def transform(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        if "AV_TEXT" in tensors:
            return {"OUTPUT": tensors["AV_TEXT"]}
        texts = decode_tokens(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"], self.tokenizer)
        column = [[text.encode()] for text in texts]
        return {"OUTPUT": np.array(column, dtype=np.object_)}
