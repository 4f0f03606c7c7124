"""Records rows (feature, Σ min(p, q)) of SmolLM2 and a drafter, for the closed-loop tests.

The engine decodes prompts at T = 1 and verifies every draft; of each judged draft the row holds its
feature, as scored, and the exact probability that the target accepts it, from both laws. Resampled to
a mean acceptance, such rows are workloads whose acceptance is no logistic function of the feature.

``python -m benchmarks.acceptance_rows [--output PATH] [--prompts JSONL …] [--speculative-config JSON]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.runtime.acceptance import overlap_mass
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig
from trtllm_av.runtime.prompts import demo_prompts
from trtllm_av.runtime.sampling import distribution
from trtllm_av.runtime.step import DecodeRows, Drafts, Round, RoundOutcome, RoundPlan, Trim

ROWS = Path(__file__).resolve().parent.parent / "tests" / "data" / "acceptance_rows.npz"


class RecordingRound(Round):
    """A round that also keeps (feature, Σ min(p, q)) of every draft whose predecessors were accepted."""

    features: list[float]
    overlaps: list[float]

    def verify(self, rows: DecodeRows, plan: RoundPlan, drafts: Drafts, trim: Trim) -> RoundOutcome:
        outcome = super().verify(rows, plan, drafts, trim)
        if not drafts.laws:
            return outcome
        lens = trim.verify_lens.long()
        last = rows.history[rows.slots, rows.lens - 1]
        tokens = torch.cat([last[:, None], drafts.tokens], 1)
        packed = torch.arange(tokens.shape[1]) <= lens[:, None]
        # The same pass again: it writes the same keys and values at the same places.
        batch = PackedBatch.pack(tokens[packed], rows.slots, rows.lens - 1, lens + 1)
        logits, _ = self.executor.verify(batch)
        row_of_token, offset = torch.nonzero(packed, as_tuple=True)
        target = distribution(
            logits,
            rows.temperature[row_of_token],
            rows.top_k[row_of_token],
            rows.top_p[row_of_token],
            vocab_size=self.executor.vocab_size,
            dtype=self.dtype,
        )
        judged = (offset < lens[row_of_token]) & (
            offset <= outcome.acceptance.accepted_lens[row_of_token]
        )
        index = torch.nonzero(judged).flatten()
        r, i = row_of_token[index], offset[index]
        self.overlaps += overlap_mass(target.rows(index), drafts.laws, r, i).tolist()
        self.features += drafts.features[r, i, 0].tolist()
        return outcome


def record(
    config: SpeculativeConfig, prompts: list[str], max_tokens: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``feature`` [N] and ``overlap`` [N] of the drafts judged while decoding ``prompts``."""
    llm = LLM("smollm2", config, max_seq_len=1024)
    recorder = llm.engine.round
    recorder.__class__ = RecordingRound
    assert isinstance(recorder, RecordingRound)
    recorder.features, recorder.overlaps = [], []
    params = [SamplingParams(max_tokens=max_tokens, seed=n) for n in range(len(prompts))]
    llm.generate([llm.apply_chat_template(prompt) for prompt in prompts], params)
    return np.array(recorder.features, np.float32), np.array(recorder.overlaps, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-rows", type=int, default=8192)
    parser.add_argument(
        "--speculative-config", default='{"method": "eagle", "enable_adaptive_verification": false}'
    )
    args = parser.parse_args()
    texts = [
        json.loads(line)["prompt"]
        for path in args.prompts
        for line in path.read_text().splitlines()
    ]
    feature, overlap = record(
        SpeculativeConfig.from_json(args.speculative_config),
        texts or [one.prompt for one in demo_prompts() if one.prompt],
        args.max_tokens,
    )
    kept = np.random.default_rng(0).permutation(feature.size)[: args.max_rows]
    np.savez_compressed(args.output, feature=feature[kept], overlap=overlap[kept])
    print(
        f"{args.output}: {kept.size} of {feature.size} rows, mean feature {feature.mean():.2f}, "
        f"mean acceptance {overlap.mean():.3f}"
    )


if __name__ == "__main__":
    main()
