"""Serving on one GPU: SmolLM2 with its head, without speculation, with fixed K, and adaptively.

Objective: throughput against tokens per second per user at several concurrencies, and where the time of a
round goes. Invariants: modes take turns within a repetition; prompts are computed and rounds warmed up
before the clock starts; every row emits until the end, so that the load is constant; the adaptive engine
has learnt for 200 rounds before anything is timed. With ``--target-load llama-8b`` SmolLM2 and its head
still decide every token, and each verify pass also runs the forward pass of a random-weight 8B-shaped
target over the same packed rows: step costs are those of an 8B model, acceptance is real.

    python -m benchmarks.serve --prompts DIR --output benchmarks/results/serve_h200.json
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_report import compare, print_tables, save_plot, summarise
from benchmarks.serve_setup import ServingSetup, environment, read_prompts

CONCURRENCIES = (1, 4, 16, 64, 128, 256, 512)
MODES = ("none", "1", "2", "3", "5", "7", "adaptive")
TRAINING_ROUNDS, TRAINING_REQUESTS = 200, 64
SLOW_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--prompts", type=Path, required=True, help="folder of JSON Lines with 'prompt'"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file; resumed if it is there"
    )
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    parser.add_argument("--target-load", choices=("llama-8b",), help="a second model in every pass")
    parser.add_argument("--concurrency", type=_integers, default=CONCURRENCIES)
    parser.add_argument("--modes", type=lambda text: tuple(text.split(",")), default=MODES)
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--warm-up", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-prompt", type=int, default=160, help="longer prompts are left out")
    parser.add_argument(
        "--min-prompts",
        type=int,
        default=8,
        help="of a run: few requests are served in more passes",
    )
    parser.add_argument(
        "--max-seconds", type=float, default=1e9, help="stop there; run again to go on"
    )
    args = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(1)  # the host's arrays are small: threads cost more than they bring
    settings: dict[str, Any] = {
        "rounds": args.rounds,
        "warm_up": args.warm_up,
        "temperature": args.temperature,
        "target_load": args.target_load,
        "max_prompt": args.max_prompt,
        "training_rounds": TRAINING_ROUNDS,
    }

    def passes(concurrency: int) -> int:
        return max(args.min_prompts // concurrency, 1)

    report = _resume(args.output, settings)
    # With more prompts than before only the runs of few requests are measured again.
    report["runs"] = [run for run in report["runs"] if run["passes"] == passes(run["concurrency"])]
    done = {(run["repetition"], run["concurrency"], run["mode"]) for run in report["runs"]}
    wanted = sorted(
        (
            (repetition, concurrency, mode)
            for repetition in range(args.repetitions)
            for concurrency in args.concurrency
            for mode in args.modes
            if (repetition, concurrency, mode) not in done
        ),
        key=lambda run: _is_slow(*run),
    )
    if wanted:
        setup = ServingSetup(
            read_prompts(args.prompts, args.max_prompt),
            max_requests=max(args.concurrency),
            max_rounds=args.rounds + args.warm_up,
            temperature=args.temperature,
            target_load=args.target_load,
        )
        training = min(TRAINING_REQUESTS, max(args.concurrency))
        levels = sorted({concurrency for _, concurrency, _ in wanted} | {training})
        report["environment"] = environment()
        report["profile"] = _joined(report.get("profile"), setup.profile(levels))
        setup.train(TRAINING_ROUNDS, training)
        # What was loaded is here to stay: without this a collection scans it in the middle of a round.
        gc.collect()
        gc.freeze()
        report["setup_seconds"] = round(time.monotonic() - started, 1)
        print(f"set up in {report['setup_seconds']} s", flush=True)
    for repetition, concurrency, mode in wanted:
        if time.monotonic() - started > args.max_seconds:
            print("time is up; run the same command again to go on")
            break
        run = setup.measure(
            mode,
            concurrency,
            args.warm_up,
            args.rounds,
            seed=repetition,
            passes=passes(concurrency),
        )
        report["runs"].append({"repetition": repetition, **run})
        report["cost_drift"] = setup.drift()
        _save(report, args.output)
    if args.plot is not None:
        save_plot(report, args.plot)
    print_tables(report)
    print(f"{time.monotonic() - started:.1f} s in all")


def _is_slow(repetition: int, concurrency: int, mode: str) -> bool:
    """Repeated runs of large passes come last, for a table that runs out of time."""
    tokens = concurrency * (1 + int(mode)) if mode.isdigit() else concurrency
    return repetition > 0 and tokens > SLOW_TOKENS


def _save(report: dict[str, Any], path: Path) -> None:
    report["table"] = summarise(report["runs"])
    report["comparison"] = compare(report["table"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The profile ``now`` with the request buckets that only ``before`` has."""
    measured = {bucket["requests"] for bucket in now["buckets"]}
    kept = [] if before is None else before["buckets"]
    kept = [bucket for bucket in kept if bucket["requests"] not in measured]
    return now | {"buckets": sorted(kept + now["buckets"], key=lambda b: b["requests"])}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _resume(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The report at ``path`` if its settings are these, else an empty one."""
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        if report["settings"] == settings:
            return report
        raise SystemExit(f"{path} was measured with other settings; move it away")
    return {"settings": settings, "runs": []}


if __name__ == "__main__":
    main()
