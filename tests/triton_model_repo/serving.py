"""A server started by the command ``trtllm-av-serve``, and a small client for streams."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.triton_server import free_ports
from trtllm_av.triton_model_repo.metrics import PERIOD

START_SECONDS = 240
DTYPES = {
    "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64, "BYTES": np.object_,
    "INT64": np.int64,
}  # fmt: skip
# The type of each input that the tests send.
INPUTS = {
    "text_input": "BYTES", "stop_words": "BYTES", "bad_words": "BYTES", "temperature": "FP32",
    "top_p": "FP32", "runtime_top_p": "FP32", "repetition_penalty": "FP32", "seed": "UINT64",
    "stream": "BOOL", "streaming": "BOOL", "stop": "BOOL", "exclude_input_in_output": "BOOL",
    "return_log_probs": "BOOL", "av_enable": "BOOL", "embedding_bias": "FP32",
    "lora_task_id": "UINT64", "av_call": "INT64", "return_context_logits": "BOOL",
}  # fmt: skip


@dataclass
class Server:
    """Addresses of a running server; ``pid`` is tritonserver's."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    pid: int

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, str]:
        """Status and text of an HTTP request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.http}/v2/{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        status, text = self.post(f"models/{model}/generate", fields)
        assert status == 200, text
        return json.loads(text)

    def sample(self, prefix: str, part: str) -> float:
        """The sample on the metrics page that starts with ``prefix`` and contains ``part``."""
        with urllib.request.urlopen(f"http://{self.metrics}", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        [line] = [line for line in lines if line.startswith(prefix) and part in line]
        return float(line.rsplit(" ", 1)[1])

    def gauge(self, family: str, kind: str) -> float:
        return self.sample(family, f'"{kind}"')

    def used_slots(self) -> float:
        return self.gauge("nv_trt_llm_adaptive_verification_metrics", "used_slots")

    def emitted(self) -> float:
        return self.gauge("nv_trt_llm_adaptive_verification_metrics", "emitted")

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        time.sleep(1.2 * PERIOD)  # until then the gauge may be of the time before
        end = time.monotonic() + seconds
        while self.gauge("nv_trt_llm_request_metrics", "active") > 0:
            assert time.monotonic() < end, "a slot is still taken"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serve(model: str | Path | None, log: Path, *arguments: str) -> Iterator[Server]:
    """``trtllm-av-serve`` until the end of the block; None: the arguments say what it serves."""
    what = [] if model is None else ["--model", str(model)]
    ports = free_ports(3)
    command = [
        sys.executable, "-m", "trtllm_av.triton_model_repo.serve", "--json", *what,
        "--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--metrics-port", str(ports[2]),
        "--start-timeout", str(START_SECONDS), *arguments,
    ]  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()[-4000:]
        where = json.loads(line)
        yield Server(process, where["http"], where["grpc"], where["metrics"], where["pid"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def tensors(fields: dict[str, Any], *, has_rows: bool) -> list[Any]:
    """gRPC inputs; a value is one row, or an array that has its rows already."""
    from tritonclient.grpc import InferInput

    inputs = []
    for name, value in fields.items():
        dtype = INPUTS.get(name, "INT32")
        if isinstance(value, np.ndarray):
            array = value.astype(DTYPES[dtype])
        else:
            values = value if isinstance(value, list) else [value]
            if dtype == "BYTES":
                values = [one.encode() if isinstance(one, str) else one for one in values]
            array = np.array(values, dtype=DTYPES[dtype])
            array = array[None] if has_rows else array
        tensor = InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class Streams:
    """One gRPC stream connection that carries any number of requests."""

    def __init__(self, server: Server) -> None:
        from tritonclient.grpc import InferenceServerClient

        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self._responses.put((result, error)))

    def send(self, model: str, fields: dict[str, Any], request_id: str = "") -> None:
        self.client.async_stream_infer(
            model, tensors(fields, has_rows=model != "llm"), request_id=request_id,
            enable_empty_final_response=True,
        )  # fmt: skip

    def next(self, seconds: float = 60.0) -> tuple[Any, bool]:
        """The next response and whether it is its request's last; errors are raised."""
        result, error = self._responses.get(timeout=seconds)
        if error is not None:
            raise error
        return result, result.get_response().parameters["triton_final_response"].bool_param

    def collect(self, model: str, fields: dict[str, Any]) -> list[Any]:
        """All responses with outputs of one request."""
        self.send(model, fields)
        results = []
        is_last = False
        while not is_last:
            result, is_last = self.next()
            if result.get_response().outputs:
                results.append(result)
        return results

    def close(self, *, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
