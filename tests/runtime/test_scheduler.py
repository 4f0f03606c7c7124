"""Continuous batching on a table model whose cache is real: joins, ends, cancellation, stops, keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.exact.tiny_models import TableDrafter, TableExecutor, random_table
from tests.runtime.random_sources import RecordingSource
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.params import AvMode, SamplingParams
from trtllm_av.runtime.random_source import KeyedSource, RandomSource
from trtllm_av.runtime.request import TokenEvent
from trtllm_av.runtime.scheduler import Engine

VOCAB = 12
EOS = 11
COSTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [4, 1.1], [8, 1.6], [12, 2.4], [16, 3.6], [32, 9.0]],
    "draft_ms_by_requests": [[1, 0.2], [4, 0.3]],
}


def make_engine(
    mode: AvMode = "adaptive",
    *,
    num_slots: int = 4,
    num_draft_tokens: int = 3,
    source: RandomSource | None = None,
    draft_scale: float = 2.0,
    max_seq_len: int = 64,
    target: Tensor | None = None,
    prefill_chunk: int = 256,
    costs: dict[str, Any] | None = None,
) -> Engine:
    if target is None:
        target = random_table(VOCAB, 2.0, seed=1)
        target[:, :, EOS] = -9.0  # ends come from max_tokens unless a test wants otherwise
    draft = target + draft_scale * random_table(VOCAB, 0.5, seed=2)
    is_drafting = mode != "off"
    cost_model = (
        CostModel.from_table(costs or COSTS, num_positions=num_draft_tokens)
        if mode in ("adaptive", "shadow")
        else None
    )
    controller = AdaptiveController(
        mode, num_draft_tokens if is_drafting else 0, num_slots, cost_model, refit_interval=20
    )
    return Engine(
        TableExecutor(target, num_slots, max_seq_len + 16),
        TableDrafter(draft, num_draft_tokens) if is_drafting else None,
        controller,
        source or KeyedSource(),
        max_seq_len=max_seq_len,
        eos_token_ids=(EOS,),
        prefill_chunk=prefill_chunk,
    )


def run(engine: Engine) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return events
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    raise AssertionError("the engine does not finish")


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def greedy_continuation(table: Tensor, prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    while len(history) < len(prompt) + count:
        history.append(int(table[history[-2], history[-1]].argmax()))
        if history[-1] == EOS:
            break
    return history[len(prompt) :]


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 1], [2, 2], [3, 9, 4], [5, 1, 5, 1], [8, 3]]


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive", "shadow"])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_greedy_tokens_are_the_targets_own(mode: AvMode, num_slots: int) -> None:
    """A wrong position, slot reuse or packed row would change greedy tokens."""
    engine = make_engine(mode, num_slots=num_slots, prefill_chunk=4)
    lengths = [20, 3, 11, 30, 1, 7, 16]
    ids = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=length))
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    events = run(engine)
    table = engine.executor.table  # type: ignore[attr-defined]
    for request_id, prompt, length in zip(ids, PROMPTS, lengths, strict=True):
        assert tokens_of(events[request_id]) == greedy_continuation(table, prompt, length)
        assert events[request_id][-1].finish_reason == "length"
        assert [event.finish_reason for event in events[request_id][:-1]] == [None] * (
            len(events[request_id]) - 1
        )
    assert engine.num_live == 0
    assert engine.num_waiting == 0


def test_modes_verify_what_they_promise() -> None:
    """Shadow and fixed must verify every draft, adaptive fewer, off none: else the mode is a lie."""
    reports = {}
    for mode in ("off", "fixed", "adaptive", "shadow"):
        engine = make_engine(mode, num_slots=7)  # type: ignore[arg-type]
        for prompt in PROMPTS:
            engine.submit(prompt, SamplingParams(max_tokens=40, seed=3))
        run(engine)
        reports[mode] = engine.report()
    assert reports["off"].drafted == 0
    assert reports["fixed"].trimmed == 0 < reports["fixed"].drafted
    assert reports["shadow"].trimmed == 0 < reports["shadow"].drafted
    assert reports["adaptive"].trimmed > 0
    assert reports["adaptive"].verified > 0
    assert 0 < reports["shadow"].decided_budget < reports["shadow"].verified
    assert reports["fixed"].decided_budget == 0
    assert 0.5 < reports["shadow"].expected_accepted / reports["shadow"].checked_accepted < 2.0
    for report in reports.values():
        assert report.emitted == 40 * len(PROMPTS)
        # The first token of each request comes from its prompt, one per row and round from the target.
        assert report.emitted == report.accepted + report.row_rounds + len(PROMPTS)


def test_request_opts_out_of_adaptation_and_of_speculation() -> None:
    """adaptive=False verifies the whole draft; num_speculative_tokens=0 drafts nothing, 1 at most one."""
    engine = make_engine(num_slots=3, costs={**COSTS, "verify_ms_by_tokens": [[1, 1.0], [2, 50.0]]})
    fixed = engine.submit([1, 2], SamplingParams(max_tokens=30, seed=1, adaptive=False))
    plain = engine.submit([1, 2], SamplingParams(max_tokens=30, seed=1, num_speculative_tokens=0))
    one = engine.submit(
        [1, 2], SamplingParams(max_tokens=30, seed=1, adaptive=False, num_speculative_tokens=1)
    )
    seen: dict[int, list[tuple[int, int]]] = {}
    original = engine.controller.observe

    def observe(slots: Any, plan: Any, outcome: Any, trainable: Any) -> None:
        for r, slot in enumerate(slots.tolist()):
            pair = (int(plan.draft_lens[r]), int(outcome.trim.verify_lens[r]))
            seen.setdefault(slot, []).append(pair)
        original(slots, plan, outcome, trainable)

    engine.controller.observe = observe  # type: ignore[method-assign]
    run(engine)
    by_request = {fixed: seen[0], plain: seen[1], one: seen[2]}
    assert all(drafted == verified for drafted, verified in by_request[fixed])
    assert max(drafted for drafted, _ in by_request[fixed]) == 3
    assert set(by_request[plain]) == {(0, 0)}
    assert set(by_request[one]) <= {(1, 1), (0, 0)}
    assert (1, 1) in by_request[one]


def test_drafts_never_reach_behind_the_last_token() -> None:
    """Drafting more than max_tokens − 1 wastes work; emitting more would be wrong."""
    engine = make_engine("fixed", num_slots=1)
    request = engine.submit([1, 2], SamplingParams(max_tokens=3, temperature=0.0))
    events = run(engine)
    assert len(tokens_of(events[request])) == 3
    assert engine.report().drafted_by_position[2] == 0


def test_nothing_is_emitted_behind_a_stop_inside_a_draft() -> None:
    """Accepted drafts behind a stop token must be dropped, and must not train the estimator."""
    target = torch.full((VOCAB, VOCAB, VOCAB), -20.0, dtype=torch.float64)
    for last in range(VOCAB):
        target[:, last, (last + 1) % VOCAB] = 20.0  # counts up, so every draft is accepted
    engine = make_engine("fixed", target=target, draft_scale=0.0)
    stopped = engine.submit(
        [0, 1], SamplingParams(max_tokens=30, stop_token_ids=[4], temperature=0)
    )
    natural = engine.submit([0, 1], SamplingParams(max_tokens=30, temperature=0.0))
    ignoring = engine.submit(
        [0, 1], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    )
    events = run(engine)
    assert tokens_of(events[stopped]) == [2, 3, 4]
    assert (events[stopped][-1].finish_reason, events[stopped][-1].stop_reason) == ("stop", 4)
    assert tokens_of(events[natural]) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert (events[natural][-1].finish_reason, events[natural][-1].stop_reason) == ("stop", None)
    assert len(tokens_of(events[ignoring])) == 30


def test_labels_end_at_the_stop_and_constrained_rows_do_not_train() -> None:
    """Drafts behind a stop were judged in a text that does not exist; penalties shift the target only."""
    target = torch.full((VOCAB, VOCAB, VOCAB), -20.0, dtype=torch.float64)
    for last in range(VOCAB):
        target[:, last, (last + 1) % VOCAB] = 20.0
    engine = make_engine("adaptive", target=target, draft_scale=0.0, num_slots=3)
    engine.submit([0, 1], SamplingParams(max_tokens=30, stop_token_ids=[4], temperature=0.0))
    engine.submit([0, 1], SamplingParams(max_tokens=30, temperature=0.0, presence_penalty=0.1))
    trainable: list[list[int]] = []
    original = engine.controller.observe

    def observe(slots: Any, plan: Any, outcome: Any, lens: Any) -> None:
        trainable.append(list(lens))
        original(slots, plan, outcome, lens)

    engine.controller.observe = observe  # type: ignore[method-assign]
    run(engine)
    assert all(lens[-1] == 0 for lens in trainable)  # the constrained row
    stopped_rounds = [lens[0] for lens in trainable if len(lens) == 2]
    assert sum(stopped_rounds) == 2  # tokens 3 and 4; token 2 came with the prompt


def test_cancelled_requests_leave_at_once_and_free_their_slot() -> None:
    """A leaked slot would block the queue for good."""
    engine = make_engine(num_slots=1)
    first = engine.submit([1, 2], SamplingParams(max_tokens=50, seed=1))
    second = engine.submit([3, 4], SamplingParams(max_tokens=2, temperature=0.0))
    third = engine.submit([5, 6], SamplingParams(max_tokens=2, temperature=0.0))
    engine.step()
    engine.step()
    assert engine.cancel(first)
    assert not engine.cancel(first)
    assert engine.cancel(third)  # still waiting
    events = run(engine)
    assert [event.finish_reason for event in events[first]] == ["cancelled"]
    assert tokens_of(events[third]) == []
    table = engine.executor.table  # type: ignore[attr-defined]
    assert tokens_of(events[second]) == greedy_continuation(table, [3, 4], 2)
    assert not engine.cancel(second)


def test_requests_that_can_never_run_are_refused_with_both_numbers() -> None:
    """Accepting one would fail later, in the middle of a batch of others."""
    engine = make_engine(max_seq_len=16)
    with pytest.raises(RequestError, match=r"prompt of 10 tokens.*max_tokens=7.*max_seq_len=16"):
        engine.submit([1] * 10, SamplingParams(max_tokens=7))
    with pytest.raises(RequestError, match="no tokens"):
        engine.submit([], SamplingParams())
    with pytest.raises(RequestError, match="token 12 is outside"):
        engine.submit([1, 12], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match=r"num_speculative_tokens=9 exceeds this engine's 3"):
        engine.submit([1, 2], SamplingParams(max_tokens=2, num_speculative_tokens=9))
    assert engine.submit([1] * 10, SamplingParams(max_tokens=6))
    assert engine.num_waiting == 1


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_no_random_key_is_used_twice_in_200_rounds(mode: AvMode) -> None:
    """Keys by (seed, position) would redraw a trimmed position with the number B was decided from."""
    source = RecordingSource(KeyedSource())
    engine = make_engine(mode, num_slots=4, source=source, max_seq_len=600)
    for number in range(4):
        seed = 7 if mode == "adaptive" else number  # equal seeds are told apart by request number
        engine.submit(PROMPTS[number], SamplingParams(max_tokens=590, seed=seed))
    while engine.has_work and engine.report().rounds < 200:
        engine.step()
    assert engine.report().rounds == 200
    assert mode == "fixed" or engine.report().trimmed > 0


def test_recorded_keys_notice_a_round_that_is_left_out() -> None:
    """The check above must be able to fail."""
    engine = make_engine("adaptive", source=RecordingSource(KeyedSource()), max_seq_len=600)
    engine.submit([1, 2], SamplingParams(max_tokens=200, seed=7))
    with pytest.raises(AssertionError):
        while engine.has_work:
            engine.slots.rounds.zero_()
            engine.step()


@pytest.mark.parametrize("mode", ["off", "fixed", "shadow"])
def test_seed_repeats_tokens_when_nothing_adapts(mode: AvMode) -> None:
    """The promise of a seed: the same tokens with adaptive verification off, whoever else is there."""
    outputs = []
    for others in (0, 3):
        engine = make_engine(mode, num_slots=4)
        for number in range(others):
            engine.submit(PROMPTS[number], SamplingParams(max_tokens=25, seed=100 + number))
        request = engine.submit([4, 5], SamplingParams(max_tokens=25, seed=42))
        outputs.append(tokens_of(run(engine)[request]))
    assert outputs[0] == outputs[1]


def test_logprobs_are_the_targets_before_temperature_also_when_trimmed() -> None:
    """Log-probabilities read from a wrong packed row, or after temperature, look plausible."""
    engine = make_engine("adaptive", num_slots=2)
    params = SamplingParams(max_tokens=40, temperature=0.5, seed=5, logprobs=True)
    asking = engine.submit([1, 2], params)
    silent = engine.submit([1, 2], SamplingParams(max_tokens=40, seed=6))
    events = run(engine)
    assert engine.report().trimmed > 0
    values = [value for event in events[asking] for value in event.logprobs or []]
    history, expected = [1, 2], []
    table = engine.executor.table  # type: ignore[attr-defined]
    for token in tokens_of(events[asking]):
        expected.append(float(torch.log_softmax(table[history[-2], history[-1]], -1)[token]))
        history.append(token)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert all(event.logprobs is None for event in events[silent])


def test_contradicting_rules_end_the_request_instead_of_emitting() -> None:
    """Rules that leave no token must not emit a forbidden one, in a draft or from the target."""
    for mode in ("off", "fixed", "adaptive"):
        engine = make_engine(mode)  # type: ignore[arg-type]
        params = SamplingParams(
            max_tokens=20, allowed_token_ids=[3, 4], bad_words_ids=[[3, 3], [3, 4], [4, 4], [4, 3]]
        )
        request = engine.submit([1, 2], params)
        other = engine.submit([1, 2], SamplingParams(max_tokens=20, seed=1))
        events = run(engine)
        assert tokens_of(events[request]) in ([3], [4])
        assert events[request][-1].finish_reason == "stop"
        assert len(tokens_of(events[other])) == 20
        assert engine.report().fallbacks["no token is allowed"] == 1


def test_rules_hold_inside_drafts() -> None:
    """Bad words and allowed tokens apply to each draft with the drafts before it."""
    engine = make_engine("adaptive", num_slots=3)
    params = [
        SamplingParams(max_tokens=60, seed=1, allowed_token_ids=[1, 2, 3]),
        SamplingParams(max_tokens=60, seed=2, bad_words_ids=[[1], [2, 3]]),
        SamplingParams(max_tokens=60, seed=3, min_tokens=60, logit_bias={EOS: 30.0}),
    ]
    ids = [engine.submit([1, 2], each) for each in params]
    events = run(engine)
    allowed, bad, minimum = (tokens_of(events[i]) for i in ids)
    assert set(allowed) <= {1, 2, 3}
    assert 1 not in bad
    assert (2, 3) not in itertools.pairwise(bad)
    assert len(minimum) == 60
    assert EOS not in minimum[:-1]


def test_steep_costs_choose_plain_decoding_and_flat_ones_deep_drafts() -> None:
    """Verify length must fall as verification gets dearer, down to depth 0; with probes it never locks."""
    lengths = []
    for slope in (0.0001, 0.05, 0.2, 0.6, 5.0):
        costs = {
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": [[1, 1.0], [64, 1.0 + 63 * slope]],
            "draft_ms_by_requests": [[1, 0.01], [8, 0.02]],
        }
        engine = make_engine("adaptive", num_slots=4, costs=costs, max_seq_len=256)
        for number in range(4):
            engine.submit(PROMPTS[number], SamplingParams(max_tokens=200, seed=number))
        run(engine)
        lengths.append(engine.report().mean_verify_len)
    assert lengths == sorted(lengths, reverse=True)
    assert len({round(length, 2) for length in lengths}) >= 3
    assert lengths[-1] < 0.15
    assert lengths[0] > 1.5


def test_probe_rounds_are_counted_and_keep_labels_coming_at_depth_0() -> None:
    """Depth 0 without probes would be for good."""
    costs = {**COSTS, "verify_ms_by_tokens": [[1, 1.0], [2, 50.0]]}
    engine = make_engine("adaptive", num_slots=2, costs=costs, max_seq_len=256)
    for number in range(2):
        engine.submit(PROMPTS[number], SamplingParams(max_tokens=150, seed=number))
    run(engine)
    report = engine.report()
    assert 3 <= report.probes < report.rounds / 4
    assert report.verified > 0
