"""The device path on CPU tensors against the host's engine: tokens, ends, slots, statistics, refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.engines.cuda_support import (
    K,
    device_engine,
    host_engine,
    random_prompts,
    serve,
    tiny_model,
)
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.estimator import AcceptanceEstimator
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.params import AvMode, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 3.0}
CUT: dict[str, Any] = {"temperature": 3.0, "top_k": 40, "top_p": 0.9}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.mark.parametrize(
    ("mode", "params"),
    [("off", SAMPLED), ("off", CUT), ("fixed", GREEDY), ("fixed", SAMPLED), ("shadow", CUT)],
)
def test_tokens_equal_the_hosts(loaded: LoadedModel, mode: AvMode, params: dict[str, Any]) -> None:
    """Guards against: another position, key, law or cache entry than the host's round has."""
    engine = device_engine(loaded, mode)
    assert serve(engine, params) == serve(host_engine(loaded, mode), params)
    report = engine.report()
    assert report.emitted == report.accepted + report.row_rounds + len(random_prompts())
    if mode != "off" and params is not GREEDY:
        assert report.accepted > 10  # residual, bonus and accepted draws all took part


def test_adaptive_greedy_tokens_equal_the_hosts() -> None:
    """Guards against: a trim, padding row or late plan that changes what is emitted, and a tied output layer."""
    loaded = tiny_model(is_tied=True)
    engine = device_engine(loaded, "adaptive")
    assert serve(engine, GREEDY) == serve(host_engine(loaded, "off"), GREEDY)
    assert 0 < engine.report().verified < engine.report().drafted


@pytest.mark.parametrize(("mode", "numbers"), [("adaptive", [1, 2]), ("fixed", [0, 0])])
def test_keys_carry_request_numbers_where_rows_depend_on_each_other(
    loaded: LoadedModel, mode: AvMode, numbers: list[int]
) -> None:
    """Guards against: two requests of one seed that reveal each other's draws, and seeds that repeat nothing."""
    engine = device_engine(loaded, mode)
    for _ in range(2):
        engine.submit([1, 2, 3], SamplingParams(max_tokens=30, seed=5))
    engine.step()
    state = engine.device.round.state.integers
    assert state[Field.REQUEST, :2].tolist() == numbers
    assert state[Field.SEED, :2].tolist() == [5, 5]
    for _ in range(4):
        engine.step()
    assert state[Field.ROUNDS, :2].tolist() == [5, 5]  # one for the prompt, one for each round


def test_prompts_in_chunks_give_the_same_tokens(loaded: LoadedModel) -> None:
    """Guards against: head entries at a chunk's end that miss the token behind it."""
    engine = device_engine(loaded, "fixed", prefill_chunk=4)
    assert serve(engine, SAMPLED) == serve(host_engine(loaded, "fixed"), SAMPLED)


def test_greedy_drafts_of_sampled_rows(loaded: LoadedModel) -> None:
    """Guards against: a draft judged by its temperature although it was the likeliest token."""
    engine = device_engine(loaded, "fixed", is_greedy_draft=True)
    host = host_engine(loaded, "fixed")
    host.round.is_greedy_draft = True
    assert serve(engine, SAMPLED) == serve(host, SAMPLED)


def test_end_is_learnt_a_round_late_and_nothing_of_it_counts(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: tokens behind a stop that are emitted, counted or trained on."""
    plain = serve(host_engine(loaded, "shadow"), SAMPLED)
    eos = [Counter(t for tokens, _ in plain for t in tokens[2:]).most_common(1)[0][0]]
    monkeypatch.setattr(AcceptanceEstimator, "tick", lambda self: False)  # no refit: all adds up
    host = host_engine(loaded, "shadow", eos=eos)
    device = device_engine(loaded, "shadow", eos=eos)
    found = serve(device, SAMPLED)
    assert found == serve(host, SAMPLED)
    assert "stop" in {reason for _, reason in found}
    for name in ("emitted", "row_rounds", "accepted", "verified", "drafted"):
        assert getattr(device.report(), name) == getattr(host.report(), name), name
    host.controller.feedback.flush()  # type: ignore[union-attr]
    taught = [e.controller.estimator.state_dict()["statistics"] for e in (host, device)]
    assert np.abs(taught[0]).max() > 10
    np.testing.assert_allclose(taught[1], taught[0], atol=2e-4)


def test_reused_slots_and_cancelled_requests(loaded: LoadedModel) -> None:
    """Guards against: a request that inherits cache, state or in-flight results of a slot's last owner."""
    prompts = random_prompts(9)
    alone = []
    for prompt in prompts:
        engine = host_engine(loaded, "off")
        engine.submit(prompt, SamplingParams(max_tokens=12, **GREEDY))
        alone.append([t for _ in range(20) for e in engine.step() for t in e.token_ids])
    engine = device_engine(loaded, "fixed")
    numbers = [engine.submit(prompt, SamplingParams(max_tokens=12, **GREEDY)) for prompt in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    reasons: dict[int, str | None] = {}
    for turn in range(200):
        if turn == 3:  # their next rounds are on the way already
            assert engine.cancel(numbers[0]) and engine.cancel(numbers[2])
            assert not engine.cancel(numbers[0])
        for event in engine.step():
            assert event.request_id not in reasons or reasons[event.request_id] is None
            tokens[event.request_id] += event.token_ids
            reasons[event.request_id] = event.finish_reason
        if not engine.has_work:
            break
    for n, number in enumerate(numbers):
        if n in (0, 2):
            assert reasons[number] == "cancelled"
            assert tokens[number] == alone[n][: len(tokens[number])]
        else:
            assert (tokens[number], reasons[number]) == (alone[n], "length")


def test_rows_without_any_finite_logit_end(loaded: LoadedModel) -> None:
    """Guards against: −1 looked up as an embedding, or a token invented out of NaN."""
    engine = device_engine(loaded, "fixed")
    engine.device.round.target.weights.head.weight.fill_(torch.nan)
    number = engine.submit([1, 2, 3], SamplingParams(max_tokens=8, **GREEDY))
    events = [event for _ in range(6) for event in engine.step()]
    assert [(e.request_id, e.token_ids, e.stop_reason) for e in events] == [
        (number, [], "logits are not finite")
    ]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"repetition_penalty": 1.3}, "repetition_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
    ],
)
def test_fields_that_the_device_does_not_honour_are_refused(
    loaded: LoadedModel, params: dict[str, Any], name: str
) -> None:
    """Guards against: a penalty or bias that is silently left out."""
    engine = device_engine(loaded, "off")
    with pytest.raises(RequestError, match=rf"{name}.*device 'cpu'"):
        engine.submit([1, 2], SamplingParams(**params))
    assert not engine.has_work


def test_requests_choose_their_own_draft_length(loaded: LoadedModel) -> None:
    """Guards against: a row without drafts that takes part in another row's draft length."""
    engine = device_engine(loaded, "adaptive")
    host = host_engine(loaded, "off")
    for one in (engine, host):
        for n, limit in enumerate((0, None, 2)):
            speculative = {} if one is host else {"num_speculative_tokens": limit}
            one.submit(random_prompts()[n], SamplingParams(max_tokens=15, **GREEDY, **speculative))
    found = []
    for one in (engine, host):
        tokens: dict[int, list[int]] = {}
        drafted: Counter[int] = Counter()
        while one.has_work:
            for event in one.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                drafted[event.request_id] = max(drafted[event.request_id], event.drafted)
        found.append((tokens, drafted))
    assert found[0][0] == found[1][0]
    assert found[0][1][1] == 0 < found[0][1][3] <= 2 <= K
