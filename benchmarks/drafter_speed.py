"""Speed of the shipped drafters on the CPU: none, eagle and dspark on the demo's prompts, in turns.

``python -m benchmarks.drafter_speed [--batch N] [--depths 4 7] [--temperature T] [--output FILE]`` prints
tokens per second (median of the repetitions, with the least and the most), tokens per second of processor
time, which other programs on the machine disturb less, and what was drafted and accepted. Every engine
measures its own step costs; greedy tokens must be the same in all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch

from trtllm_av.runtime.api import LLM, SamplingParams, SpeculativeConfig
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.prompts import demo_prompts

METHODS = ("eagle", "dspark")


def engines(loaded: LoadedModel, depths: list[int], batch: int) -> dict[str, LLM]:
    """One engine without drafts, and per method and depth an adaptive one and one that verifies all."""
    result = {"none": LLM(loaded, max_batch_size=batch)}
    for method in METHODS:
        for depth in depths:
            for mode in ("adaptive", "fixed"):
                config = SpeculativeConfig(
                    method=method,
                    num_speculative_tokens=depth,
                    av_mode=mode,
                    enable_adaptive_verification=mode == "adaptive",
                )
                result[f"{method} {mode} {depth}"] = LLM(loaded, config, max_batch_size=batch)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    loaded = load_checkpoint(smollm2.NAME)
    llms = engines(loaded, args.depths, args.batch)
    records = demo_prompts()[: args.prompts]
    prompts = [llms["none"].apply_chat_template(record.prompt or "") for record in records]
    params = [
        SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=index)
        for index in range(len(prompts))
    ]
    rates: dict[str, list[float]] = {name: [] for name in llms}
    cpu_rates: dict[str, list[float]] = {name: [] for name in llms}
    texts: dict[str, list[list[int]]] = {}
    for repetition in range(args.repetitions + 1):  # the first is the warm-up
        for name, llm in llms.items():
            llm.reset_report()
            started, cpu_started = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            texts[name] = [output.outputs[0].token_ids for output in outputs]
            if repetition:
                count = sum(map(len, texts[name]))
                rates[name].append(count / seconds)
                cpu_rates[name].append(count / cpu_seconds)
    rows = {}
    for name, llm in llms.items():
        report = llm.report()
        rows[name] = {
            "tokens_per_second": {
                "median": round(median(rates[name]), 1),
                "min": round(min(rates[name]), 1),
                "max": round(max(rates[name]), 1),
            },
            "tokens_per_cpu_second": round(median(cpu_rates[name]), 1),
            "tokens_per_row_round": round(report.emitted / max(report.row_rounds, 1), 3),
            "drafted": report.drafted,
            "verified": report.verified,
            "accepted": report.accepted,
            "same_tokens_as_none": sum(
                mine == plain for mine, plain in zip(texts[name], texts["none"], strict=True)
            ),
        }
        print(name, rows[name], flush=True)
    if args.output is not None:
        result = {
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "batch": args.batch,
            "prompts": len(prompts),
            "max_tokens": args.tokens,
            "temperature": args.temperature,
            "engines": rows,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
