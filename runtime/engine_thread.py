"""One engine for many threads: requests and cancellations go in through a queue, events come out.

Invariants: the engine runs on one thread of its own, and only there; a request gets events until one with
a ``finish_reason``, or one error, and nothing afterwards; a cancellation takes effect before the second
round that starts after it; if the engine ends, every request that it held fails with the reason, and so does
every later one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from trtllm_av.runtime.errors import (
    AdaptiveVerificationError,
    EngineStoppedError,
    OverloadError,
    RequestError,
)
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.request import TokenEvent
from trtllm_av.runtime.scheduler import Engine

Response = TokenEvent | AdaptiveVerificationError

_log = logging.getLogger(__name__)


class Ticket:
    """A submitted request; what ``cancel`` takes. ``num_output_tokens`` counts those delivered."""

    __slots__ = ("deliver", "num_output_tokens", "params", "prompt_token_ids", "request_id")

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        deliver: Callable[[Response], None],
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.deliver = deliver
        self.request_id: int | None = None  # the engine's, once it has the request
        self.num_output_tokens = 0


class EngineThread:
    """Runs ``engine`` until ``close``.

    ``max_waiting`` bounds the requests beyond those that fit into the engine's slots; None is no bound.
    ``on_round`` is called on the engine's thread after each round, and once at the start; ``on_end`` there
    with each request that the engine served to its end, cancelled or not.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int | None = None,
        on_round: Callable[[Engine], None] | None = None,
        on_end: Callable[[Ticket], None] | None = None,
    ) -> None:
        self._engine = engine
        self._limit = None if max_waiting is None else engine.executor.num_slots + max_waiting
        self._on_round = on_round
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[tuple[Ticket, bool] | None] = queue.SimpleQueue()
        self._by_id: dict[int, Ticket] = {}
        self._num_open = 0
        self._error: EngineStoppedError | None = None
        self._lock = threading.Lock()  # guards _num_open and _error
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._error is None

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        deliver: Callable[[Response], None],
    ) -> Ticket:
        """Queue a request; ``deliver`` is called on the engine's thread and must neither block nor raise.

        Raises OverloadError if the queue is full and EngineStoppedError if the engine has ended. A request
        that cannot be served gets its RequestError delivered.
        """
        ticket = Ticket(prompt_token_ids, params, deliver)
        with self._lock:
            if self._error is not None:
                raise EngineStoppedError(str(self._error))
            if self._limit is not None and self._num_open >= self._limit:
                raise OverloadError(
                    f"{self._num_open} requests are running or waiting, which is the limit; "
                    "send this one again later"
                )
            self._num_open += 1
            self._inbox.put((ticket, True))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request early: it gets a last event "cancelled", unless it has ended already."""
        self._inbox.put((ticket, False))

    def close(self) -> None:
        """End the engine after the round in progress; requests that it still holds fail."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            self._report_round()
            while self._take_orders():
                for event in self._engine.step():
                    self._deliver(event)
                self._report_round()
        except Exception as error:  # whatever ended it has to reach the clients
            _log.exception("the engine ended")
            reason = f"the engine ended with {type(error).__name__}: {error}; restart the model"
        self._fail_all(reason)

    def _report_round(self) -> None:
        if self._on_round is not None:
            self._on_round(self._engine)

    def _take_orders(self) -> bool:
        """Carry out all orders, waiting for one if there is nothing to do; False at the end."""
        while True:
            try:
                order = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            ticket, is_submission = order
            if is_submission:
                self._submit(ticket)
            elif ticket.request_id is not None:
                self._engine.cancel(ticket.request_id)

    def _submit(self, ticket: Ticket) -> None:
        try:
            ticket.request_id = self._engine.submit(ticket.prompt_token_ids, ticket.params)
        except RequestError as error:
            self._close(ticket, error)
        else:
            self._by_id[ticket.request_id] = ticket

    def _deliver(self, event: TokenEvent) -> None:
        ticket = self._by_id[event.request_id]
        ticket.num_output_tokens += len(event.token_ids)
        if event.finish_reason is None:
            ticket.deliver(event)
            return
        del self._by_id[event.request_id]
        if self._on_end is not None:
            self._on_end(ticket)
        self._close(ticket, event)

    def _close(self, ticket: Ticket, last: Response) -> None:
        with self._lock:
            self._num_open -= 1
        ticket.deliver(last)

    def _fail_all(self, reason: str) -> None:
        error = EngineStoppedError(reason)
        with self._lock:
            self._error = error  # from here on nothing enters the inbox but cancellations
        tickets = list(self._by_id.values())
        while not self._inbox.empty():
            order = self._inbox.get()
            if order is not None and order[1]:
                tickets.append(order[0])
        self._by_id.clear()
        for ticket in tickets:
            self._close(ticket, error)
