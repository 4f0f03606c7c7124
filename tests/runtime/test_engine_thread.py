"""One engine for many threads: delivery, cancellation, a full queue, and the engine's end."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from tests.runtime.test_scheduler import make_engine
from trtllm_av.runtime.engine_thread import EngineThread, Response
from trtllm_av.runtime.errors import EngineStoppedError, OverloadError, RequestError
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.request import TokenEvent

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
LONG = SamplingParams(max_tokens=2000, temperature=0.0)


def collect(responses: queue.SimpleQueue[Response]) -> tuple[list[int], Response]:
    """Tokens of a request and its last response."""
    tokens: list[int] = []
    while True:
        response = responses.get(timeout=20)
        if not isinstance(response, TokenEvent):
            return tokens, response
        tokens += response.token_ids
        if response.finish_reason is not None:
            return tokens, response


def test_requests_from_many_threads_get_their_own_tokens() -> None:
    """Guards against events that reach the wrong request, and against lost ones."""
    expected = []
    for n in range(8):
        engine = make_engine()
        engine.submit([n, n + 1], GREEDY)
        expected.append([t for _ in range(40) for e in engine.step() for t in e.token_ids])
    thread = EngineThread(make_engine())
    results: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        thread.submit([n, n + 1], GREEDY, responses.put)
        results[n] = collect(responses)[0]

    workers = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    thread.close()
    assert [results[n] for n in range(8)] == expected


def test_cancellation_takes_effect_before_the_second_round() -> None:
    """Guards against clients that left and keep their slot."""
    engine = make_engine(max_seq_len=4000)
    rounds = 0
    at_cancel: list[int] = []
    responses: queue.SimpleQueue[Response] = queue.SimpleQueue()

    def on_round(_: Any) -> None:
        nonlocal rounds
        rounds += 1

    thread = EngineThread(engine, on_round=on_round)

    def deliver(response: Response) -> None:
        if not at_cancel:
            at_cancel.append(rounds)
            thread.cancel(ticket)
        responses.put(response)

    ticket = thread.submit([1, 2], LONG, lambda response: deliver(response))
    _, last = collect(responses)
    assert isinstance(last, TokenEvent) and last.finish_reason == "cancelled"
    assert rounds - at_cancel[0] <= 2
    thread.close()
    assert engine.num_live == 0


def test_refused_request_gets_its_error_and_others_go_on() -> None:
    """Guards against one wrong request that ends the engine."""
    thread = EngineThread(make_engine())
    wrong: queue.SimpleQueue[Response] = queue.SimpleQueue()
    right: queue.SimpleQueue[Response] = queue.SimpleQueue()
    thread.submit([99], GREEDY, wrong.put)
    thread.submit([1, 2], GREEDY, right.put)
    assert isinstance(collect(wrong)[1], RequestError)
    assert len(collect(right)[0]) == 20
    thread.close()


def test_full_queue_refuses_and_recovers() -> None:
    """Guards against a queue without a bound, and against places that are never given back."""
    thread = EngineThread(make_engine(num_slots=2, max_seq_len=4000), max_waiting=1)
    responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
    tickets = [thread.submit([1, 2], LONG, responses.put) for _ in range(3)]
    with pytest.raises(OverloadError, match="3 requests are running or waiting"):
        thread.submit([1, 2], LONG, responses.put)
    for ticket in tickets:
        thread.cancel(ticket)
    for _ in tickets:
        collect(responses)
    thread.submit([1, 2], GREEDY, responses.put)
    assert len(collect(responses)[0]) == 20
    thread.close()


def test_dead_engine_fails_everything_with_the_reason() -> None:
    """Guards against clients that wait for ever for an engine that has ended."""
    engine = make_engine(num_slots=1, max_seq_len=4000)
    thread = EngineThread(engine)
    live: queue.SimpleQueue[Response] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[Response] = queue.SimpleQueue()
    thread.submit([1, 2], LONG, live.put)
    thread.submit([1, 2], LONG, waiting.put)
    live.get(timeout=20)

    def fail() -> list[TokenEvent]:
        raise MemoryError("no memory left")

    engine.step = fail  # type: ignore[method-assign]
    for responses in (live, waiting):
        _, last = collect(responses)
        assert isinstance(last, EngineStoppedError) and "no memory left" in str(last)
    end = time.monotonic() + 10
    while thread.is_alive and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(EngineStoppedError, match="no memory left; restart the model"):
        thread.submit([1, 2], GREEDY, live.put)
    thread.close()
