"""The executor wrapper for TensorRT-LLM, end to end on doubles of engine, plugin, executor and package.

TensorRT-LLM itself is not needed here; with it, ``pytest -m trtllm`` runs the same claims on a real engine.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.builder.eagle_double import Control, EagleDouble
from tests.builder.executor_double import ExecutorDouble, fill_bindings
from tests.builder.toy_models import CHAIN, TREE, greedy
from tests.builder.trtllm_double import TrtllmDouble
from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.plugins.control_block import SIZE, ControlBlock
from trtllm_av.runtime.engines import trtllm
from trtllm_av.runtime.engines.trtllm import TrtllmExecutor, TrtllmOptions
from trtllm_av.runtime.errors import CheckpointError, RequestError, UsageError

PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7], [9, 3], [2, 3, 8]]
LENGTH = 150


def write_engine(folder: Path, choices: Sequence[Sequence[int]] = CHAIN, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"plugin": True, "min_draft_len": 1, "trace": True} | changes.pop("settings", {})
    model = {
        "architecture": "EagleForCausalLM",
        "num_eagle_layers": max(map(len, choices)),
        "max_draft_len": len(choices),
        "max_non_leaves_per_layer": 4,
        "mapping": {"world_size": 1},
        "adaptive_verification": settings,
        "adaptive_verification_version": "1",
        **changes,
    }
    ours = {"adaptive_verification", "adaptive_verification_version"}
    assert model.keys() - ours <= set(assumptions().raw["engine_config"]["pretrained_keys"])
    config = {"version": "1.2.1", "pretrained_config": model, "build_config": {"max_draft_len": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Setup:
    """A wrapper on doubles; ``start`` makes another executor."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = tmp_path / "engine", monkeypatch
        self.block = ControlBlock(mmap.mmap(-1, SIZE))
        self.events: list[str] = []
        self._open: list[TrtllmExecutor] = []
        monkeypatch.setattr(trtllm, "register_plugins", self._register)

    def _register(self, form: str, path: Path | None) -> ControlBlock:
        self.events.append(form)
        return self.block

    def start(
        self,
        choices: Sequence[Sequence[int]] = CHAIN,
        *,
        cost_ms: Any = None,
        engine: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[TrtllmExecutor, ExecutorDouble]:
        double = EagleDouble(choices, Control(block=self.block))
        executor = ExecutorDouble(double, *([cost_ms] if cost_ms else []))
        package = TrtllmDouble(eagle=EagleDouble())
        bindings = package.modules["tensorrt_llm.bindings.executor"]
        fill_bindings(bindings, executor)
        made = bindings.Executor
        bindings.__dict__["Executor"] = lambda *a: (self.events.append("engine"), made(*a))[1]
        package.install(self._monkeypatch)
        folder = write_engine(self._folder, choices, **(engine or {}))
        if choices is not CHAIN:
            options["eagle_choices"] = choices
        wrapper = TrtllmExecutor(folder, TrtllmOptions(**options))
        self._open.append(wrapper)
        return wrapper, executor

    def close(self) -> None:
        for wrapper in self._open:
            wrapper.close()


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    made = Setup(tmp_path, monkeypatch)
    yield made
    made.close()


def drain(wrapper: TrtllmExecutor) -> None:
    """Wait until the adaptation has taken in all results."""
    assert wrapper._thread is not None
    wrapper._thread.close()


def serve(wrapper: TrtllmExecutor, length: int = LENGTH) -> list[list[int]]:
    """Generate in step with the adaptation, so that the test does not depend on the thread's speed."""
    thread, adaptation = wrapper._thread, wrapper.adaptation
    if thread is not None and adaptation is not None:

        def observe(results: Any) -> None:
            adaptation.observe(results)
            adaptation.observe_iterations(thread._new_iterations())

        wrapper._observe = observe
    return [request.token_ids for request in wrapper.generate(PROMPTS, max_tokens=length)]


EXPECTED = [greedy(prompt, LENGTH) for prompt in PROMPTS]


@pytest.mark.parametrize("choices", [CHAIN, TREE], ids=["chain", "tree"])
def test_same_tokens_and_fewer_drafts(setup: Setup, choices: Sequence[Sequence[int]]) -> None:
    """Guards against a trim that changes tokens, and against an adaptation that never trims."""
    plain, executor = setup.start(choices, is_adaptive=False)
    assert serve(plain) == EXPECTED
    full = drafts_of(executor)
    adaptive, executor = setup.start(choices)
    assert serve(adaptive) == EXPECTED
    assert adaptive.adaptation is not None
    assert drafts_of(executor) < 0.8 * full, adaptive.adaptation.fallbacks
    assert executor.runtime is not None
    assert min(length for r in executor.runtime.records for length in r.next_draft_lens) >= 1


def drafts_of(executor: ExecutorDouble) -> int:
    assert executor.runtime is not None
    return sum(sum(record.draft_lens) for record in executor.runtime.records)


def test_forecasts_come_true(setup: Setup) -> None:
    """Guards against labels of another step or request, which the fit would follow without a word."""
    wrapper, _ = setup.start()
    serve(wrapper, 400)
    adaptation = wrapper.adaptation
    assert adaptation is not None
    assert adaptation.reader.num_unpaired == 0
    assert adaptation.costs.num_realigned == 0 and adaptation.costs.num_samples > 50
    assert adaptation.estimator.num_refits >= 1
    before = adaptation.expected_accepted, adaptation.actual_accepted
    assert before[1] > 100
    # Cold coefficients are in there: the sum is near, not equal.
    assert before[0] == pytest.approx(before[1], rel=0.35)


def test_flat_costs_verify_everything_and_say_so(setup: Setup) -> None:
    """Guards against an adaptation that pretends to decide from costs that cannot steer."""
    wrapper, executor = setup.start(cost_ms=lambda tokens: 5.0)
    assert serve(wrapper) == EXPECTED
    assert wrapper.adaptation is not None
    assert wrapper.adaptation.fallbacks["step costs are being measured"] > 0
    assert wrapper.adaptation.fallbacks["step costs cannot steer"] > 0
    assert executor.runtime is not None
    assert executor.runtime.records[-1].next_draft_lens == [len(CHAIN)] * len(PROMPTS)


def test_typical_acceptance_is_never_trimmed(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """(g) Guards against a trim under an acceptance whose tokens it would change."""
    wrapper, executor = setup.start(greedy_sampling=False, posterior_threshold=0.09)
    serve(wrapper)
    assert wrapper.adaptation is not None
    assert wrapper.adaptation.fallbacks["acceptance is not greedy"] == 1
    assert "not greedily" in caplog.text
    assert executor.runtime is not None
    lens = {length for r in executor.runtime.records for length in r.next_draft_lens}
    assert lens == {len(CHAIN)}
    assert executor.config.decoding_config.eagle_config.posterior_threshold == 0.09


def test_configuration_of_the_executor(setup: Setup) -> None:
    """(g) Guards against a trace that nobody asked for, or a threshold that turns greedy off."""
    wrapper, executor = setup.start(cuda_graph_mode=True, kv_cache_free_gpu_memory_fraction=0.5)
    config = executor.config
    assert [output.name for output in config.additional_model_outputs] == ["av_trace"]
    eagle = config.decoding_config.eagle_config
    assert eagle.eagle_choices == CHAIN  # never the executor's own default, a tree of 63
    assert eagle.greedy_sampling is True and eagle.posterior_threshold is None
    assert config.max_beam_width == 1
    assert config.extended_runtime_perf_knob_config.cuda_graph_mode is True
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.5
    wrapper.submit([1, 2], max_tokens=3)
    (request,) = executor.requests.values()
    assert request.streaming is True
    outputs = request.output_config.additional_model_outputs
    assert [output.name for output in outputs] == ["av_trace"]


def test_library_is_loaded_before_the_engine(setup: Setup) -> None:
    """Guards against an engine that is deserialised while its plugins are not registered."""
    setup.start()
    setup.start(plugin_form="python")
    assert setup.events == ["library", "engine", "python", "engine"]


def test_block_of_an_earlier_executor_does_not_count(setup: Setup) -> None:
    """Guards against the first steps of an engine being trimmed by another model's coefficients."""
    setup.block.write(budget=1, coefficients=[0.5, *[-0.2] * 4], floor=1, round=0)
    plain, executor = setup.start(is_adaptive=False)
    serve(plain, 20)
    assert executor.runtime is not None
    assert {n for r in executor.runtime.records for n in r.next_draft_lens} == {len(CHAIN)}


def test_adaptation_runs_beside_the_caller(setup: Setup) -> None:
    """Guards against results that wait for the fit, and a thread that loses some or outlives its owner."""
    wrapper, executor = setup.start()
    generated = wrapper.generate(PROMPTS, max_tokens=LENGTH)
    assert [request.token_ids for request in generated] == EXPECTED
    assert all(request.is_final and request.total_draft_tokens for request in generated)
    drain(wrapper)
    assert wrapper.adaptation is not None
    assert wrapper.adaptation.actual_accepted > 0
    assert not wrapper.adaptation.reader.live
    assert wrapper._thread is not None and not wrapper._thread._thread.is_alive()
    wrapper.close()
    assert executor.is_shut_down


def test_failing_adaptation_leaves_everything_verified(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a bug in the adaptation that stops serving or trims for ever with old numbers."""
    wrapper, _ = setup.start()

    def fail(results: Any) -> None:
        coefficients = [0.5, *[-0.2] * 4]
        setup.block.write(budget=1, coefficients=coefficients, round=setup.block.progress().round)
        raise RuntimeError("a bug")

    assert wrapper.adaptation is not None
    monkeypatch.setattr(wrapper.adaptation, "observe", fail)
    generated = wrapper.generate(PROMPTS, max_tokens=LENGTH)
    assert [request.token_ids for request in generated] == EXPECTED
    drain(wrapper)
    assert wrapper.adaptation.fallbacks["the adaptation failed"] == 1
    assert setup.block.read(10**6) is None


def test_cancelled_request_is_forgotten(setup: Setup) -> None:
    """Guards against a budget that counts requests which are gone."""
    wrapper, executor = setup.start()
    numbers = [wrapper.submit(prompt, max_tokens=LENGTH) for prompt in PROMPTS[:2]]
    for _ in range(3):
        wrapper.step()
    wrapper.cancel(numbers[0])
    assert executor.cancelled == [numbers[0]]
    while wrapper.has_work:
        wrapper.step()
    drain(wrapper)
    assert wrapper.adaptation is not None
    assert not wrapper.adaptation.reader.live


def test_failed_request_leaves_the_others_whole(setup: Setup) -> None:
    """Guards against tokens that others of the same step lose, and a failed request that counts as live."""
    wrapper, executor = setup.start()
    numbers = [wrapper.submit(prompt, max_tokens=LENGTH) for prompt in PROMPTS[:3]]
    executor.failing = numbers[1]
    ended = {}
    while wrapper.has_work:
        ended |= {r.request_id: r for r in wrapper.step() if r.is_final}
    assert [ended[number].error for number in numbers] == [None, "out of blocks", None]
    assert [ended[number].token_ids for number in numbers[::2]] == EXPECTED[:3:2]
    drain(wrapper)
    assert wrapper.adaptation is not None and not wrapper.adaptation.reader.live


def test_generate_says_which_request_failed(setup: Setup) -> None:
    """Guards against tokens cut short that are taken for a whole answer."""
    wrapper, executor = setup.start()
    executor.failing = 2
    with pytest.raises(RequestError, match="request 2 failed: out of blocks"):
        wrapper.generate(PROMPTS[:2], max_tokens=LENGTH)


@pytest.mark.parametrize(
    ("engine", "options", "error", "named"),
    [
        ({"adaptive_verification_version": None}, {}, CheckpointError, "does not trim its drafts"),
        (
            {"adaptive_verification_version": "2"},
            {},
            CheckpointError,
            "version 2, here is 1; build",
        ),
        ({"adaptive_verification": None}, {}, CheckpointError, "lacks what an EAGLE engine has"),
        ({"num_eagle_layers": "four"}, {}, CheckpointError, "invalid literal .*; build the engine"),
        ({"architecture": "LlamaForCausalLM"}, {}, CheckpointError, "LlamaForCausalLM"),
        ({"settings": {"trace": False}}, {}, UsageError, "av_trace"),
        ({"mapping": {"world_size": 2}}, {}, UsageError, "2 ranks"),
        ({"max_draft_len": 5}, {}, UsageError, "give eagle_choices"),
        ({}, {"use_dynamic_tree": True}, UsageError, "use_dynamic_tree"),
        ({}, {"posterior_threshold": 0.1}, UsageError, "posterior_threshold"),
        ({}, {"eagle_choices": [[0], [0, 0]]}, UsageError, "depth 2"),
    ],
)
def test_what_cannot_work_is_refused(
    setup: Setup,
    engine: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    named: str,
) -> None:
    """(h) Guards against an engine that is loaded first and then serves wrongly or in silence."""
    with pytest.raises(error, match=named):
        setup.start(engine=engine, **options)


def test_engine_of_another_version_is_refused(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a crash in the deserialiser where one line would do."""
    setup.start()
    TrtllmDouble(version="1.1.0").install(monkeypatch)
    with pytest.raises(CheckpointError, match=r"built by TensorRT-LLM 1\.2\.1, 1\.1\.0 is"):
        TrtllmExecutor(tmp_path / "engine")


def test_empty_requests_are_refused(setup: Setup) -> None:
    """Guards against a request that the executor would hang on."""
    wrapper, _ = setup.start()
    with pytest.raises(RequestError, match="request of 0 tokens"):
        wrapper.submit([], max_tokens=4)
