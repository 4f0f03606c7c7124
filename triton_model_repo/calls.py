"""Triton requests in flight: engine events in, responses out, and clients that went away.

Invariants: one thread sends everything and looks for cancelled requests, so the engine's thread never waits
for a client; a request gets exactly one final response, with tensors or an error; without streaming that
is its only one; a request that fails in one row ends in all of them.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from trtllm_av.runtime.engine_thread import EngineThread, Response, Ticket
from trtllm_av.runtime.errors import AdaptiveVerificationError
from trtllm_av.runtime.request import TokenEvent
from trtllm_av.triton_model_repo.model_request import ModelRequest
from trtllm_av.triton_model_repo.progress import Outputs, Progress

CANCELLED = "cancelled"
CHECK_SECONDS = 0.02  # how often running requests are asked whether their client is still there

_log = logging.getLogger(__name__)


class Client(Protocol):
    """The way back to one client; ``fail`` does not raise."""

    def send(self, outputs: Outputs, *, is_final: bool) -> None: ...
    def fail(self, error: AdaptiveVerificationError | str) -> None: ...
    def is_cancelled(self) -> bool: ...


@dataclass(eq=False, slots=True)
class Call:
    """One Triton request with its rows. ``key`` is unique in its model, whatever id the client chose."""

    request_id: str
    request: ModelRequest
    client: Client
    build: Callable[[list[Progress], bool], Outputs]
    rows: list[Progress] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    num_open: int = 0
    is_over: bool = False
    key: int = 0


class Calls:
    """All requests of one model. ``start``, ``stop`` and ``close`` may be called from any thread."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._events: queue.SimpleQueue[tuple[Call, int, Response] | None] = queue.SimpleQueue()
        self._open: dict[Call, None] = {}  # in order of arrival
        self._lock = threading.Lock()  # guards _open
        self._keys = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def start(self, call: Call) -> None:
        """Submit every row; errors reach the client."""
        call.key = next(self._keys)
        with self._lock:
            self._open[call] = None
        call.num_open = len(call.request.rows)
        call.rows = [Progress(row, index, call.key) for index, row in enumerate(call.request.rows)]
        for progress in call.rows:
            deliver = self._deliverer(call, progress.index)
            try:
                ticket = self._engine.submit(
                    progress.request.prompt_token_ids, progress.request.params, deliver
                )
            except AdaptiveVerificationError as error:
                deliver(error)
                break
            call.tickets.append(ticket)
        if call.is_over:  # a row failed while others were still being submitted
            self._cancel([call])

    def stop(self, request_id: str, key: int | None = None) -> None:
        """Cancel the running request of this key, or those with this id, as a client does that sends ``stop``."""
        with self._lock:
            calls = [
                call
                for call in self._open
                if (call.key == key if key is not None else call.request_id == request_id != "")
            ]
        self._cancel(calls)

    def close(self) -> None:
        """Send what the engine has delivered so far, then end; the engine must have ended before."""
        self._events.put(None)
        self._thread.join()

    def _deliverer(self, call: Call, index: int) -> Callable[[Response], None]:
        return lambda response: self._events.put((call, index, response))

    def _cancel(self, calls: Iterable[Call]) -> None:
        for call in calls:
            for ticket in list(call.tickets):
                self._engine.cancel(ticket)

    def _run(self) -> None:
        next_check = 0.0
        while True:
            if (now := time.monotonic()) >= next_check:
                self._check_clients()
                next_check = now + CHECK_SECONDS
            try:
                item = self._events.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            call, index, response = item
            if call.is_over:
                continue
            try:
                self._handle(call, call.rows[index], response)
            except Exception as error:  # the server may refuse a response; others go on
                _log.exception("a response could not be sent")
                self._end(call)
                call.client.fail(f"the response could not be sent: {error}")

    def _check_clients(self) -> None:
        with self._lock:
            calls = list(self._open)
        self._cancel(call for call in calls if call.client.is_cancelled())

    def _handle(self, call: Call, row: Progress, response: Response) -> None:
        if not isinstance(response, TokenEvent):
            self._end(call)
            call.client.fail(response)
            return
        if response.finish_reason == "cancelled":
            self._end(call)
            call.client.fail(CANCELLED)
            return
        row.add(response)
        call.num_open -= row.finish_reason is not None
        is_final = call.num_open == 0
        has_input = not call.request.is_input_excluded
        if is_final:
            self._end(call)
        if call.request.is_streaming:
            call.client.send(call.build([row], False), is_final=is_final)
            row.clear_pending()
        elif is_final:
            call.client.send(call.build(call.rows, has_input), is_final=True)

    def _end(self, call: Call) -> None:
        call.is_over = True
        with self._lock:
            self._open.pop(call, None)
        self._cancel([call])  # rows that still run
