"""A double of the C++ runtime around an EAGLE engine: packs its inputs, runs it, takes its outputs.

``next_draft_lens`` alone decides what the next step verifies, tokens and paths go round untouched, and a
request whose draft length is 0 is taken for a new one: a running request that has it is an error here.

Invariants: greedy; all requests start together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.builder.eagle_double import EagleDouble
from tests.builder.toy_models import PADDED_VOCAB, target_token


@dataclass
class StepRecord:
    """One step of the runtime double: what was verified and what the engine said."""

    draft_lens: list[int]
    next_draft_lens: list[int]
    trace: Any


class RuntimeDouble:
    """The executor's loop: packs engine inputs from the outputs of the step before, emits tokens."""

    def __init__(self, double: EagleDouble, prompts: Sequence[Sequence[int]]) -> None:
        self._double = double
        self.histories = [list(prompt) for prompt in prompts]
        self.num_prompt = [len(prompt) for prompt in prompts]
        rows = len(prompts)
        self.draft_tokens = np.zeros((rows, double.num_nodes), np.int32)
        self.draft_lens = np.zeros(rows, np.int32)  # context requests
        self.paths = np.tile(double.paths, (rows, 1, 1))
        self.records: list[StepRecord] = []

    def step(self) -> None:
        rows = []
        for request, history in enumerate(self.histories):
            for node in range(self.draft_lens[request] + 1):
                path = next(p for p in self._double.paths if node in p)
                nodes = path[1 : list(path).index(node) + 1]
                drafts = [int(self.draft_tokens[request, n - 1]) for n in nodes]
                row = np.zeros(PADDED_VOCAB, np.float32)
                row[target_token(history + drafts)] = 1
                rows.append(row)
        feeds: dict[str, Any] = {
            "lm_logits": np.stack(rows),
            "draft_tokens": self.draft_tokens,
            "draft_lens": self.draft_lens,
            "draft_paths": self.paths,
            "input_ids": [list(history) for history in self.histories],
            "hidden_states": np.zeros((len(rows), 1)),
        }
        names = {t.name for layer in self._double.graph.layers for t in layer.inputs}
        feeds |= {name: np.zeros(1) for name in names - feeds.keys()}
        out = self._double.graph.run(feeds)
        for request, history in enumerate(self.histories):
            count = out["num_accepted_tokens"][request]
            history.extend(int(token) for token in out["accepted_tokens"][request][:count])
        lens = out["next_draft_lens"]
        assert (lens > 0).all(), f"draft lengths {lens.tolist()} of running requests"
        self.records.append(
            StepRecord(self.draft_lens.tolist(), lens.tolist(), out.get("av_trace"))
        )
        self.draft_tokens = out["next_draft_tokens"]
        self.draft_lens, self.paths = lens.astype(np.int32), out["next_draft_paths"]

    def outputs(self, length: int) -> list[list[int]]:
        """The first ``length`` generated tokens of every request, stepping until they are there."""
        while any(
            len(h) - n < length for h, n in zip(self.histories, self.num_prompt, strict=True)
        ):
            self.step()
        return [
            history[n : n + length]
            for history, n in zip(self.histories, self.num_prompt, strict=True)
        ]
