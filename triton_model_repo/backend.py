"""What all models here do with Triton's Python backend. Importable only inside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtllm_av.runtime.errors import AdaptiveVerificationError, OverloadError, RequestError
from trtllm_av.triton_model_repo.calls import CANCELLED

#: Ids of the requests that one model here sends to another begin so; no client's own id would.
BLS_PREFIX = "trtllm-av-bls-"


def read_tensors(request: Any, names: Sequence[str]) -> dict[str, Any]:
    """The input tensors that the request has, as arrays."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in names}
    return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}


def to_triton_error(error: AdaptiveVerificationError | str) -> Any:
    """One line and the status that tells clients whose fault it is and whether to try again."""
    code = pb_utils.TritonError.INTERNAL
    if error == CANCELLED:
        code = pb_utils.TritonError.CANCELLED
    elif isinstance(error, OverloadError):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, RequestError):
        code = pb_utils.TritonError.INVALID_ARG
    return pb_utils.TritonError(" ".join(str(error).split()), code)


def to_load_error(error: AdaptiveVerificationError) -> Any:
    """The exception that ends the loading of a model with one line."""
    return pb_utils.TritonModelException(" ".join(str(error).split()))


def refuse_parameters(request: Any) -> None:
    """A misspelt field of /generate arrives as a parameter: refuse it instead of ignoring it."""
    names = [name for name in json.loads(request.parameters() or "{}") if not _is_servers(name)]
    if names:
        raise RequestError(
            f"unknown field {names[0]!r}; see the model's configuration for its inputs"
        )


def _is_servers(name: str) -> bool:
    return name.startswith("triton_") or name in ("sequence_id", "priority", "timeout")


def stop_engine_request(model: str, request_id: str = "", key: int | None = None) -> None:
    """Cancel a request of the engine's ``model`` by its id or its ``av_call``.

    This backend cannot cancel what it asked another model for. A model that is gone, or a request that has
    ended, has nothing left to cancel.
    """
    one = np.ones((1, 1), dtype=np.int32)
    tensors = dict.fromkeys(("input_ids", "input_lengths", "request_output_len"), one)
    tensors["stop"] = np.ones((1, 1), dtype=bool)
    if key is not None:
        tensors["av_call"] = np.array([[key]], dtype=np.int64)
    inference = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        requested_output_names=["sequence_length"],
        inputs=[pb_utils.Tensor(name, values) for name, values in tensors.items()],
    )
    with contextlib.suppress(Exception):
        for _ in inference.exec(decoupled=True):
            pass
