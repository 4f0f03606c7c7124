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
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_report import compare, print_tables, save_plot, summarise
from benchmarks.serve_setup import NUM_POSITIONS, ServingSetup, environment, read_prompts
from trtllm_av.runtime.cost_profile import write_whole
from trtllm_av.runtime.errors import AdaptiveVerificationError

CONCURRENCIES = (1, 4, 16, 64, 128, 256, 512)
MODES = ("none", "1", "2", "3", "5", "7", "adaptive")
TRAINING_ROUNDS, TRAINING_REQUESTS = 200, 64
SLOW_TOKENS = 1024
_RUN_KEYS = {"repetition", "concurrency", "mode", "passes"}


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
    parser.add_argument("--concurrency", type=_concurrencies, default=CONCURRENCIES)
    parser.add_argument("--modes", type=_modes, default=MODES)
    parser.add_argument("--rounds", type=_positive, default=96)
    parser.add_argument("--warm-up", type=int, default=16)
    parser.add_argument("--repetitions", type=_positive, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-prompt", type=int, default=160, help="longer prompts are left out")
    parser.add_argument(
        "--min-prompts",
        type=_positive,
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
    report = _resume(args.output, settings)
    wanted = _missing(
        report["runs"], args.repetitions, args.concurrency, args.modes, args.min_prompts
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
            passes=_passes(concurrency, args.min_prompts),
        )
        run = {"repetition": repetition, **run}
        report["runs"] = [one for one in report["runs"] if _key(one) != _key(run)] + [run]
        report["cost_drift"] = setup.drift()
        _save(report, args.output)
    if args.plot is not None:
        save_plot(report, args.plot)
    print_tables(report)
    print(f"{time.monotonic() - started:.1f} s in all")


def _passes(concurrency: int, min_prompts: int) -> int:
    return max(min_prompts // concurrency, 1)


def _missing(
    runs: Sequence[dict[str, Any]],
    repetitions: int,
    concurrencies: Sequence[int],
    modes: Sequence[str],
    min_prompts: int,
) -> list[tuple[int, int, str]]:
    """What is to be measured, in order: what ``runs`` lack, or have over fewer prompts."""
    done = {_key(run) for run in runs if run["passes"] >= _passes(run["concurrency"], min_prompts)}
    wanted = itertools.product(range(repetitions), concurrencies, modes)
    return sorted((run for run in wanted if run not in done), key=lambda run: _is_slow(*run))


def _is_slow(repetition: int, concurrency: int, mode: str) -> bool:
    """Repeated runs of large passes come last, for a table that runs out of time."""
    tokens = concurrency * (1 + int(mode)) if mode.isdigit() else concurrency
    return repetition > 0 and tokens > SLOW_TOKENS


def _save(report: dict[str, Any], path: Path) -> None:
    report["table"] = summarise(report["runs"])
    report["comparison"] = compare(report["table"])
    write_whole(path, json.dumps(report, indent=1) + "\n")


def _joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The profile ``now`` with the request buckets that only ``before`` has."""
    measured = {bucket["requests"] for bucket in now["buckets"]}
    kept = [] if before is None else before["buckets"]
    kept = [bucket for bucket in kept if bucket["requests"] not in measured]
    return now | {"buckets": sorted(kept + now["buckets"], key=lambda b: b["requests"])}


def _key(run: dict[str, Any]) -> tuple[int, int, str]:
    return run["repetition"], run["concurrency"], run["mode"]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number ≥ 1")
    return number


def _concurrencies(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in ("none", "adaptive", *map(str, range(1, NUM_POSITIONS + 1))):
            raise argparse.ArgumentTypeError(
                f"mode {mode!r} is not none, adaptive or a K from 1 to {NUM_POSITIONS}"
            )
    return modes


def _resume(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The report at ``path`` if its settings are these, else an empty one."""
    if not path.exists():
        return {"settings": settings, "runs": []}
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        is_same = report["settings"] == settings
        if not all(run.keys() >= _RUN_KEYS for run in report["runs"]):
            raise ValueError("a run is incomplete")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path} is no report to go on with ({error!r}); move it away") from None
    if not is_same:
        raise SystemExit(f"{path} was measured with other settings; move it away")
    return report


if __name__ == "__main__":
    try:
        main()
    except AdaptiveVerificationError as error:
        raise SystemExit(f"error: {error}") from None
