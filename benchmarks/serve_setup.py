"""Engines that share one target on one GPU, and one timed run of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serve_share import adaptive_ms
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.engines.cuda.cost_files import to_json
from trtllm_av.runtime.engines.cuda.costs import DeviceCosts
from trtllm_av.runtime.engines.cuda.create import (
    DraftHead,
    find_head,
    resolve_device,
)
from trtllm_av.runtime.engines.cuda.eagle import DeviceEagle
from trtllm_av.runtime.engines.cuda.engine import CudaEngine
from trtllm_av.runtime.engines.cuda.executor import CudaExecutor
from trtllm_av.runtime.engines.cuda.profile import measure_costs
from trtllm_av.runtime.engines.cuda.round import DeviceRound
from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.engines.cuda.state import DeviceState
from trtllm_av.runtime.engines.cuda.target import DeviceTarget
from trtllm_av.runtime.engines.cuda.weights import DecoderWeights
from trtllm_av.runtime.models.checkpoint import CheckpointFiles, LoadedModel
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.llama import LlamaModel
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig

NUM_POSITIONS = 7
PREFILL_CHUNK = 1 << 16  # all prompts in one pass
SHORT_CONTEXT = 96
EIGHT_BILLION = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)


def read_prompts(folder: Path, max_tokens: int) -> list[list[int]]:
    """Token ids of all prompts in ``folder``/*.jsonl that have at most ``max_tokens`` tokens.

    A line holds ``prompt`` (text, wrapped in the chat template) or ``prompt_token_ids``.
    """
    rows = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    if not rows or not all(row.get("prompt") or row.get("prompt_token_ids") for row in rows):
        raise SystemExit(f"{folder} holds no *.jsonl with a prompt in each line")
    if all("prompt_token_ids" in row for row in rows):
        prompts = [row["prompt_token_ids"] for row in rows]
    else:
        tokenizer: Any = CheckpointFiles.find("smollm2").tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            for row in rows
        ]
    prompts = [prompt for prompt in prompts if len(prompt) <= max_tokens]
    if not prompts:
        raise SystemExit(
            f"no prompt of {folder} has at most {max_tokens} tokens; allow longer ones"
        )
    return prompts


def environment() -> dict[str, str]:
    """The card and the versions that the figures belong to."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


class ServingSetup:
    """One target, its head, and an engine for each way of speculating."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        *,
        max_requests: int,
        max_rounds: int,
        temperature: float,
        target_load: str | None,
        device: str = "cuda",
    ) -> None:
        self._prompts = prompts
        self._temperature = temperature
        self._max_tokens = 1 + (max_rounds + 4) * (1 + NUM_POSITIONS)
        self._max_seq_len = max(map(len, prompts)) + self._max_tokens
        max_len = self._max_seq_len + 2 * (1 + NUM_POSITIONS)
        where = resolve_device(device)
        loaded = load_without_tokenizer("smollm2")
        head = find_head(SpeculativeConfig(method="eagle"), loaded)
        weights = DecoderWeights.copy_of(loaded.model, where, torch.bfloat16)
        sizes = {"num_slots": max_requests, "max_len": max_len}
        target = DeviceTarget(loaded.config, weights, **sizes)
        load = None
        if target_load is not None:
            random = DecoderWeights.random(EIGHT_BILLION, where, torch.bfloat16)
            load = DeviceTarget(EIGHT_BILLION, random, **sizes)
        self._plain = _executor(target, None, load)
        self._drafting = _executor(target, head, load)
        self._num_slots = max_requests
        self._sampling = Sampling.PLAIN if temperature > 0.0 else Sampling.GREEDY
        self._engines: dict[str, CudaEngine] = {}
        self._adaptive_ms: dict[int, tuple[float, float]] = {}
        self._costs: DeviceCosts | None = None

    def profile(self, concurrencies: Sequence[int]) -> dict[str, Any]:
        """Measure step costs at these request counts and capture every graph of them."""
        with torch.inference_mode():
            self._costs = measure_costs(
                self._drafting,
                kv_lens=(min(SHORT_CONTEXT, self._max_seq_len // 2), self._max_seq_len),
                sampling=self._sampling,
                request_buckets=concurrencies,
            )
            for concurrency in concurrencies:
                self._adaptive_ms[concurrency] = adaptive_ms(self._drafting, concurrency)
        return to_json(self._costs)

    def train(self, rounds: int, concurrency: int) -> None:
        """Let the adaptive engine learn, untimed."""
        self._serve(self._engine("adaptive"), concurrency, None, rounds, 0, seed=10_000)

    def drift(self) -> dict[str, float]:
        """How far live step costs went from the profile."""
        assert self._costs is not None
        return self._costs.drift()

    def measure(
        self, mode: str, concurrency: int, warm_up: int, rounds: int, *, seed: int, passes: int
    ) -> dict[str, Any]:
        """One run of ``mode`` ("none", a fixed K, "adaptive"): ``passes`` times with other prompts."""
        limit = int(mode) if mode.isdigit() else None
        found = [
            self._serve(
                self._engine(mode), concurrency, limit, warm_up, rounds, seed=seed * passes + turn
            )
            for turn in range(passes)
        ]
        return {
            "mode": mode,
            "concurrency": concurrency,
            "passes": passes,
            **self._figures(found, concurrency, is_adaptive=mode == "adaptive"),
        }

    def _figures(
        self, passes: list[dict[str, float]], concurrency: int, *, is_adaptive: bool
    ) -> dict[str, Any]:
        total = {name: sum(one[name] for one in passes) for name in passes[0]}
        rounds, seconds = total["rounds"], total["seconds"]
        rate = total["tokens"] / seconds
        mean_depth = total["depths"] / rounds
        per_position, per_round = self._adaptive_ms.get(concurrency, (0.0, 0.0))
        adaptive_part = (per_round + per_position * mean_depth) * rounds
        return {
            "tokens_per_second": rate,
            "tokens_per_second_per_user": rate / concurrency,
            "round_ms": 1e3 * seconds / rounds,
            "device_ms": total["device_ms"] / rounds,
            "draft_ms": total["draft_ms"] / rounds,
            "host_ms": 1e3 * (seconds - total["wait_seconds"]) / rounds,
            "host_share": max(1.0 - total["device_ms"] / (1e3 * seconds), 0.0),
            "av_share": adaptive_part / (1e3 * seconds) if is_adaptive else 0.0,
            "mean_depth": mean_depth,
            "mean_verify_len": total["verified"] / (rounds * concurrency),
            "forecast": (
                total["expected_accepted"] / total["checked_accepted"]
                if total["checked_accepted"]
                else None
            ),
            **{name: int(total[name]) for name in ("accepted", "verified", "drafted", "probes")},
        }

    def _engine(self, mode: str) -> CudaEngine:
        kind = "fixed" if mode.isdigit() else mode
        if kind not in self._engines:
            av_mode: Any = {"none": "off", "fixed": "fixed", "adaptive": "adaptive"}[kind]
            controller = AdaptiveController(
                av_mode,
                0 if kind == "none" else NUM_POSITIONS,
                self._num_slots,
                self._costs if kind == "adaptive" else None,
            )
            self._engines[kind] = CudaEngine(
                self._plain if kind == "none" else self._drafting,
                controller,
                max_seq_len=self._max_seq_len,
                prefill_chunk=PREFILL_CHUNK,
                name=kind,
            )
        return self._engines[kind]

    def _serve(
        self,
        engine: CudaEngine,
        concurrency: int,
        limit: int | None,
        warm_up: int,
        rounds: int,
        *,
        seed: int,
    ) -> dict[str, float]:
        """Rounds of ``concurrency`` requests; sums over those behind the warm-up."""
        ids = [
            engine.submit(
                self._prompts[(seed * concurrency + n) % len(self._prompts)],
                SamplingParams(
                    max_tokens=self._max_tokens,
                    temperature=self._temperature,
                    seed=1000 * seed + n,
                    ignore_eos=True,
                    num_speculative_tokens=limit,
                ),
            )
            for n in range(concurrency)
        ]
        has_started: set[int] = set()
        while len(has_started) < concurrency:
            has_started.update(event.request_id for event in engine.step())
        for _ in range(warm_up):
            engine.step()
        engine.reset_report()
        before = (engine.device_ms, engine.draft_ms, engine.wait_seconds)
        num_tokens = 0
        started = time.perf_counter()
        for _ in range(rounds):
            num_tokens += sum(len(event.token_ids) for event in engine.step())
        seconds = time.perf_counter() - started
        report = engine.report()
        after = (engine.device_ms, engine.draft_ms, engine.wait_seconds)
        device_ms, draft_ms, wait_seconds = (b - a for a, b in zip(before, after, strict=True))
        for request_id in ids:
            engine.cancel(request_id)
        while engine.has_work:
            engine.step()
        return {
            "rounds": rounds,
            "tokens": num_tokens,
            "seconds": seconds,
            "device_ms": device_ms,
            "draft_ms": draft_ms,
            "wait_seconds": wait_seconds,
            "depths": report.mean_depth * report.rounds,
            "accepted": report.accepted,
            "verified": report.verified,
            "drafted": report.drafted,
            "probes": report.probes,
            "expected_accepted": report.expected_accepted,
            "checked_accepted": report.checked_accepted,
        }


def _executor(
    target: DeviceTarget, head: DraftHead | None, load: DeviceTarget | None
) -> CudaExecutor:
    drafter = None if head is None else DeviceEagle(head.head, head.draft_to_target, target)
    return CudaExecutor(
        DeviceRound(
            target,
            drafter,
            DeviceState(target.cache.num_slots, target.device),
            num_positions=1 if head is None else NUM_POSITIONS,
            load=load,
        )
    )


def load_without_tokenizer(name: str) -> LoadedModel:
    """A checkpoint for prompts that are token ids already."""
    files = CheckpointFiles.find(name)
    model = LlamaModel(files.config, files.tensors(), torch.float32)
    return LoadedModel(model, files.config, None, files.digest(), ())
