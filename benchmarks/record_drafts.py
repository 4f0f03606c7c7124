"""Records labelled drafts of SmolLM2 and its shipped heads: rounds as they are served, on one device.

Prompts of several data sets are answered at temperature 1 with top-p .95 and greedily, each with whole
drafts verified and with the product's own trimming, and a smaller part at temperature .3 for the
temperature floor. Greedy answers repeat, so further samples of a prompt continue the first words of a
sampled answer.

``python -m benchmarks.record_drafts --prompts DIR --output DIR [--drafter dspark] [--samples N] [--seconds S]``
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

from benchmarks.drafter_training.answers import Prompt, read_prompts
from benchmarks.drafter_training.generate import chat_marks, opening
from benchmarks.drafter_training.prompts import SYSTEM_TURNS
from benchmarks.drafter_training.source import Source, load_source
from benchmarks.drafter_training.target import FrozenTarget
from benchmarks.recording.drafters import DSparkRows, EagleRows
from benchmarks.recording.rows import DraftRows, collect_rows
from benchmarks.recording.run import RecordedRequest, Sampling, SpeculativeRun
from benchmarks.recording.trimming import ProductTrimming, VerifyAll
from trtllm_av.runtime.errors import AdaptiveVerificationError, UsageError
from trtllm_av.runtime.models.drafters import dspark, eagle
from trtllm_av.runtime.models.drafters.dspark_head import load_dspark_head
from trtllm_av.runtime.models.drafters.eagle_head import load_head
from trtllm_av.runtime.models.drafters.head_file import target_fingerprint

SAMPLED, GREEDY = Sampling(1.0, 0.95), Sampling(0.0)
#: Low enough for the floor to matter; the feature is taken at each candidate for it.
COOL = Sampling(0.3, 0.95, scales=(0.3, 0.5, 0.7, 1.0))
_PREFIX = 24  # tokens of a sampled answer that one more greedy sample starts behind


def step_costs(num_rows: int, num_positions: int) -> dict[str, object]:
    """Costs under which about half of the drafts are worth verifying."""
    last = num_rows * (num_positions + 1)
    sizes = [1, 2, 4, *range(8, last + 8, 8)]
    return {
        "unit": "ms",
        "graph_limit_tokens": last + 8,
        "verify_ms_by_tokens": [[size, 5.0 + 12.0 * size / num_rows / 8] for size in sizes],
        "draft_ms_by_requests": [[1, 0.9], [num_rows + 1, 2.5]],
    }


class Recorder:
    """The loaded models, and one run at a time over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.source = load_source(options.model)
        dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
        self.target = FrozenTarget(
            self.source.weights, self.source.config, dtype=dtype, device=options.device
        )
        self.drafter = options.drafter
        path = options.head or _packaged_head(self.drafter, self.target)
        load = {"eagle": load_head, "dspark": load_dspark_head}[self.drafter]
        head, draft_to_target = load(path, dtype)
        self.head = head.to(options.device)
        self.draft_to_target = draft_to_target.to(options.device)
        self.prompts = read_prompts(options.prompts)
        self.data_sets = sorted({prompt.data_set for prompt in self.prompts})
        self.encoded = [_encode(self.source, prompt) for prompt in self.prompts]
        longest = max(map(len, self.encoded)) + options.tokens
        self.capacity = -(-(longest + 2 * options.positions + 2) // 64) * 64

    def requests(
        self, samples: int, answers: dict[tuple[int, int], list[int]] | None = None
    ) -> tuple[list[RecordedRequest], list[int]]:
        """Shuffled requests, and the prompt of each; later samples start behind words of ``answers``."""
        pairs = [(p, s) for p in range(len(self.prompts)) for s in range(samples)]
        random.Random(self.options.seed).shuffle(pairs)
        requests = []
        for number, (p, s) in enumerate(pairs):
            prefix = answers.get((p, s), [])[: _PREFIX * s] if answers is not None else []
            prompt = self.encoded[p] + prefix[: self.options.tokens // 2]
            room = self.options.tokens - len(prompt) + len(self.encoded[p])
            requests.append(RecordedRequest(number, prompt, room))
        return requests, [p for p, _ in pairs]

    def record(
        self, name: str, sampling: Sampling, *, is_trimmed: bool, samples: int, seconds: float,
        answers: dict[tuple[int, int], list[int]] | None = None,
    ) -> tuple[DraftRows, dict[tuple[int, int], list[int]]]:  # fmt: skip
        """One run: its rows, and its answers by (prompt, sample)."""
        options, began = self.options, time.monotonic()
        requests, prompt_of = self.requests(samples, answers)
        sizes = {"num_rows": options.rows, "num_positions": options.positions}
        rows_of = {"eagle": EagleRows, "dspark": DSparkRows}[self.drafter]
        drafter = rows_of(
            self.head, self.draft_to_target, self.target, capacity=self.capacity, **sizes
        )
        costs = step_costs(options.rows, options.positions)
        run = SpeculativeRun(
            self.target,
            drafter,
            ProductTrimming(costs, options.positions, options.rows) if is_trimmed else VerifyAll(),
            sampling,
            capacity=self.capacity,
            end_tokens=[chat_marks(self.source).turn_end],
            seed=options.seed,
            **sizes,
        )
        num_tokens = run.run(requests, seconds)
        rows = collect_rows(
            run.records,
            [self.data_sets.index(self.prompts[p].data_set) for p in prompt_of],
            {
                "run": name,
                "drafter": self.drafter,
                "data_sets": self.data_sets,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "scales": list(sampling.scales),
                "is_trimmed": is_trimmed,
                "num_positions": options.positions,
                "num_rows": options.rows,
                "dtype": str(self.target.dtype).removeprefix("torch."),
                "seed": options.seed,
            },
        )
        rows.save(options.output / f"{self.drafter}_{name}.npz")
        pace = time.monotonic() - began
        print(
            f"{name}: {len(rows)} drafts, {num_tokens} tokens, {len(run.records)} rounds, "
            f"{pace:.1f} s, acceptance {(rows.label == 1).sum() / (rows.label < 2).sum():.3f}",
            flush=True,
        )
        sample_of: dict[int, int] = {}
        kept = {}
        for request, p in zip(requests, prompt_of, strict=True):
            sample_of[p] = sample_of.get(p, -1) + 1
            kept[p, sample_of[p]] = request.answer
        return rows, kept


def _packaged_head(drafter: str, target: FrozenTarget) -> Path:
    """The weights that ship for ``target``; UsageError if there are none."""
    heads = {"eagle": eagle.PACKAGED_HEADS, "dspark": dspark.PACKAGED_HEADS}[drafter]
    name = heads.get(target_fingerprint(target.embed, target.config.vocab_size))
    if name is None:
        raise UsageError(f"--drafter {drafter} has no weights for this target; give --head FILE")
    return Path(eagle.__file__).parent / "weights" / name


def _encode(source: Source, prompt: Prompt) -> list[int]:
    return source.encode(opening(SYSTEM_TURNS[0], prompt.text, True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--prompts", type=Path, required=True, help='folder of JSON Lines, {"dataset", "prompt"}')
    add("--output", type=Path, required=True)
    add("--model", default="smollm2")
    add("--drafter", choices=("eagle", "dspark"), default="eagle")
    add("--head", type=Path, help="weights of the drafting head; default: the shipped ones")
    add("--device", type=torch.device, default=torch.device("cuda"))
    add("--rows", type=int, default=64, help="requests at once")
    add("--positions", type=int, default=7)
    add("--samples", type=int, default=8, help="answers to each prompt")
    add("--tokens", type=int, default=256, help="longest answer")
    add("--seconds", type=float, default=1e9, help="time for all runs; waiting requests stay out")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        recorder = Recorder(options)
        share, samples = options.seconds / 8, options.samples
        _, answers = recorder.record(
            "sampled", SAMPLED, is_trimmed=False, samples=samples, seconds=2.5 * share
        )
        for name, sampling, is_trimmed, part, prefixes in (
            ("greedy", GREEDY, False, 2.0, answers),
            ("cool", COOL, False, 0.5, None),
            ("sampled_trimmed", SAMPLED, True, 1.5, None),
            ("greedy_trimmed", GREEDY, True, 1.5, answers),
        ):
            recorder.record(
                name, sampling, is_trimmed=is_trimmed, samples=samples,
                seconds=part * share, answers=prefixes,
            )  # fmt: skip
    except AdaptiveVerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
