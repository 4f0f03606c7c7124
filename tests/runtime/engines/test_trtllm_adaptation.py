"""The parts of the adaptation beside TensorRT-LLM: trees, traces, step costs, control blocks of ranks."""

from __future__ import annotations

import itertools
import mmap
import zlib
from typing import Any

import numpy as np
import pytest

from tests.builder.toy_models import CHAIN, TREE, template
from trtllm_av.plugins import tree_reference
from trtllm_av.plugins.control_block import PROGRESS, SIZE, ControlBlock
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.engines import trtllm_tree
from trtllm_av.runtime.engines.trtllm_adaptation import (
    DECISION_ROUNDS,
    StepResult,
    TrtllmAdaptation,
)
from trtllm_av.runtime.engines.trtllm_control import RANK_MARGIN, ControlWriter
from trtllm_av.runtime.engines.trtllm_costs import Iteration, StepCosts
from trtllm_av.runtime.engines.trtllm_engine import TrtllmEngine
from trtllm_av.runtime.engines.trtllm_trace import (
    HEADER,
    MARKER,
    ROUND_MODULUS,
    TraceReader,
    is_later,
    read_rows,
)
from trtllm_av.runtime.engines.trtllm_tree import DraftTree
from trtllm_av.runtime.errors import CostTableError, UsageError

COEFFICIENTS = np.float32([0.7, 0.3, -0.2, -0.5, 0.1])


def tree_of(choices: list[list[int]]) -> DraftTree:
    levels = max(map(len, choices))
    return DraftTree(choices, num_levels=levels, max_draft_len=len(choices))


@pytest.mark.parametrize("choices", [CHAIN, TREE], ids=["chain", "tree"])
def test_tree_agrees_with_the_plugins_definition(
    choices: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a host that numbers drafts or multiplies confidences another way than the plugin."""
    tree, paths = tree_of(choices), template(choices)
    assert (paths[: len(tree.paths)] == tree.paths).all()
    assert (paths[len(tree.paths) :] == -1).all()
    features = np.random.default_rng(1).normal(1, 2, (5, tree.num_drafts)).astype(np.float32)
    features[0, 0] = np.nan
    coefficients = COEFFICIENTS[: tree.num_levels + 1]
    batch = np.tile(paths, (5, 1, 1))
    confidence = tree.confidence(features, coefficients)
    expected = tree_reference.node_confidence(features, batch, coefficients)
    np.testing.assert_allclose(confidence, expected, rtol=1e-6)
    survival = tree.survival(confidence)
    for row in range(5):
        one = tree_reference.node_survival(confidence[row], tree.num_drafts, paths)
        np.testing.assert_allclose(survival[row], one, rtol=1e-6)
    one = tree_reference.pooled_means([1.0])[0]
    expected = [np.array(tree_reference.pooled_means(row)) / one for row in survival]
    np.testing.assert_allclose(tree.falling(survival), expected, atol=1e-6)
    monkeypatch.setattr(trtllm_tree, "_MOST_MEANS", 1)  # a row at a time
    np.testing.assert_allclose(tree.falling(survival), expected, atol=1e-6)


def test_labels_follow_the_accepted_path() -> None:
    """Guards against labels for drafts that nobody judged, and siblings that count as accepted."""
    tree = tree_of(TREE)
    nan = np.nan
    # Drafts: 0 1 2 | 3=(0,0) 4=(0,1) 5=(1,0) | 6=(0,0,0) 7=(0,0,1) 8=(1,0,0); leaves' paths from the left.
    assert tree.paths.tolist() == [
        [0, 1, 4, 7],
        [0, 1, 4, 8],
        [0, 1, 5, -1],
        [0, 2, 6, 9],
        [0, 3, -1, -1],
    ]
    lens = np.int32([9, 9, 4, 9, 1])
    accepted = np.int32([4, 1, 2, 3, 2])
    paths = np.int32([1, 0, 0, 3, 0])
    labels = tree.labels(lens, accepted, paths)
    expected = [
        [1, 0, 0, 1, 0, nan, 0, 1, nan],  # (0), (0,0), (0,0,1)
        [0, 0, 0, nan, nan, nan, nan, nan, nan],  # none
        [1, 0, 0, 0, nan, nan, nan, nan, nan],  # (0); of its children only the first was verified
        [0, 1, 0, nan, nan, 1, nan, nan, 0],  # (1), (1,0)
        [1, nan, nan, nan, nan, nan, nan, nan, nan],
    ]
    np.testing.assert_array_equal(labels, expected)
    rows = tree.by_level(labels)
    assert rows.shape == (15, 3)
    assert np.nansum(rows) == np.nansum(expected)
    assert np.isfinite(rows).sum() == np.isfinite(expected).sum() == 20


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([], "empty"),
        ([[0], [0, 0], [1, 0], [0, 0, 0]], r"\[1, 0\]"),
        ([[0], [0], [0, 0], [0, 0, 0]], "twice"),
        ([[0], [0, 0]], "depth 2"),
        ([[0], [1], [2], [3], [0, 0], [0, 0, 0]], "6 entries"),
    ],
)
def test_trees_that_the_engine_cannot_take(choices: list[list[int]], named: str) -> None:
    """Guards against an assertion in the executor's process, after the engine was loaded."""
    with pytest.raises(UsageError, match=named):
        DraftTree(choices, num_levels=3, max_draft_len=5)


def test_tree_wider_than_the_engine(tmp_path: Any) -> None:
    """Guards against rows that the engine has no room for."""
    engine = TrtllmEngine(tmp_path, "1.2.1", 3, 9, 1, 1, 1, True)
    with pytest.raises(UsageError, match="2 nodes with children"):
        engine.tree(TREE)


def row(
    round: int, verified: int, accepted: int, kept: int, *, made: int = 4
) -> np.ndarray[Any, Any]:
    head = [MARKER, round, 1, verified, accepted, 0, made, kept]
    return np.float32([*head, *np.arange(made)])


def test_only_rows_that_a_step_wrote_are_read() -> None:
    """Guards against training on memory that the runtime allocated and nobody wrote."""
    garbage = np.full(HEADER + 4, 3.0, np.float32)
    broken = row(5, 1, 1, 1)
    broken[3] = np.nan
    rows = read_rows(np.stack([garbage, row(7, 4, 2, 3), broken])[None], 4)
    assert [(r.round, r.verified_len, r.num_accepted_tokens, r.kept_len) for r in rows] == [
        (7, 4, 2, 3)
    ]


def test_steps_are_paired_by_what_was_kept() -> None:
    """Guards against features that are labelled with another step's outcome."""
    reader = TraceReader(4)
    new, verified = reader.read(1, row(1, 0, 1, 3), is_final=False)
    assert len(new) == 1 and not verified
    new, verified = reader.read(1, row(2, 3, 2, 4), is_final=False)
    assert [(v.verified_len, v.num_accepted_tokens) for v in verified] == [(3, 2)]
    assert reader.read(1, row(2, 3, 2, 4), is_final=False) == ([], [])  # the same row again
    _, verified = reader.read(1, row(4, 1, 1, 2), is_final=False)  # a row was lost in between
    assert not verified and reader.num_unpaired == 1
    reader.read(2, row(4, 4, 2, 2), is_final=False)
    assert set(reader.live) == {1, 2}
    reader.read(1, None, is_final=True)
    assert set(reader.live) == {2}


def test_rounds_wrap() -> None:
    """Guards against a trace that is never read again after 2^24 steps."""
    last = ROUND_MODULUS - 1
    assert is_later(0, last) and not is_later(last, 0) and not is_later(5, 5)
    reader = TraceReader(4)
    reader.read(1, row(last, 4, 1, 3), is_final=False)
    new, verified = reader.read(1, row(0, 3, 2, 3), is_final=False)
    assert len(new) == len(verified) == 1


def feed(
    costs: StepCosts,
    steps: int,
    *,
    first: int = 1,
    shift: int = 0,
    lag: int = 0,
    ms: Any = None,
) -> None:
    """Steps of 1 … 4 requests with 2, 8 or 15 drafts each; every fifth has prompt tokens.

    Rows come ``lag`` steps after their iteration, or before it if that is negative.
    """
    ms = ms or (lambda tokens: 2.0 + tokens)
    for ordinal in range(first, first + steps + abs(lag)):
        if first <= (late := ordinal - max(lag, 0)) < first + steps:
            requests, drafts = sizes_of(late)
            for _ in range(requests):
                costs.add_row(late + shift, drafts)
        if first <= (late := ordinal - max(-lag, 0)) < first + steps:
            requests, drafts = sizes_of(late)
            context = 50 if late % 5 == 0 else 0
            tokens = -(-requests * (1 + drafts) // 8) * 8
            latency = ms(tokens) + (1000.0 if context else 0.0)
            costs.add_iterations([Iteration(late, requests, context, latency)])
    costs.add_iterations([])


def sizes_of(ordinal: int) -> tuple[int, int]:
    return 1 + zlib.crc32(bytes([ordinal])) % 4, (2, 8, 15)[ordinal % 3]


@pytest.mark.parametrize("shift", [0, 3, 1000, -2])
@pytest.mark.parametrize("lag", [0, 3, -4])
def test_step_costs_find_their_steps(shift: int, lag: int) -> None:
    """Guards against latencies that are booked for another step's tokens, or for a prompt's."""
    costs = StepCosts(15)
    assert costs.model() is None
    feed(costs, 80, first=10, shift=shift, lag=lag)
    plain = sum(ordinal % 5 != 0 for ordinal in range(10, 88))
    assert (costs.num_samples, costs.num_realigned) == (plain, 0)
    model = costs.model()
    assert model is not None
    sizes = np.array([8, 16, 32, 48, 64])
    np.testing.assert_allclose(model.verify_ms(sizes), 2.0 + sizes)
    assert costs.num_realigned == 0


def test_lost_iterations_are_noticed() -> None:
    """Guards against a shift that is wrong for good after the executor dropped statistics."""
    costs = StepCosts(15)
    feed(costs, 40)
    feed(costs, 60, first=41, shift=2)  # two iterations are missing
    assert costs.num_realigned == 1
    model = costs.model()
    assert model is not None
    np.testing.assert_allclose(model.verify_ms(np.array([16, 64])), [18.0, 66.0])


def test_flat_step_costs_are_an_error() -> None:
    """Guards against costs that never let anything be trimmed, in silence."""
    costs = StepCosts(15)
    feed(costs, 80, ms=lambda tokens: 5.0)
    with pytest.raises(CostTableError, match="flat"):
        costs.model()


def blocks(*rounds: int) -> list[ControlBlock]:
    made = [ControlBlock(mmap.mmap(-1, SIZE)) for _ in rounds]
    for block, round in zip(made, rounds, strict=True):
        progress(block, round)
    return made


def progress(block: ControlBlock, round: int) -> None:
    block._words[PROGRESS] = round


def test_one_block_is_used_in_the_next_round() -> None:
    """Guards against a block that is used in the round it was computed from."""
    (block,) = made = blocks(10)
    assert ControlWriter(made).write(budget=5, coefficients=COEFFICIENTS, floor=1, round=9)
    assert block.read(9) is None
    settings = block.read(10)
    assert settings is not None and settings.budget == 5


def test_ranks_change_over_in_one_round() -> None:
    """Guards against ranks that trim differently, whose collectives then wait for ever."""
    made = blocks(10, 12, 11)
    writer = ControlWriter(made)
    assert writer.newest_round == 12
    assert writer.write(budget=5, coefficients=COEFFICIENTS, floor=1, round=9)
    at = 12 + RANK_MARGIN
    for round in range(9, at + 6):
        found = [block.read(round) for block in made]
        assert [f is not None for f in found] == [round > at] * 3
    assert not writer.write(budget=6, coefficients=COEFFICIENTS, floor=1, round=12)
    assert not writer.verify_all(round=12)
    for block in made[:2]:
        progress(block, at + 1)
    assert not writer.verify_all(round=12), "one rank has not passed"
    progress(made[2], at + 1)
    assert writer.verify_all(round=at + 1)
    assert all(block.read(at + 1 + RANK_MARGIN + 1) is None for block in made)


class Recorder:
    """A control block that keeps what is written; every write has to name ``floor``."""

    def __init__(self, round: int = 0, floor: int = 1) -> None:
        self.round, self.floor = round, floor
        self.writes: list[tuple[int | None, int]] = []

    def write(self, *, budget: int, coefficients: Any, floor: int = 1, round: int) -> int:
        assert floor == self.floor
        self.writes.append((budget, round))
        return len(self.writes)

    def verify_all(self, *, round: int) -> int:
        self.writes.append((None, round))
        return len(self.writes)

    def progress(self) -> Any:
        from trtllm_av.plugins.control_block import Progress

        return Progress(self.round, -1)


def observe(
    adaptation: TrtllmAdaptation, block: Recorder, rounds: range, requests: int = 2
) -> None:
    for round in rounds:
        block.round = round
        traces = [row(round % ROUND_MODULUS, 4, 3, 4) for _ in range(requests)]
        adaptation.observe([StepResult(n, t, False) for n, t in enumerate(traces)])


def test_decisions_name_the_round_they_come_from() -> None:
    """Guards against a block that claims to be older than it is, also after the trace's rounds wrapped."""
    start = 3 * ROUND_MODULUS - 20
    block = Recorder()
    adaptation = TrtllmAdaptation(DraftTree.chain(4), ControlWriter([block]))
    observe(adaptation, block, range(start, start + 60))
    written = [round for _, round in block.writes]
    assert written[0] == start
    assert all(b - a == DECISION_ROUNDS for a, b in itertools.pairwise(written[1:]))
    assert written[-1] > 3 * ROUND_MODULUS
    # Without step costs, sizes are tried in turn, all drafts among them.
    assert {budget for budget, _ in block.writes} >= {None, 2, 5}
    assert adaptation.fallbacks["step costs are being measured"] == len(block.writes)


def test_probes_verify_everything_until_the_next_decision() -> None:
    """Guards against deep drafts that are trimmed for good because nothing labels them any more."""
    table = {
        "unit": "ms",
        "graph_limit_tokens": 0,
        "verify_ms_by_tokens": [[1, 1.0], [64, 64.0]],
        "draft_ms_by_requests": [[1, 0.0]],
    }
    model = CostModel.from_table(table, num_positions=4, is_block=True)
    block = Recorder()
    adaptation = TrtllmAdaptation(DraftTree.chain(4), ControlWriter([block]), cost_model=model)
    observe(adaptation, block, range(1, 200))
    budgets = [budget for budget, _ in block.writes]
    assert budgets[0] is None
    assert None in budgets[1:]
    assert all(2 <= budget < 8 for budget in budgets if budget is not None)
    assert budgets.count(None) < len(budgets) / 3
    assert not adaptation.fallbacks


def test_floor_of_the_engine_is_kept() -> None:
    """Guards against an engine of av_min_draft_len 2 whose requests are trimmed to one draft."""
    block = Recorder(floor=2)
    adaptation = TrtllmAdaptation(DraftTree.chain(4), ControlWriter([block]), min_draft_len=2)
    observe(adaptation, block, range(1, 60))
    budgets = {budget for budget, _ in block.writes} - {None}
    assert budgets and min(budgets) == 4  # two drafts of each of two requests


def test_new_requests_are_decided_for_at_once() -> None:
    """Guards against a budget for two requests that starves the next ten until its time is up."""
    block = Recorder()
    adaptation = TrtllmAdaptation(DraftTree.chain(4), ControlWriter([block]))
    observe(adaptation, block, range(1, 4))
    before = len(block.writes)
    observe(adaptation, block, range(4, 5), requests=3)
    assert len(block.writes) == before + 1


def test_refits_are_counted_in_rounds() -> None:
    """Guards against a fit that comes once a request instead of once a hundred rounds, or never."""
    block = Recorder()
    writer = ControlWriter([block])
    adaptation = TrtllmAdaptation(DraftTree.chain(4), writer, refit_interval=20)
    observe(adaptation, block, range(1, 62), requests=5)
    assert adaptation.estimator.num_refits == 3
    # Two of four drafts were accepted in every step: sure, sure, not, unlabelled.
    ends = 1 / (1 + np.exp(-(adaptation.estimator.coefficients[1:] + 0.0)))
    assert ends[0] > ends[2]
