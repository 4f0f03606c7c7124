"""Decoding without speculation: this runtime's scheduler against ``transformers.generate``, same batch.

Both decode greedily from equally long prompts (no padding on either side), f32, the same threads, in
turns; prefill is part of both times. ``python -m benchmarks.decode_speed [--json]`` prints tokens per
second, the median of the repetitions with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trtllm_av.runtime.loading import load_engine
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.prompts import demo_prompts

PROMPT_TOKENS = 16
NEW_TOKENS = 64


def equal_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """``count`` prompts of PROMPT_TOKENS tokens, cut from the demo prompts."""
    text = " ".join(record.prompt or "" for record in demo_prompts())
    ids = tokenizer.encode(text)
    return [ids[i * PROMPT_TOKENS : (i + 1) * PROMPT_TOKENS] for i in range(count)]


def run_ours(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return [tokens[request_id] for request_id in ids]


def run_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    ids = torch.tensor(prompts)
    model.generation_config = GenerationConfig.from_dict(
        {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS,
         "eos_token_id": None, "pad_token_id": 0}
    )  # fmt: skip
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids))
    result: list[list[int]] = output[:, len(prompts[0]) :].tolist()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    loaded = load_checkpoint(smollm2.NAME)
    engine = load_engine(loaded, max_batch_size=args.batch, max_seq_len=256)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        str(smollm2.converted_folder()), dtype=torch.float32, local_files_only=True
    )
    prompts = equal_prompts(loaded.tokenizer, args.batch)
    ours, theirs = run_ours(engine, prompts), run_transformers(reference, prompts)  # warm-up
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    rates: dict[str, list[float]] = {"trtllm_av": [], "transformers": []}
    for _ in range(args.repetitions):
        for name, run in (
            ("trtllm_av", lambda: run_ours(engine, prompts)),
            ("transformers", lambda: run_transformers(reference, prompts)),
        ):
            started = time.perf_counter()
            run()
            rates[name].append(args.batch * NEW_TOKENS / (time.perf_counter() - started))
    result = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "batch": args.batch,
        "dtype": "float32",
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "identical_prompts": same,
        "tokens_per_second": {
            name: {"median": median(values), "min": min(values), "max": max(values)}
            for name, values in rates.items()
        },
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, values in rates.items():
        print(f"{name:14s} {median(values):7.1f} tokens/s ({min(values):.1f}…{max(values):.1f})")
    print(f"greedy tokens identical for {same} of {args.batch} prompts")


if __name__ == "__main__":
    main()
