"""What reaches the fit, against a model whose every (feature, label) pair is known beforehand.

Target and drafter are tables, both decoded greedily, so that the feature of a draft names its context
and the context says whether the target agrees. A recording that mixes up requests, positions, rounds or
slots pairs a feature with a label that is not its own, or has too many of them; each such bug is put in,
and must be noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.exact.tiny_models import TableDrafter, TableExecutor, random_table
from trtllm_av.plugins import torch_ops
from trtllm_av.runtime import feedback as feedback_module
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.feedback import RoundFeedback
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.scheduler import Engine

VOCAB, K, SLOTS, REQUESTS = 9, 4, 3, 40
STOP_TOKEN = 4
COSTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [6, 1.2], [9, 2.0], [16, 6.0]],
    "draft_ms_by_requests": [[1, 0.02], [4, 0.02]],
}


class Recording:
    """Runs requests to their ends and keeps what the product sums up, and what it should have."""

    def __init__(self, options: AdaptiveOptions) -> None:
        self.target = random_table(VOCAB, 2.0, seed=1)
        self.draft = self.target + random_table(VOCAB, 0.9, seed=2)
        self.pairs: list[tuple[int, float, float]] = []  # position, feature, label
        self.expected_counts = [0] * K
        self.num_trimmed_labels = 0
        controller = AdaptiveController(
            "adaptive",
            K,
            SLOTS,
            CostModel.from_table(COSTS, num_positions=K, is_block=True),
            refit_interval=20,
            options=options,
        )
        self.engine = Engine(
            TableExecutor(self.target, SLOTS, 96),
            TableDrafter(self.draft, K, is_block=True),
            controller,
            KeyedSource(),
            max_seq_len=64,
        )
        rng = np.random.default_rng(3)
        for number in range(REQUESTS):
            prompt = rng.integers(0, VOCAB, 3).tolist()
            params = SamplingParams(
                max_tokens=int(rng.integers(8, 30)),
                temperature=0.0,
                stop_token_ids=[STOP_TOKEN] if number % 3 == 0 else [],
            )
            self.engine.submit(prompt, params)

    def known_pairs(self) -> dict[int, float]:
        """The label of each context by its feature, in millionths; contexts must not share a feature."""
        features, _ = torch_ops.score_drafts(
            self.draft.reshape(-1, 1, VOCAB),
            torch.zeros(VOCAB * VOCAB),
            torch.zeros(2),
            torch.zeros(1, dtype=torch.int32),
            vocab_size=VOCAB,
        )
        agrees = self.draft.argmax(-1) == self.target.argmax(-1)
        keys = [round(1e6 * float(value)) for value in features.flatten()]
        assert len(set(keys)) == VOCAB * VOCAB
        return dict(zip(keys, agrees.flatten().double().tolist(), strict=True))

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def accumulate(features: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
            known = torch.isfinite(labels) & torch.isfinite(features[:, :, 0])
            for row, position in torch.nonzero(known).tolist():
                self.pairs.append(
                    (position, float(features[row, position, 0]), float(labels[row, position]))
                )
            return torch_ops.accumulate_statistics(features, labels, coefficients)

        operators = SimpleNamespace(
            label_drafts=feedback_module.torch_ops.label_drafts, accumulate_statistics=accumulate
        )
        monkeypatch.setattr(feedback_module, "torch_ops", operators)
        while self.engine.has_work:
            for event in self.engine.step():
                # Judged drafts and the first trimmed one, none of them behind what was emitted.
                is_trimmed = event.accepted == event.verified < event.drafted
                labelled = min(event.accepted + 1, event.verified) + is_trimmed
                emitted = min(labelled, len(event.token_ids))
                self.num_trimmed_labels += is_trimmed and emitted == labelled
                for position in range(emitted):
                    self.expected_counts[position] += 1
        assert self.engine.controller.feedback is not None
        self.engine.controller.feedback.flush()

    def find_faults(self) -> list[str]:
        """What is wrong with the recording."""
        faults = []
        known = self.known_pairs()
        wrong = [pair for pair in self.pairs if known.get(round(1e6 * pair[1])) != pair[2]]
        if wrong:
            faults.append(f"{len(wrong)} of {len(self.pairs)} pairs are wrong, such as {wrong[0]}")
        counts = Counter(position for position, _, _ in self.pairs)
        if [counts[position] for position in range(K)] != self.expected_counts:
            faults.append(f"labels by position {dict(counts)}, expected {self.expected_counts}")
        return faults


@pytest.mark.parametrize("has_soft_labels", [False, True])
def test_every_recorded_pair_is_true_and_none_is_missing(
    has_soft_labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against wrong pairs, and against a check that sees no trims, stops or reused slots."""
    recording = Recording(AdaptiveOptions(soft_labels=has_soft_labels))
    recording.run(monkeypatch)
    assert recording.find_faults() == []
    assert len(recording.pairs) > 200
    assert recording.num_trimmed_labels > 10
    assert recording.engine.controller.estimator.num_refits > 0
    assert {0.0, 1.0} == {label for _, _, label in recording.pairs}


def label_the_trimmed(patch: pytest.MonkeyPatch) -> None:
    """A draft that was trimmed counts as rejected."""
    original = RoundFeedback.add

    def add(self: RoundFeedback, *args: Any) -> None:
        features, confidence, draft_lens, _, *rest = args
        original(self, features, confidence, draft_lens, draft_lens, *rest)

    patch.setattr(RoundFeedback, "add", add)


def keep_features_of_a_slot(patch: pytest.MonkeyPatch) -> None:
    """A request is recorded with the features of whoever had its slot in the round before."""
    original = AdaptiveController.observe
    kept: dict[int, Tensor] = {}

    def observe(self: AdaptiveController, slots: Any, plan: Any, outcome: Any, lens: Any) -> None:
        features = outcome.drafts.features.clone()
        for row, slot in enumerate(slots.tolist()):
            if slot in kept:
                outcome.drafts.features[row] = kept[slot]
            kept[slot] = features[row]
        original(self, slots, plan, outcome, lens)

    patch.setattr(AdaptiveController, "observe", observe)


def keep_features_of_the_first_owner(patch: pytest.MonkeyPatch) -> None:
    """Only the first round after a slot changed hands is recorded with the last owner's features."""
    original, admit = AdaptiveController.observe, AdaptiveController.admit
    last: dict[int, Tensor] = {}
    is_new: set[int] = set()

    def note(self: AdaptiveController, slot: int) -> None:
        is_new.add(slot)
        admit(self, slot)

    def observe(self: AdaptiveController, slots: Any, plan: Any, outcome: Any, lens: Any) -> None:
        features = outcome.drafts.features.clone()
        for row, slot in enumerate(slots.tolist()):
            if slot in is_new and slot in last:
                outcome.drafts.features[row] = last[slot]
            is_new.discard(slot)
            last[slot] = features[row]
        original(self, slots, plan, outcome, lens)

    patch.setattr(AdaptiveController, "admit", note)
    patch.setattr(AdaptiveController, "observe", observe)


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    """A label goes to the position behind its own."""
    original = torch_ops.label_drafts

    def label(*args: Any, **kwargs: Any) -> Tensor:
        return torch.roll(original(*args, **kwargs), 1, dims=1)

    patch.setattr(feedback_module.torch_ops, "label_drafts", label)


def shift_features_and_labels(patch: pytest.MonkeyPatch) -> None:
    """Pairs stay together, but are filed under the position before theirs."""
    original = RoundFeedback.add

    def add(self: RoundFeedback, *args: Any) -> None:
        features, confidence, *lens, overlap, overlaps = args
        moved = [(values - 1).clamp(min=0) for values in lens]
        shifted = torch.roll(features, -1, 1), torch.roll(confidence, -1, 1)
        original(self, *shifted, *moved, overlap, overlaps)

    patch.setattr(RoundFeedback, "add", add)


def label_behind_a_stop(patch: pytest.MonkeyPatch) -> None:
    """What was accepted behind the end of a request is recorded, too."""
    original = RoundFeedback.add

    def add(self: RoundFeedback, *args: Any) -> None:
        *head, trainable_lens, overlap, overlaps = args
        original(self, *head, torch.full_like(trainable_lens, K), overlap, overlaps)

    patch.setattr(RoundFeedback, "add", add)


@pytest.mark.parametrize(
    "put_in",
    [
        label_the_trimmed,
        keep_features_of_a_slot,
        keep_features_of_the_first_owner,
        shift_positions,
        shift_features_and_labels,
        label_behind_a_stop,
    ],
    ids=lambda put_in: put_in.__name__,
)
def test_a_bug_in_the_recording_is_noticed(
    put_in: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bug that a recording can have must fail the check above."""
    put_in(monkeypatch)
    recording = Recording(AdaptiveOptions())
    recording.run(monkeypatch)
    assert recording.find_faults() != []
