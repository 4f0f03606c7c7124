"""Load on a Triton server by ``perf_analyzer``, beside the same requests through the Python API.

For each number of engine threads, mode and concurrency the same greedy requests, the demo's prompts as chats,
run in turns through an ``EngineThread`` in this process and through the model ``llm`` of ``trtllm-av-serve``,
streamed over gRPC. ``python -m benchmarks.triton_load --perf-analyzer FILE [--output JSON]`` prints a table of
medians of the repetitions with the least and the most; ``overhead`` is 1 − server / API in tokens per second of
the whole run, and ``full`` the same while every place is taken (``LoadRun``).

Client, server and engine share the machine. An engine of one thread leaves them the other cores, as one
on an accelerator does; an engine with a thread a core competes with them for its own.

``perf_analyzer`` is in the wheel ``tritonclient==2.51.0`` (``*.data/data/bin``); the libraries that it needs are
in ``nvidia-pytriton``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.triton_clients import run_api, run_perf_analyzer
from benchmarks.triton_server import run_server
from benchmarks.triton_timing import LoadRun
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engine_thread import EngineThread
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.params import SpeculativeConfig
from trtllm_av.runtime.prompts import demo_prompts

FIGURES = (
    "tokens_per_second", "full_tokens_per_second", "first_token_ms", "inter_token_ms",
    "mean_in_flight", "seconds",
)  # fmt: skip


@dataclass
class Row:
    """One line of the table; overheads from the medians."""

    engine_threads: int
    mode: str
    concurrency: int
    api: dict[str, Any]
    server: dict[str, Any]
    overhead: float
    full_overhead: float


def summarise(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Median, least and most of each figure; median CPU seconds by process."""
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [round(getattr(run, name), 2) for run in runs]
        figures[name] = {
            "median": round(median(values), 2), "least": min(values), "most": max(values),
        }  # fmt: skip
    figures["cpu_seconds"] = {
        name: round(median(run.cpu_seconds[name] for run in runs), 2)
        for name in runs[0].cpu_seconds
    }
    return figures | {"tokens": sorted({run.tokens for run in runs})}


def compare(threads: int, mode: str, api: Sequence[LoadRun], server: Sequence[LoadRun]) -> Row:
    one, two = summarise(api), summarise(server)

    def lost(name: str) -> float:
        return float(round(1 - two[name]["median"] / one[name]["median"], 4))

    overheads = lost("tokens_per_second"), lost("full_tokens_per_second")
    return Row(threads, mode, api[0].concurrency, one, two, *overheads)


def measure(options: argparse.Namespace, threads: int, mode: str, work: Path) -> Iterator[Row]:
    torch.set_num_threads(threads)
    speculation = SpeculativeConfig.from_json(json.dumps({"av_mode": mode}))
    llm = LLM("smollm2", speculative_config=speculation, max_batch_size=8)
    chats = [llm.apply_chat_template(record.prompt) for record in demo_prompts() if record.prompt]
    texts = [llm.tokenizer.decode(chat) for chat in chats]
    thread = EngineThread(llm.engine)
    arguments = ["--model", "smollm2", "--layout", "llm", "--av-mode", mode]
    environment = {"OMP_NUM_THREADS": str(threads)}
    with run_server(work / "server.log", *arguments, environment=environment) as server:
        for concurrency in options.concurrency:
            count = concurrency * options.requests_per_place
            ids, prompts = (list(islice(cycle(each), count)) for each in (chats, texts))
            api, served = [], []
            for repetition in range(options.repetitions + 1):
                one = run_api(thread, ids, concurrency, options.tokens)
                two = run_perf_analyzer(
                    options.perf_analyzer, server, prompts, concurrency, options.tokens, work
                )
                if repetition:  # the first of each is warm-up
                    api.append(one)
                    served.append(two)
            yield compare(threads, mode, api, served)
    thread.close()


HEADER = (
    "| engine threads | mode | concurrency | API, tokens/s | server, tokens/s | overhead | full "
    "| time to first token, ms | inter-token latency, ms | both of the API, ms |\n|" + "---|" * 10
)


def line(row: Row) -> str:
    """A row of the table in Markdown."""

    def spread(figures: dict[str, Any], name: str, digits: int = 0) -> str:
        low, mid, high = (figures[name][key] for key in ("least", "median", "most"))
        return f"{mid:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"

    cells = [
        str(row.engine_threads), row.mode, str(row.concurrency),
        spread(row.api, "tokens_per_second"), spread(row.server, "tokens_per_second"),
        f"{100 * row.overhead:.1f} %", f"{100 * row.full_overhead:.1f} %",
        spread(row.server, "first_token_ms"), spread(row.server, "inter_token_ms", 1),
        f"{row.api['first_token_ms']['median']:.0f}, {row.api['inter_token_ms']['median']:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perf-analyzer", type=Path, required=True, help="the program's file")
    parser.add_argument("--engine-threads", type=int, nargs="+", default=[1, os.cpu_count()])
    parser.add_argument("--modes", nargs="+", default=["adaptive", "off"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests-per-place", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    print(HEADER)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in options.engine_threads:
            for mode in options.modes:
                for row in measure(options, threads, mode, Path(folder)):
                    rows.append(row)
                    print(line(row), flush=True)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "model": "smollm2, float32, shipped drafter, greedy",
        "requests": f"{options.requests_per_place} x concurrency",
        "max_tokens": options.tokens,
        "repetitions": options.repetitions,
        "rows": [asdict(row) for row in rows],
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
