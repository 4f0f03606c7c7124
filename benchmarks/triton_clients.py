"""The same requests through the Python API and, by ``perf_analyzer``, through the model ``llm`` of a server.

Invariants: both keep ``concurrency`` requests in flight, each answered request being followed by the next of
one common list, in its order. ``perf_analyzer`` does so only with one thread: more of them share the list out
before they start, and those that are done early leave their places empty.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.triton_server import RunningServer
from benchmarks.triton_timing import LoadRun, RequestTiming
from trtllm_av.runtime.engine_thread import EngineThread, Response
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.request import TokenEvent


def run_api(
    thread: EngineThread, prompts: Sequence[list[int]], concurrency: int, tokens: int
) -> LoadRun:
    """All prompts through the engine of this process."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    responses: queue.SimpleQueue[tuple[int, float, Response]] = queue.SimpleQueue()
    requests: dict[int, RequestTiming] = {}
    waiting = iter(enumerate(prompts))

    def submit_next() -> None:
        for index, prompt in islice(waiting, 1):
            requests[index] = RequestTiming(time.perf_counter())
            thread.submit(prompt, params, partial(note, index))

    def note(index: int, response: Response) -> None:
        responses.put((index, time.perf_counter(), response))

    cpu = time.process_time()
    for _ in range(concurrency):
        submit_next()
    num_done = 0
    while num_done < len(prompts):
        index, second, response = responses.get()
        if not isinstance(response, TokenEvent):
            raise response
        requests[index].responses.append((second, len(response.token_ids)))
        if response.finish_reason is not None:
            num_done += 1
            submit_next()
    return LoadRun(concurrency, list(requests.values()), {"engine": time.process_time() - cpu})


def run_perf_analyzer(
    program: Path,
    server: RunningServer,
    prompts: Sequence[str],
    concurrency: int,
    tokens: int,
    work: Path,
) -> LoadRun:
    """All prompts through the server, streamed over gRPC."""
    data = [
        {"text_input": [prompt], "max_tokens": [tokens], "stream": [True]} for prompt in prompts
    ]
    (work / "input.json").write_text(json.dumps({"data": data}), encoding="utf-8")
    profile = work / "profile.json"
    profile.unlink(missing_ok=True)  # perf_analyzer takes no file that exists
    command = [
        str(program), "-m", "llm", "-u", server.grpc, "-i", "grpc", "--streaming", "--async",
        "--input-data", str(work / "input.json"), "--concurrency-range", str(concurrency),
        "--request-count", str(len(prompts)), "--max-threads", "1",
        "--profile-export-file", str(profile),
    ]  # fmt: skip
    before, client = server.cpu_seconds(), _children_cpu_seconds()
    done = subprocess.run(
        command, env=os.environ | {"LD_LIBRARY_PATH": str(_link_libraries(work))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    cpu = {name: second - before[name] for name, second in server.cpu_seconds().items()}
    cpu["client"] = _children_cpu_seconds() - client
    if done.returncode or not profile.is_file():
        lines = (done.stderr + done.stdout).splitlines()
        reason = next((line for line in lines if "rror" in line), "it wrote no profile")
        raise UsageError(f"perf_analyzer ended with code {done.returncode}: {reason.strip()}")
    [experiment] = json.loads(profile.read_text(encoding="utf-8"))["experiments"]
    return LoadRun(concurrency, [_read_request(each) for each in experiment["requests"]], cpu)


def _read_request(entry: dict[str, Any]) -> RequestTiming:
    """A request of the profile; the model says in every response how many tokens there are so far."""
    request = RequestTiming(entry["timestamp"] / 1e9)
    total = 0
    for second, outputs in zip(
        entry["response_timestamps"], entry["response_outputs"], strict=True
    ):
        request.responses.append((second / 1e9, outputs["num_output_tokens"] - total))
        total = outputs["num_output_tokens"]
    return request


def _children_cpu_seconds() -> float:
    """Of children of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _link_libraries(work: Path) -> Path:
    """A folder with the libraries of ``nvidia-pytriton`` under the names that ``perf_analyzer`` looks for."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise UsageError("nvidia-pytriton is not installed; pip install '.[triton]'")
    folder = work / "lib"
    folder.mkdir(exist_ok=True)
    packaged = Path(spec.origin).parents[1] / "nvidia_pytriton.libs"
    for pattern, name in (("libb64-*", "libb64.so.0d"), ("libcudart-*", "libcudart.so.12")):
        for found in packaged.glob(pattern):
            if not (folder / name).exists():
                (folder / name).symlink_to(found)
    return folder
