"""What all models here do with Triton's Python backend. Importable only inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_av.runtime.errors import AdaptiveVerificationError, OverloadError, RequestError
from trtllm_av.triton_model_repo.calls import CANCELLED


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
