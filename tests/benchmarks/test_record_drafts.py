"""Recorded drafts: the rounds are the engine's, and a row says what was known before its draft was drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.drafter_training.source import load_source
from benchmarks.drafter_training.target import FrozenTarget
from benchmarks.record_drafts import step_costs
from benchmarks.recording.drafters import DSparkRows, EagleRows, StateRows
from benchmarks.recording.laws import draft_numbers, laws
from benchmarks.recording.rows import TRIMMED, DraftRows, RoundRecord, collect_rows
from benchmarks.recording.run import RecordedRequest, Sampling, SpeculativeRun
from benchmarks.recording.trimming import ProductTrimming, Trimming, VerifyAll
from tests.benchmarks.test_drafter_training import trained_block, trained_head
from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.engines.torch_executor import TorchExecutor
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters.base import Drafter
from trtllm_av.runtime.models.drafters.dspark import DSparkDrafter
from trtllm_av.runtime.models.drafters.eagle import EagleDrafter
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.sampling import distribution
from trtllm_av.runtime.scheduler import Engine
from trtllm_av.runtime.step import DecodeRows, Drafts, Round, RoundOutcome, RoundPlan, Trim

K = 3
VOCAB = 261
IDS = torch.arange(0, VOCAB, 3)
END = 33
SLOTS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_checkpoint(folder)


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    source = load_source(str(folder))
    cpu = torch.device("cpu")
    return FrozenTarget(source.weights, source.config, dtype=torch.float32, device=cpu)


def new_requests() -> list[RecordedRequest]:
    """More than there are slots, of different lengths."""
    lengths = (25, 7, 40, 3, 30, 18)
    return [
        RecordedRequest(n, [5 + n, 6, 9 + 2 * n, *range(20, 20 + n)], length)
        for n, length in enumerate(lengths)
    ]


def run(
    target: FrozenTarget,
    sampling: Sampling,
    trimming: Trimming,
    requests: list[RecordedRequest],
    num_rows: int = SLOTS,
    family: str = "eagle",
) -> DraftRows:
    sizes = {"num_rows": num_rows, "capacity": 128, "num_positions": K}
    drafter: StateRows
    if family == "eagle":
        drafter = EagleRows(trained_head(target), IDS, target, **sizes)
    else:
        drafter = DSparkRows(trained_block(target), IDS, target, **sizes)
    rounds = SpeculativeRun(target, drafter, trimming, sampling, end_tokens=[END], seed=3, **sizes)
    rounds.run(requests, 1e9)
    return collect_rows(rounds.records, [0] * len(requests), {"num_positions": K})


#: Request number, first position, features, accepted drafts, confidences.
SeenRow = tuple[int, int, list[float], int, list[float]]


class WatchedRound(Round):
    """Keeps every row of every round."""

    seen: list[SeenRow]

    def verify(self, rows: DecodeRows, plan: RoundPlan, drafts: Drafts, trim: Trim) -> RoundOutcome:
        outcome = super().verify(rows, plan, drafts, trim)
        for r, (slot, length) in enumerate(
            zip(rows.slots.tolist(), rows.lens.tolist(), strict=True)
        ):
            depth = int(plan.draft_lens[r])
            features = drafts.features[r, :depth, 0].tolist()
            confidence = drafts.confidence[r, :depth].tolist()
            accepted = int(outcome.acceptance.accepted_lens[r])
            self.seen.append((self.holders[slot], length, features, accepted, confidence))
        return outcome

    @property
    def holders(self) -> dict[int, int]:
        return {slot: request.request_id for slot, request in self.engine._live.items()}

    engine: Engine


def engine_rounds(
    target: FrozenTarget, loaded: LoadedModel, requests: list[RecordedRequest], family: str
) -> tuple[list[list[int]], list[SeenRow]]:
    """Greedy answers of the product's engine, and its rounds."""
    executor = TorchExecutor(loaded, num_slots=SLOTS, max_len=160)
    sizes = {"num_slots": SLOTS, "max_len": 160, "max_draft_len": K}
    drafter: Drafter
    if family == "eagle":
        drafter = EagleDrafter(trained_head(target).requires_grad_(False), IDS, loaded, **sizes)
    else:
        drafter = DSparkDrafter(trained_block(target).requires_grad_(False), IDS, loaded, **sizes)
    costs = CostModel.from_table(cheap_draft_costs(), num_positions=K, is_block=drafter.is_block)
    options = AdaptiveOptions(source="head" if drafter.has_confidence_head else "estimator")
    # Shadow scores, and verifies everything.
    controller = AdaptiveController("shadow", K, SLOTS, costs, options=options)
    engine = Engine(
        executor, drafter, controller, KeyedSource(), max_seq_len=128, eos_token_ids=[END]
    )
    watched = engine.round
    watched.__class__ = WatchedRound
    assert isinstance(watched, WatchedRound)
    watched.seen, watched.engine = [], engine
    answers: dict[int, list[int]] = {}
    for request in requests:
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
        answers[engine.submit(request.prompt, params)] = []
    while engine.has_work:
        for event in engine.step():
            answers[event.request_id] += event.token_ids
    return list(answers.values()), watched.seen


@pytest.mark.parametrize("family", ["eagle", "dspark"])
def test_rounds_are_the_engines(family: str, target: FrozenTarget, loaded: LoadedModel) -> None:
    """Features of another request after a slot was reused, of another position, or labels behind a stop."""
    requests = new_requests()
    rows = run(target, Sampling(0.0), VerifyAll(), requests, family=family)
    answers, seen = engine_rounds(target, loaded, new_requests(), family)
    assert [request.answer for request in requests] == answers
    ended = [answer for answer in answers if answer[-1] == END]
    assert 0 < len(ended) < len(answers)  # both ways to end are in the data
    expected = []
    for number, length, features, accepted, confidence in sorted(seen, key=lambda row: row[:2]):
        request = requests[number - 1]
        left = len(request.prompt) + len(request.answer) - length  # tokens up to its end
        for position in range(min(accepted + 1, len(features), left)):
            what = features[position], confidence[position]
            expected.append((number - 1, position, int(position < accepted), *what))
    assert len(expected) > 60
    found = zip(rows.request, rows.position, rows.label, strict=True)
    assert [tuple(map(int, row)) for row in found] == [row[:3] for row in expected]
    features = np.clip(rows.feature.astype(np.float64), -15, 15)
    np.testing.assert_allclose(features, [row[3] for row in expected], atol=0.02)
    if family == "dspark":
        heads = 1 / (1 + np.exp(-rows.head_logit.astype(np.float64)))
        np.testing.assert_allclose(heads, [row[4] for row in expected], atol=0.002)


def test_acceptance_is_the_overlap(target: FrozenTarget) -> None:
    """Rejection sampling against another q or p than the recorded ones, at any position."""
    requests = [RecordedRequest(n, [5, 6, 7 + n % 40], 60) for n in range(80)]
    rows = run(target, Sampling(1.0, 0.9), VerifyAll(), requests, num_rows=40)
    assert len(rows) > 2500
    for position in range(3):
        here = rows.position == position
        excess = rows.label[here].astype(np.float64) - rows.overlap[here].astype(np.float64)
        assert abs(excess.mean()) < 4 * excess.std() / np.sqrt(excess.size), position


def test_trimmed_runs_label_what_was_verified(target: FrozenTarget) -> None:
    """A label for a slot that the trim left out, or none for the first of them."""
    requests = [RecordedRequest(n, [5, 6, 7 + n], 60) for n in range(40)]
    costs = step_costs(20, K) | {"draft_ms_by_requests": [[1, 0.01], [20, 0.02]]}
    rows = run(target, Sampling(1.0, 0.95), ProductTrimming(costs, K, 20), requests, num_rows=20)
    trimmed = rows.label == TRIMMED
    assert 20 < trimmed.sum() < len(rows) - 20
    assert np.isfinite(rows.overlap[trimmed]).all()
    # A trimmed slot ends its draft, and everything before it was accepted.
    last = np.append(np.diff(rows.round * 1000 + rows.request) != 0, True)
    assert last[trimmed].all()
    before = np.flatnonzero(trimmed & (rows.position > 0)) - 1
    assert (rows.label[before] == 1).all()


def record(**changes: list[int]) -> RoundRecord:
    values = {
        "request": [0, 1],
        "draft_lens": [3, 3],
        "verify_lens": [3, 3],
        "accepted_lens": [1, 3],
        "labelled_lens": [3, 4],
    } | changes
    lens = {name: np.array(value, np.int32) for name, value in values.items()}
    numbers = np.zeros((2, 3, 6), np.float16)
    numbers[:, :, 0] = [[1, 2, 3], [11, 12, 13]]
    return RoundRecord(numbers=numbers, **lens)


def rows_of(*records: RoundRecord) -> list[tuple[int, int, int, int, float]]:
    """(request, round, position, label, feature)."""
    rows = collect_rows(records, [0, 0, 0], {})
    columns = (rows.request, rows.round, rows.position, rows.label, rows.feature)
    return [tuple(one) for one in zip(*(column.tolist() for column in columns), strict=True)]


def test_a_row_is_what_was_judged() -> None:
    """Labels behind a rejection, behind a stop, of idle slots, or of a slot that was not verified."""
    assert rows_of(record()) == [
        (0, 0, 0, 1, 1.0),
        (0, 0, 1, 0, 2.0),
        (1, 0, 0, 1, 11.0),
        (1, 0, 1, 1, 12.0),
        (1, 0, 2, 1, 13.0),
    ]
    assert rows_of(record(labelled_lens=[1, 2])) == [
        (0, 0, 0, 1, 1.0),
        (1, 0, 0, 1, 11.0),
        (1, 0, 1, 1, 12.0),
    ]
    assert rows_of(record(verify_lens=[1, 0], accepted_lens=[1, 0])) == [
        (0, 0, 0, 1, 1.0),
        (0, 0, 1, TRIMMED, 2.0),
        (1, 0, 0, TRIMMED, 11.0),
    ]
    assert rows_of(record(draft_lens=[1, 0], verify_lens=[1, 0], accepted_lens=[0, 0])) == [
        (0, 0, 0, 0, 1.0)
    ]
    assert rows_of(record(request=[2, -1], labelled_lens=[3, 0])) == [
        (2, 0, 0, 1, 1.0),
        (2, 0, 1, 0, 2.0),
    ]


def test_rows_are_in_the_order_of_time() -> None:
    """A slot's next request that is mixed up with the one before, or rounds out of order."""
    first, second = record(), record(request=[1, 2], accepted_lens=[0, 0])
    rows = rows_of(first, second)
    assert [row[:3] for row in rows if row[0] == 1] == [(1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1, 0)]
    assert [row[4] for row in rows if row[0] == 1] == [11.0, 12.0, 13.0, 1.0]
    assert [row[4] for row in rows if row[0] == 2] == [11.0]


def random_logits(rows: int, seed: int) -> Tensor:
    return 3 * torch.randn(rows, 500, generator=torch.Generator().manual_seed(seed))


def test_laws_and_features_are_the_runtimes() -> None:
    """A nucleus, a temperature or a feature of another definition than what is served."""
    logits = random_logits(64, 1)
    logits[0] = 0.0  # all tie
    full, none = torch.full((64,), 0.9), torch.zeros(64, dtype=torch.int64)
    served = distribution(logits, torch.full((64,), 0.7), none, full, vocab_size=500).full()
    torch.testing.assert_close(laws(logits, 0.7, 0.9), served, atol=1e-5, rtol=1e-4)
    numbers = draft_numbers(logits, 0.7, (0.5, 1.0))
    for column, temperature in ((0, 0.7), (3, 0.5), (4, 1.0)):
        features, _ = torch_ops.score_drafts(
            logits[:, None],
            torch.full((64,), temperature),
            torch.zeros(2),
            torch.zeros(1, dtype=torch.int32),
            vocab_size=500,
        )
        torch.testing.assert_close(numbers[:, column], features[:, 0, 0], atol=1e-4, rtol=1e-4)


def test_file_round_trip_and_foreign_files(target: FrozenTarget, tmp_path: Path) -> None:
    """Columns that swap places in the file; a foreign file that ends in a traceback."""
    rows = collect_rows([record()], [0, 1], {"data_sets": ["a", "b"]})
    rows.save(tmp_path / "rows.npz")
    loaded = DraftRows.load(tmp_path / "rows.npz")
    assert loaded.meta == rows.meta
    assert loaded.data_set.tolist() == [0, 0, 1, 1, 1]
    for name in ("feature", "label", "position", "request", "overlap"):
        assert np.array_equal(getattr(loaded, name), getattr(rows, name))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "text.npz").write_text("no")
    for name in ("other.npz", "text.npz", "missing.npz"):
        with pytest.raises(UsageError, match=name):
            DraftRows.load(tmp_path / name)
