"""A double of ``tensorrt_llm.bindings.executor`` around the engine double: requests in, streamed results out.

Results come one a request and step. The buffer of a trace holds garbage but for the row of this step, as
the runtime's does, whose rows are numbered by generated tokens. Iterations cost ``cost_ms`` of their tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.builder.eagle_double import EagleDouble
from tests.builder.eagle_runtime import RuntimeDouble
from trtllm_av.builder.trtllm.eagle import make_adaptive_eagle


def steep(tokens: int) -> float:
    """Costs at which verifying unlikely drafts does not pay."""
    return 1.0 + 0.2 * tokens


class ExecutorDouble:
    """The executor of one engine; all requests are submitted before the first step."""

    def __init__(self, double: EagleDouble, cost_ms: Callable[[int], float] = steep) -> None:
        self.double = double
        self.requests: dict[int, Any] = {}
        self.cancelled: list[int] = []
        self.failing: int | None = None  # a request that fails in its third step
        self.is_shut_down = False
        self.iterations: list[Any] = []
        self.runtime: RuntimeDouble | None = None
        self._cost_ms = cost_ms
        self._numbers = itertools.count(1)
        self._sent: dict[int, int] = {}
        self._final: set[int] = set()
        make = make_adaptive_eagle(double.modules)
        double.build(make)

    def enqueue_request(self, request: Any) -> int:
        assert self.runtime is None, "the double takes no requests while it runs"
        number = next(self._numbers)
        self.requests[number] = request
        return number

    def cancel_request(self, number: int) -> None:
        self.cancelled.append(number)
        self._final.add(number)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def get_latest_iteration_stats(self) -> list[Any]:
        taken, self.iterations = self.iterations, []
        return taken

    def await_responses(self, timeout: Any = None) -> list[Any]:
        if self.runtime is None:
            prompts = [request.input_token_ids for request in self.requests.values()]
            self.runtime = RuntimeDouble(self.double, prompts)
        is_context = not self.runtime.records
        self.runtime.step()
        record = self.runtime.records[-1]
        active = [row for row, n in enumerate(self.requests) if n not in self._final]
        tokens = sum(record.draft_lens[row] + 1 for row in active)
        batch = SimpleNamespace(
            num_scheduled_requests=len(active),
            num_gen_requests=0 if is_context else len(active),
            num_ctx_tokens=tokens if is_context else 0,
        )
        if len(self.runtime.records) % 7 == 3:  # now and then nothing is scheduled
            idle = SimpleNamespace(num_scheduled_requests=0, num_gen_requests=0, num_ctx_tokens=0)
            self.iterations.append(
                SimpleNamespace(iter_latency_ms=0.1, inflight_batching_stats=idle)
            )
        latency = self._cost_ms(tokens)
        self.iterations.append(
            SimpleNamespace(iter_latency_ms=latency, inflight_batching_stats=batch)
        )
        responses = []
        for row, (number, request) in enumerate(self.requests.items()):
            if number not in self._final:
                responses.append(self._response(row, number, request, record.trace))
        return responses

    def _response(self, row: int, number: int, request: Any, trace: Any) -> Any:
        assert self.runtime is not None
        if number == self.failing and len(self.runtime.records) == 3:
            self._final.add(number)
            return SimpleNamespace(
                request_id=number, has_error=lambda: True, error_msg="out of blocks"
            )
        history = self.runtime.histories[row]
        done = len(history) - self.runtime.num_prompt[row]
        kept = min(done, request.max_tokens)
        first = self.runtime.num_prompt[row] + self._sent.get(number, 0)
        new = history[first : self.runtime.num_prompt[row] + kept]
        self._sent[number] = kept
        is_final = kept == request.max_tokens
        if is_final:
            self._final.add(number)
        outputs = []
        if trace is not None and getattr(request.output_config, "additional_model_outputs", None):
            buffer = np.full((3, trace.shape[1]), 7.5e8, np.float32)
            buffer[1] = trace[row]
            outputs.append(SimpleNamespace(name="av_trace", output=buffer))
        drafts = SimpleNamespace(
            total_draft_tokens=sum(r.draft_lens[row] for r in self.runtime.records),
            total_accepted_draft_tokens=done - len(self.runtime.records),
        )
        result = SimpleNamespace(
            output_token_ids=[new],
            is_final=is_final,
            additional_outputs=outputs,
            request_perf_metrics=SimpleNamespace(speculative_decoding=drafts),
        )
        return SimpleNamespace(request_id=number, result=result, has_error=lambda: False)


def fill_bindings(module: ModuleType, executor: Any) -> None:
    """Make ``module.Executor(...)`` return ``executor``, which keeps what it was made with."""

    def make(model_path: str, model_type: Any, executor_config: Any) -> Any:
        executor.model_path, executor.config = model_path, executor_config
        return executor

    module.__dict__["Executor"] = make
