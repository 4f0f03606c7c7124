"""Load on a Triton server by ``perf_analyzer``, beside the same requests through the Python API.

For each mode and concurrency the same greedy requests run in turns through an ``EngineThread`` in this
process and through the model ``llm`` of ``trtllm-av-serve``, streamed over gRPC; both keep that many requests
in flight. ``python -m benchmarks.triton_load --perf-analyzer FILE [--json]`` prints, as medians of the repetitions
with the least and the most: tokens per second, time to first token and inter-token latency (both means over the
requests; the latter (last − first response) / (tokens − 1)), and the server's overhead.

``perf_analyzer`` is in the wheel ``tritonclient==2.51.0`` (``*.data/data/bin``); the libraries that it needs are
in ``nvidia-pytriton``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch

from benchmarks.triton_server import RunningServer, run_server
from trtllm_av.runtime.engine_thread import EngineThread, Response
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.loading import load_engine
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig
from trtllm_av.runtime.prompts import demo_prompts
from trtllm_av.runtime.request import TokenEvent


@dataclass
class Timing:
    """One run of all requests: tokens, and seconds as (start, first response, last response) each."""

    tokens: int
    requests: list[tuple[float, float, float]]

    @property
    def tokens_per_second(self) -> float:
        starts, _, ends = zip(*self.requests, strict=True)
        return self.tokens / (max(ends) - min(starts))

    @property
    def first_token_ms(self) -> float:
        return 1e3 * sum(first - start for start, first, _ in self.requests) / len(self.requests)

    @property
    def inter_token_ms(self) -> float:
        spans = sum(last - first for _, first, last in self.requests)
        return 1e3 * spans / max(self.tokens - len(self.requests), 1)


def run_api(
    thread: EngineThread, prompts: Sequence[list[int]], concurrency: int, tokens: int
) -> Timing:
    """All prompts through the engine, ``concurrency`` at a time."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    responses: queue.SimpleQueue[tuple[int, float, Response]] = queue.SimpleQueue()
    times: dict[int, list[float]] = {}
    waiting = iter(enumerate(prompts))

    def submit_next() -> None:
        for index, prompt in islice(waiting, 1):
            times[index] = [time.perf_counter()]
            thread.submit(
                prompt, params, lambda r, i=index: responses.put((i, time.perf_counter(), r))
            )

    for _ in range(concurrency):
        submit_next()
    emitted = num_done = 0
    while num_done < len(prompts):
        index, at, response = responses.get()
        if not isinstance(response, TokenEvent):
            raise response
        emitted += len(response.token_ids)
        times[index].append(at)
        if response.finish_reason is not None:
            num_done += 1
            submit_next()
    return Timing(emitted, [(each[0], each[1], each[-1]) for each in times.values()])


def run_perf_analyzer(
    program: Path,
    server: RunningServer,
    prompts: Sequence[str],
    concurrency: int,
    tokens: int,
    work: Path,
) -> Timing:
    """All prompts through the server, ``concurrency`` at a time."""
    data = [
        {"text_input": [prompt], "max_tokens": [tokens], "stream": [True]} for prompt in prompts
    ]
    (work / "input.json").write_text(json.dumps({"data": data}), encoding="utf-8")
    profile = work / "profile.json"
    profile.unlink(missing_ok=True)  # perf_analyzer takes no file that exists
    before = server.metric("nv_llm_output_token_len_sum")
    command = [
        str(program), "-m", "llm", "-u", server.grpc, "-i", "grpc", "--streaming", "--async",
        "--input-data", str(work / "input.json"), "--concurrency-range", str(concurrency),
        "--request-count", str(len(prompts)), "--profile-export-file", str(profile),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"LD_LIBRARY_PATH": str(link_libraries(work))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode or not profile.is_file():
        lines = (done.stderr + done.stdout).splitlines()
        reason = next((line for line in lines if "rror" in line), "it wrote no profile")
        raise UsageError(f"perf_analyzer ended with code {done.returncode}: {reason.strip()}")
    [experiment] = json.loads(profile.read_text(encoding="utf-8"))["experiments"]
    requests = [
        (each["timestamp"] / 1e9, each["response_timestamps"][0] / 1e9, each["response_timestamps"][-1] / 1e9)
        for each in experiment["requests"]
    ]  # fmt: skip
    return Timing(round(server.metric("nv_llm_output_token_len_sum") - before), requests)


def link_libraries(work: Path) -> Path:
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


def summarise(runs: Sequence[Timing]) -> dict[str, object]:
    """Median, least and most of each figure."""
    names = ("tokens_per_second", "first_token_ms", "inter_token_ms")
    values = {name: sorted(getattr(run, name) for run in runs) for name in names}
    figures: dict[str, object] = {
        name: {"median": median(v), "least": v[0], "most": v[-1]} for name, v in values.items()
    }
    return figures | {"tokens": runs[0].tokens}


@dataclass
class Row:
    """One line of the table; ``overhead`` is 1 − server / API in tokens per second, from their medians."""

    mode: str
    concurrency: int
    api: dict[str, object]
    server: dict[str, object]
    overhead: float


def measure(options: argparse.Namespace, mode: str, work: Path) -> list[Row]:
    engine = load_engine(
        "smollm2", SpeculativeConfig.from_json(json.dumps({"av_mode": mode})), max_batch_size=8
    )
    assert engine.tokenizer is not None
    texts = list(islice(cycle(r.prompt for r in demo_prompts() if r.prompt), options.requests))
    ids = [list(engine.tokenizer.encode(text)) for text in texts]
    thread = EngineThread(engine)
    rows = []
    arguments = ["--model", "smollm2", "--layout", "llm", "--av-mode", mode]
    with run_server(work / f"{mode}.log", *arguments) as server:
        for concurrency in options.concurrency:
            api, served = [], []
            for repetition in range(options.repetitions + 1):
                one = run_api(thread, ids, concurrency, options.tokens)
                two = run_perf_analyzer(
                    options.perf_analyzer, server, texts, concurrency, options.tokens, work
                )
                if repetition:  # the first of each is warm-up
                    api.append(one)
                    served.append(two)
            rates = [median(run.tokens_per_second for run in runs) for runs in (api, served)]
            overhead = 1 - rates[1] / rates[0]
            rows.append(Row(mode, concurrency, summarise(api), summarise(served), overhead))
            print(
                f"{mode:9} {concurrency:2}  API {rates[0]:6.1f} tokens/s, server {rates[1]:6.1f}, "
                f"overhead {overhead:.1%}",
                file=sys.stderr,
            )
    thread.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perf-analyzer", type=Path, required=True, help="the program's file")
    parser.add_argument("--modes", nargs="+", default=["adaptive", "off"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for mode in options.modes for row in measure(options, mode, Path(folder))]
    result = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "model": "smollm2, float32, shipped drafter, greedy",
        "requests": options.requests,
        "max_tokens": options.tokens,
        "repetitions": options.repetitions,
        "rows": [asdict(row) for row in rows],
    }
    text = json.dumps(result, indent=1)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
