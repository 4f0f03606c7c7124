"""TensorRT-LLM's Executor on an EAGLE engine that trims its drafts, and the adaptation beside it.

The engine is told what to trim with through the control block of the plugin library in this process;
``av_trace`` and the iteration statistics come back. Requests are streamed inside, whatever the caller
wants, since a trace that comes at the end of a request teaches nothing while it runs.

Written against the interface in ``builder/trtllm/assumptions.json``; not executed with TensorRT-LLM where
it was written.

Invariants: the plugins are registered before the engine is deserialised; the caller's thread never waits
for the adaptation; if that fails, drafts are verified in full, and it is counted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.engines.trtllm_adaptation import StepResult, TrtllmAdaptation
from trtllm_av.runtime.engines.trtllm_control import Block, ControlWriter
from trtllm_av.runtime.engines.trtllm_engine import TrtllmEngine
from trtllm_av.runtime.engines.trtllm_library import PluginForm, register_plugins
from trtllm_av.runtime.engines.trtllm_thread import AdaptationThread
from trtllm_av.runtime.engines.trtllm_trace import TRACE
from trtllm_av.runtime.errors import MissingDependencyError, RequestError, UsageError

_MAX_ITERATIONS = 1000  # iteration statistics that the executor keeps until they are read
_POLL = timedelta(milliseconds=100)


@dataclass(frozen=True, slots=True)
class TrtllmOptions:
    """How to run an engine. ``eagle_choices``: its tree, None for a chain; ``is_adaptive`` False verifies
    every draft; ``posterior_threshold`` (with ``greedy_sampling`` False) is typical acceptance, with which
    nothing is trimmed; ``plugin_form`` "python" needs no library and serves in this process alone;
    ``cost_table`` replaces measured step costs."""

    eagle_choices: Sequence[Sequence[int]] | None = None
    is_adaptive: bool = True
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    cuda_graph_mode: bool = False
    kv_cache_free_gpu_memory_fraction: float | None = None
    plugin_form: PluginForm = "library"
    plugin_library: Path | None = None
    cost_table: Path | None = None

    def __post_init__(self) -> None:
        if self.use_dynamic_tree:
            raise UsageError(
                "use_dynamic_tree=True: drafts of dynamic trees have no place yet when they are scored; use "
                "eagle_choices"
            )
        if self.posterior_threshold is not None and self.greedy_sampling:
            raise UsageError(
                f"posterior_threshold={self.posterior_threshold} has no use with greedy_sampling=True; "
                "leave one out"
            )


@dataclass(slots=True)
class Generated:
    """Tokens of one request so far; the totals are the executor's, known at its end. ``error`` is why a
    request ended that the executor failed, None for all others."""

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    is_final: bool = False
    error: str | None = None
    total_draft_tokens: int | None = None
    accepted_draft_tokens: int | None = None


class TrtllmExecutor:
    """An engine that serves. ``adaptation`` reports what was learnt; ``close`` ends both.

    ``bindings`` is ``tensorrt_llm.bindings.executor``, imported if None; ``blocks`` are the control blocks
    of all ranks, by default the one of this process, which serves engines of one rank. ``observe`` gets
    every result with its trace, in the caller's thread and in the place of the adaptation.

    Raises MissingDependencyError, CheckpointError, UsageError or BuildError, before an engine is loaded.
    """

    def __init__(
        self,
        engine_dir: Path,
        options: TrtllmOptions | None = None,
        *,
        bindings: Any = None,
        blocks: Sequence[Block] | None = None,
        observe: Callable[[Sequence[StepResult]], None] | None = None,
    ) -> None:
        self.options = options = options or TrtllmOptions()
        self.engine = TrtllmEngine.load(engine_dir)
        self.tree = self.engine.tree(options.eagle_choices)
        if self.engine.world_size > 1 and blocks is None:
            raise UsageError(
                f"engine of {self.engine.world_size} ranks: their control blocks lie in shared memory, give "
                "all of them (docs/trtllm.md)"
            )
        self._is_traced = options.is_adaptive or observe is not None
        if self._is_traced and not self.engine.has_trace:
            raise UsageError(
                f"engine {str(engine_dir)!r} has no av_trace to learn from; build it with --av_trace enable, "
                "or give is_adaptive=False"
            )
        package = _import("tensorrt_llm")
        self.engine.check_version(str(package.__version__))
        self._bindings = bindings or _import("tensorrt_llm.bindings.executor")
        own_block = register_plugins(options.plugin_form, options.plugin_library)
        self._executor = self._start()
        writer = ControlWriter(blocks or [own_block])
        # Whatever an earlier executor of this process left there is not for this engine.
        writer.verify_all(round=writer.newest_round)
        self.adaptation: TrtllmAdaptation | None = None
        self._thread: AdaptationThread | None = None
        self._observe = observe
        if options.is_adaptive and observe is None:
            cost_model = None
            if options.cost_table is not None:
                cost_model = CostModel.from_table(
                    options.cost_table, num_positions=self.engine.max_draft_len, is_block=True
                )
            self.adaptation = TrtllmAdaptation(
                self.tree,
                writer,
                min_draft_len=self.engine.min_draft_len,
                cost_model=cost_model,
                is_greedy=options.greedy_sampling,
            )
            statistics = self._executor.get_latest_iteration_stats
            self._thread = AdaptationThread(self.adaptation, writer, statistics)
            self._observe = self._thread.put
        self._running: dict[int, Generated] = {}

    def _start(self) -> Any:
        b, options = self._bindings, self.options
        config: dict[str, Any] = {
            "max_beam_width": 1,
            "iter_stats_max_iterations": _MAX_ITERATIONS,
            "decoding_config": b.DecodingConfig(
                decoding_mode=b.DecodingMode.Eagle(),
                eagle_config=b.EagleConfig(
                    # Also for a chain: without them the executor takes a tree of its own.
                    eagle_choices=self.tree.choices,
                    greedy_sampling=options.greedy_sampling,
                    posterior_threshold=options.posterior_threshold,
                ),
            ),
            "extended_runtime_perf_knob_config": b.ExtendedRuntimePerfKnobConfig(
                cuda_graph_mode=options.cuda_graph_mode
            ),
        }
        if options.kv_cache_free_gpu_memory_fraction is not None:
            config["kv_cache_config"] = b.KvCacheConfig(
                free_gpu_memory_fraction=options.kv_cache_free_gpu_memory_fraction
            )
        if self._is_traced:
            config["additional_model_outputs"] = self._traced()
        return b.Executor(
            str(self.engine.folder), b.ModelType.DECODER_ONLY, b.ExecutorConfig(**config)
        )

    def _traced(self) -> list[Any]:
        return [self._bindings.AdditionalModelOutput(name=TRACE, gather_context=False)]

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        end_id: int | None = None,
        pad_id: int | None = None,
    ) -> int:
        """Queue a request; returns its number. RequestError if it can never be served."""
        if not prompt_token_ids or max_tokens < 1:
            raise RequestError(
                f"request of {len(prompt_token_ids)} tokens with max_tokens={max_tokens}; both are at least 1"
            )
        b = self._bindings
        output: dict[str, Any] = {"exclude_input_from_output": True, "return_perf_metrics": True}
        if self._is_traced:
            output["additional_model_outputs"] = self._traced()
        request_id = int(
            self._executor.enqueue_request(
                b.Request(
                    input_token_ids=list(prompt_token_ids),
                    max_tokens=max_tokens,
                    streaming=True,
                    sampling_config=b.SamplingConfig(),
                    output_config=b.OutputConfig(**output),
                    end_id=end_id,
                    pad_id=pad_id,
                )
            )
        )
        self._running[request_id] = Generated(request_id)
        return request_id

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Generated]:
        """Requests with new tokens and those that ended, after waiting for them a moment."""
        changed: dict[int, Generated] = {}
        results: list[StepResult] = []
        for response in self._executor.await_responses(timeout=_POLL):
            request_id = int(response.request_id)
            request = self._running.get(request_id)
            if request is None:
                continue  # cancelled
            changed[request_id] = request
            if response.has_error():  # of this request alone: the others of the step go on
                request.error, request.is_final = str(response.error_msg), True
                results.append(StepResult(request_id, None, True))
            else:
                result = response.result
                request.token_ids.extend(int(token) for token in result.output_token_ids[0])
                request.is_final = bool(result.is_final)
                results.append(StepResult(request_id, _trace_of(result), request.is_final))
                if request.is_final:
                    _take_totals(request, result)
            if request.is_final:
                del self._running[request_id]
        if self._observe is not None and results:
            self._observe(results)
        return list(changed.values())

    def cancel(self, request_id: int) -> None:
        """End a request; nothing more of it is reported."""
        if self._running.pop(request_id, None) is None:
            return
        self._executor.cancel_request(request_id)
        if self._observe is not None:
            self._observe([StepResult(request_id, None, True)])

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, end_id: int | None = None
    ) -> list[Generated]:
        """All ``prompts`` to their ends, in their order; RequestError if one of them failed."""
        numbers = [self.submit(prompt, max_tokens=max_tokens, end_id=end_id) for prompt in prompts]
        requests = [self._running[number] for number in numbers]
        while self.has_work:
            self.step()
        for request in requests:
            if request.error is not None:
                raise RequestError(f"request {request.request_id} failed: {request.error}")
        return requests

    def close(self) -> None:
        """Shut the executor down and end the adaptation."""
        if self._thread is not None:
            self._thread.close()
        self._executor.shutdown()


def _trace_of(result: Any) -> Any:
    for output in getattr(result, "additional_outputs", None) or ():
        if output.name == TRACE:
            tensor = output.output
            return tensor.cpu() if hasattr(tensor, "cpu") else tensor
    return None


def _take_totals(request: Generated, result: Any) -> None:
    metrics = getattr(result, "request_perf_metrics", None)
    drafts = getattr(metrics, "speculative_decoding", None)
    if drafts is not None:
        request.total_draft_tokens = int(drafts.total_draft_tokens)
        request.accepted_draft_tokens = int(drafts.total_accepted_draft_tokens)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} cannot be imported ({error}); install tensorrt-llm>=1.0,<1.3"
        ) from None
