"""Minutes of mixed load on a Triton server: its memory has to stay flat and no request may fail.

``python -m benchmarks.soak [--minutes 10]``: clients send greedy and sampled requests of mixed lengths over gRPC
streams and over HTTP; one in eight leaves in mid-stream. Memory is what the server and its stubs hold by
themselves, taken every second: anonymous and shared memory, without the pages of files, which the kernel
takes back as it likes. Exit code 1 if a request failed, a slot stayed taken, or the mean memory of the last
fifth of the samples differs by more than ``LIMIT`` from that of the first. ``--warm-up`` minutes come before:
every new shape of a batch costs memory once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.triton_server import RunningServer, run_server
from trtllm_av.runtime.errors import MissingDependencyError, UsageError
from trtllm_av.runtime.prompts import demo_prompts

LIMIT = 0.02
SAMPLE_SECONDS = 1.0
LEAVING_SHARE = 1 / 8


@dataclass
class Tally:
    """What all clients saw; ``errors`` counts messages."""

    served: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *, served: int = 0, left: int = 0, error: str | None = None) -> None:
        with self.lock:
            self.served += served
            self.left += left
            if error is not None:
                self.errors[error] += 1


def random_request(chance: random.Random, prompts: list[str]) -> dict[str, Any]:
    """Fields of a request: half of them sampled, 4 to 96 tokens."""
    fields: dict[str, Any] = {
        "text_input": chance.choice(prompts),
        "max_tokens": chance.randint(4, 96),
    }
    if chance.random() < 0.5:
        fields |= {"temperature": 0.8, "top_p": 0.95, "seed": chance.randrange(2**31)}
    return fields


def ask_http(server: RunningServer, fields: dict[str, Any], tally: Tally) -> None:
    url = f"http://{server.http}/v2/models/llm/generate"
    request = urllib.request.Request(url, data=json.dumps(fields).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()
        tally.count(served=1)
    except (urllib.error.URLError, TimeoutError) as error:
        tally.count(error=f"HTTP: {error}")


def ask_grpc(
    server: RunningServer, fields: dict[str, Any], tally: Tally, *, is_leaving: bool
) -> None:
    """One request on a stream of its own; a leaving client cancels after the first response."""
    import numpy as np
    from tritonclient.grpc import InferenceServerClient, InferInput

    kinds = {
        "text_input": ("BYTES", np.object_), "max_tokens": ("INT32", np.int32),
        "temperature": ("FP32", np.float32), "top_p": ("FP32", np.float32),
        "seed": ("UINT64", np.uint64), "stream": ("BOOL", np.bool_),
    }  # fmt: skip
    inputs = []
    for name, value in {**fields, "stream": True}.items():
        dtype, kind = kinds[name]
        array = np.array([value.encode() if isinstance(value, str) else value], dtype=kind)
        inputs.append(InferInput(name, [1], dtype))
        inputs[-1].set_data_from_numpy(array)
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer("llm", inputs, enable_empty_final_response=True)
    try:
        while True:
            result, error = responses.get(timeout=120)
            if error is not None:
                tally.count(error=f"gRPC: {error}")
                return
            if is_leaving:
                tally.count(left=1)
                return
            if result.get_response().parameters["triton_final_response"].bool_param:
                tally.count(served=1)
                return
    except queue.Empty:
        tally.count(error="gRPC: no response within 120 s")
    finally:
        client.stop_stream(cancel_requests=is_leaving)
        client.close()


def run_client(
    seed: int, server: RunningServer, prompts: list[str], end: float, tally: Tally
) -> None:
    """Requests one after another until ``end``."""
    chance = random.Random(seed)
    while time.monotonic() < end:
        fields = random_request(chance, prompts)
        if chance.random() < 0.5:
            ask_http(server, fields, tally)
        else:
            ask_grpc(server, fields, tally, is_leaving=chance.random() < 2 * LEAVING_SHARE)


def group_memory(group: int) -> int:
    """Bytes of all processes of a process group, those that they share counted once, without files."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) != group:
                continue
            for line in (folder / "smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return total


def growth(samples: list[int]) -> float:
    """Relative change from the first fifth of ``samples`` to the last."""
    fifth = len(samples) // 5
    if fifth == 0:
        raise UsageError(f"{len(samples)} samples are too few to compare; raise --minutes")
    return mean(samples[-fifth:]) / mean(samples[:fifth]) - 1


def soak(minutes: float, warm_up: float, clients: int, model: str) -> dict[str, Any]:
    prompts = [record.prompt for record in demo_prompts() if record.prompt]
    tally = Tally()
    samples: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with run_server(log, "--model", model, "--layout", "llm") as server:
            end = time.monotonic() + 60 * (warm_up + minutes)
            threads = [
                threading.Thread(target=run_client, args=(n, server, prompts, end, tally))
                for n in range(clients)
            ]
            for thread in threads:
                thread.start()
            time.sleep(60 * warm_up)
            while time.monotonic() < end:
                time.sleep(SAMPLE_SECONDS)
                samples.append(group_memory(server.pid))
            for thread in threads:
                thread.join()
            time.sleep(1.0)  # cancelled rows leave within two rounds
            slots = server.metric('nv_trt_llm_request_metrics{model="llm",request_type="active"')
            emitted = server.metric(
                'nv_trt_llm_adaptive_verification_metrics{model="llm",type="emitted"'
            )
    change = growth(samples)
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "model": model,
        "minutes": minutes,
        "warm_up_minutes": warm_up,
        "clients": clients,
        "served": tally.served,
        "left_early": tally.left,
        "tokens": emitted,
        "errors": dict(tally.errors),
        "active_at_end": slots,
        "memory_mib": [round(sample / 2**20, 1) for sample in samples],
        "memory_change": change,
        "passed": not tally.errors and slots == 0 and abs(change) <= LIMIT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=4.0, help="minutes that are not judged")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    try:
        import tritonclient.grpc  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "tritonclient is not installed; pip install '.[triton]'"
        ) from None
    result = soak(options.minutes, options.warm_up, options.clients, options.model)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "memory_mib"}))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, MissingDependencyError) as error:
        sys.exit(f"error: {error}")
