"""Forced load: SmolLM2 under step costs from flat to steep; what is verified, and at what speed.

A table of step costs is given instead of measured ones, so that the decision sees the load of a busy
accelerator; the machine's own speed stays what it is. At the steep end depth 0 must be chosen and the
tokens per second be those of decoding without speculation, less the probes. Modes take turns; the speed
of a table is the median of its repetitions, relative to the median without speculation.

``python -m benchmarks.forced_load [--output PATH]``
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig
from trtllm_av.runtime.prompts import demo_prompts

#: Cost of one more verified token, as a share of the cost of the first.
SLOPES = (0.001, 0.03, 0.1, 0.4, 5.0)


def step_costs(slope: float) -> dict[str, Any]:
    return {
        "unit": "ms",
        "graph_limit_tokens": 0,
        "verify_ms_by_tokens": [[1, 10.0], [256, 10.0 * (1 + 255 * slope)]],
        "draft_ms_by_requests": [[1, 3.0], [8, 4.0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculative-config", default="{}")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    loaded = load_checkpoint("smollm2")
    config = SpeculativeConfig.from_json(args.speculative_config)
    llms: dict[float | None, LLM] = {None: LLM(loaded, None, max_seq_len=1024)}
    for slope in SLOPES:
        llms[slope] = LLM(loaded, config, max_seq_len=1024, cost_table=step_costs(slope))
    texts = [record.prompt for record in demo_prompts() if record.prompt][:8]
    params = [
        SamplingParams(
            max_tokens=args.tokens, temperature=args.temperature, seed=n, ignore_eos=True
        )
        for n in range(len(texts))
    ]
    rates: dict[float | None, list[float]] = {slope: [] for slope in llms}
    for turn in range(1 + args.repetitions):
        for slope, llm in llms.items():
            prompts = [llm.apply_chat_template(text) for text in texts]
            llm.reset_report()
            started = time.perf_counter()
            llm.generate(prompts, params)
            if turn > 0:  # the first turn warms up and fits the estimator
                seconds = time.perf_counter() - started
                rates[slope].append(len(texts) * args.tokens / seconds)
    plain = median(rates[None])
    rows = []
    for slope in SLOPES:
        report = llms[slope].report()
        rows.append(
            {
                "slope": slope,
                "tokens_per_second": median(rates[slope]),
                "relative_to_plain": median(rates[slope]) / plain,
                "relative_min": min(rates[slope]) / plain,
                "relative_max": max(rates[slope]) / plain,
                "mean_verify_len": report.mean_verify_len,
                "mean_depth": report.mean_depth,
                "drafted": report.drafted,
                "verified": report.verified,
                "accepted": report.accepted,
                "probes": report.probes,
                "rounds": report.rounds,
            }
        )
    result = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "plain_tokens_per_second": plain,
        "plain_spread": [min(rates[None]), max(rates[None])],
        "rows": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"no speculation: {plain:.1f} tokens/s")
    print("slope   verify len   depth   verified/drafted   tokens/s, relative")
    for row in rows:
        print(
            f"{row['slope']:<7} {row['mean_verify_len']:>10.2f} {row['mean_depth']:>7.2f} "
            f"{row['verified']:>9}/{row['drafted']:<8} {row['relative_to_plain']:>9.3f}"
        )


if __name__ == "__main__":
    main()
