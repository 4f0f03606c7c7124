"""LLM: order, streaming, sharing between threads, and errors, on a tiny real checkpoint."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.tiny_checkpoint import MAX_LEN, cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.runtime.api import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from trtllm_av.runtime.compare import compare as compare_modes
from trtllm_av.runtime.compare import load_modes, transformers_greedy
from trtllm_av.runtime.errors import CheckpointError, CostTableError, RequestError, UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PROMPTS = ["abc", [5, 6, 7, 8], "a longer prompt END", "你好", [9], "ab ab"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_checkpoint(str(folder))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps(cheap_draft_costs()))
    return path


@pytest.fixture(scope="module")
def self_draft(folder: Path) -> SpeculativeConfig:
    """The target drafts for itself, so that greedy drafts are all accepted."""
    return SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=4)


@pytest.fixture
def llm(loaded: LoadedModel, self_draft: SpeculativeConfig, costs: Path) -> LLM:
    return LLM(loaded, self_draft, max_batch_size=2, cost_table=costs)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_in_the_order_of_prompts(llm: LLM, loaded: LoadedModel) -> None:
    """Guards against outputs in the order of completion, and against batching that changes tokens."""
    params = [GREEDY.model_copy(update={"max_tokens": n}) for n in (20, 3, 11, 1, 7, 15)]
    outputs = llm.generate(PROMPTS, params)
    plain = LLM(loaded, max_batch_size=1)
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        assert output.finished and output.outputs[0].index == 0
        assert output.prompt == (prompt if isinstance(prompt, str) else None)
        [alone] = plain.generate(prompt, one)
        assert alone.outputs[0] == output.outputs[0]
        assert alone.prompt_token_ids == output.prompt_token_ids
    assert llm.report().accepted > 0  # the drafts above took part
    assert not llm.engine.has_work


def test_one_prompt_in_each_form(llm: LLM) -> None:
    """Guards against a list of token ids being taken for a list of prompts."""
    ids = llm.tokenizer.encode("abc")
    [from_text] = llm.generate("abc", GREEDY)
    [from_ids] = llm.generate(ids, GREEDY)
    [from_list] = llm.generate([ids], GREEDY)
    assert tokens_of([from_text]) == tokens_of([from_ids]) == tokens_of([from_list])


def test_stream_adds_up_to_generate(llm: LLM) -> None:
    """Guards against lost or repeated pieces, and against handed-out parts that change later."""
    [whole] = llm.generate("abc", GREEDY)
    parts = list(llm.stream("abc", GREEDY))
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].outputs == whole.outputs
    lengths = [len(part.outputs[0].token_ids) for part in parts]
    assert lengths == sorted(set(lengths)) and len(parts) > 1
    for part in parts:
        completion = part.outputs[0]
        assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
        assert whole.outputs[0].text.startswith(completion.text)


def test_streams_and_calls_interleave(llm: LLM) -> None:
    """Guards against a round of one call swallowing the tokens of another."""
    expected = tokens_of(llm.generate(PROMPTS[:3], GREEDY))
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(first), next(second)
    assert tokens_of(llm.generate([PROMPTS[2]], GREEDY)) == expected[2:]
    assert tokens_of([list(first)[-1], list(second)[-1]]) == expected[:2]


def test_closing_a_stream_frees_its_slot(llm: LLM) -> None:
    """Guards against abandoned requests that decode on and block the slots."""
    for _ in range(5):  # more than there are slots
        stream = llm.stream("abc", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert llm.engine.num_live == llm.engine.num_waiting == 0
    assert tokens_of(llm.generate("abc", GREEDY)) == tokens_of(llm.generate("abc", GREEDY))


def test_cancelled_stream_says_so(llm: LLM) -> None:
    """Guards against a stream that stops without a finished output when someone else cancels it."""
    stream = llm.stream("abc", GREEDY)
    part = next(stream)
    assert llm.engine.cancel(part.request_id)
    [*_, last] = stream
    assert (last.finished, last.outputs[0].finish_reason) == (True, "cancelled")


def test_threads_share_one_llm(llm: LLM) -> None:
    """Guards against rounds of two threads running into each other."""
    expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        if index % 2:
            results[index] = tokens_of([list(llm.stream(PROMPTS[index], GREEDY))[-1]])
        else:
            results[index] = tokens_of(llm.generate([PROMPTS[index]], GREEDY))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [results[index][0] for index in range(len(PROMPTS))] == expected


def test_logprobs_are_the_targets(llm: LLM, loaded: LoadedModel) -> None:
    """Guards against log-probabilities of rejected rows, and against one value too many or too few."""
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=5, logprobs=True)
    completion = llm.generate("abc", params)[0].outputs[0]
    again = (
        LLM(loaded)
        .generate(
            [*llm.tokenizer.encode("abc"), *completion.token_ids[:-1]],
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                logprobs=True,
                allowed_token_ids=completion.token_ids[-1:],
            ),
        )[0]
        .outputs[0]
    )
    assert completion.logprobs is not None and again.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.logprobs[-1] == pytest.approx(again.logprobs[0], abs=1e-4)
    assert completion.cumulative_logprob == pytest.approx(sum(completion.logprobs))
    assert llm.generate("abc", GREEDY)[0].outputs[0].logprobs is None


def test_stop_string_ends_the_text(llm: LLM) -> None:
    """Guards against stop parameters that get lost between API and engine."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    text = llm.generate("abc", params)[0].outputs[0].text
    stop = text[5:8]
    cut = llm.generate("abc", params.model_copy(update={"stop": [stop]}))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (
        text[: text.index(stop)], "stop", stop,
    )  # fmt: skip


def test_chat_template(llm: LLM) -> None:
    """Guards against prompts without the marks that an instruct model was trained with."""
    ids = llm.apply_chat_template("hi")
    assert llm.tokenizer.decode(ids) == "<user>hi\n<assistant>"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert (
        llm.tokenizer.decode(llm.apply_chat_template(messages)) == "<system>s\n<user>u\n<assistant>"
    )
    with pytest.raises(RequestError, match="refuses these messages: no tools"):
        llm.apply_chat_template([{"role": "tool", "content": "x"}])


def test_messages_that_no_template_takes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tracebacks from inside a tokenizer or a template."""
    with pytest.raises(RequestError, match="messages=\\[\\] is empty"):
        llm.apply_chat_template([])
    with pytest.raises(RequestError, match="no Unicode character"):
        llm.apply_chat_template("a\udcff")
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ 1 / 0 }}")
    with pytest.raises(RequestError, match="refuses these messages: division by zero"):
        llm.apply_chat_template("abc")


def test_models_without_tokenizer(tmp_path: Path) -> None:
    """Guards against a crash deep inside where a text or a conversation cannot be encoded."""
    folder = write_tiny_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    llm = LLM(folder)
    assert llm.generate([5, 6], GREEDY)[0].outputs[0].text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(UsageError, match="no chat template"):
        llm.apply_chat_template("text")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts=\\[\\] is empty"),
        ("", "prompt is empty"),
        (["abc", ""], "prompt 1 of 2 .* is empty"),
        (["abc", []], "prompt 1 of 2 .* is empty"),
        (["abc", 7.5], "prompts\\[1\\]=7.5 is neither"),
        (None, "prompts=None is neither"),
        (5, "prompts=5 is neither"),
        (b"abc", "prompts=b'abc' is neither"),
        ({"abc": 1}, "prompts={'abc': 1} is neither"),
        ((text for text in ["abc"]), "prompts=<generator .* is neither"),
        (torch.tensor([5, 6]), "is neither a text nor a list"),
        (["abc", b"abc"], "prompts\\[1\\]=b'abc' is neither"),
        (["abc", [5, 1.5]], "prompt 1 of 2 .* holds 1.5, which is no token id"),
        (["abc", ["a"]], "prompt 1 of 2 .* holds 'a', which is no token id"),
        (["abc", "a\ud800"], "prompt 1 of 2 .* holds '.ud800' at character 1"),
        (["abc", [5] * MAX_LEN], f"prompt 1 of 2 .*{MAX_LEN} .*max_seq_len={MAX_LEN}"),
        (["abc", [100_000]], "prompt 1 of 2 .*100000 .*vocabulary"),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, message: str) -> None:
    """Guards against errors that do not say which prompt, and against its neighbours running on."""
    with pytest.raises((UsageError, RequestError), match=message):
        llm.generate(prompts, GREEDY)
    assert llm.engine.num_live == llm.engine.num_waiting == 0


def test_bad_arguments(llm: LLM, folder: Path, tmp_path: Path) -> None:
    """Guards against configuration mistakes that are ignored."""
    with pytest.raises(UsageError, match="2 sampling_params for 1 prompts"):
        llm.generate(["abc"], [GREEDY, GREEDY])
    for params in ({"max_tokens": 3}, "greedy", [None]):
        with pytest.raises(UsageError, match="must be SamplingParams"):
            llm.generate(["abc"], params)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="must be SamplingParams"):
            llm.stream("abc", params)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="model=5 must be"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="speculative_config='' must be"):
        LLM(folder, "")  # type: ignore[arg-type]
    for wrong in (True, 3.0, "3"):
        with pytest.raises(UsageError, match="num_speculative_tokens="):
            SpeculativeConfig(num_speculative_tokens=wrong)
    with pytest.raises(UsageError, match="unknown key 'self'"):
        SamplingParams(**{"self": 1})
    with pytest.raises(UsageError, match="unknown key 'metod'"):
        LLM(folder, {"metod": "layer_skip"})
    for av_mode in ("adaptive", "off"):
        with pytest.raises(UsageError, match="method='magic'"):
            LLM(folder, {"method": "magic", "av_mode": av_mode})
    with pytest.raises(UsageError, match="dtype='bfloat16', but the model was loaded as"):
        LLM(llm.engine.executor.loaded, dtype="bfloat16")  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="'max_batch' \\(value 3\\)"):
        LLM(folder, max_batch=3)
    with pytest.raises(UsageError, match="tensor_parallel_size=2 is not supported: "):
        LLM(folder, tensor_parallel_size=2)
    with pytest.raises(UsageError, match="n=2 is not supported: a request has one completion"):
        SamplingParams(n=2)
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_greedy_drafts_are_asked_for_by_name(loaded: LoadedModel, folder: Path) -> None:
    """Guards against draft_sample_method that is accepted and then ignored."""
    config = {"method": "draft_model", "model": str(folder), "av_mode": "fixed"}
    engines = [
        LLM(loaded, {**config, "draft_sample_method": method}).engine
        for method in ("greedy", "probabilistic")
    ]
    assert [engine.round.is_greedy_draft for engine in engines] == [True, False]


def test_each_drafter_has_its_own_costs(loaded: LoadedModel, folder: Path, cache_dir: Path) -> None:
    """Guards against the step costs of one drafter steering another on the same target."""
    configs: list[dict[str, Any]] = [
        {"method": "layer_skip", "skip_layers": [1]},
        {"method": "layer_skip", "skip_layers": [1, 2]},
        {"method": "draft_model", "model": str(folder)},
    ]
    for number, config in enumerate(configs * 2, 1):
        LLM(loaded, {**config, "num_speculative_tokens": 2}, max_batch_size=2)
        assert len(list(cache_dir.iterdir())) == min(number, len(configs))


def test_costs_of_another_engine_are_refused(folder: Path) -> None:
    """Guards against budgets from another machine's or model's step costs that nobody notices."""
    key = {
        "model_digest": "other", "executor": "torch", "device": "cpu", "dtype": "float32",
        "num_threads": torch.get_num_threads(),
    }  # fmt: skip
    with pytest.raises(CostTableError, match="measured on model_digest='other'"):
        LLM(
            folder,
            {"method": "layer_skip", "num_speculative_tokens": 3},
            cost_table={**cheap_draft_costs(), "key": key},
        )


def test_tokens_are_reported_as_they_come(llm: LLM) -> None:
    """Guards against progress that runs ahead of the tokens or misses some."""
    counts: list[int] = []
    outputs = llm.generate(PROMPTS[:3], GREEDY, on_tokens=counts.append)
    assert len(counts) > 1 and min(counts) > 0
    assert sum(counts) == sum(len(tokens) for tokens in tokens_of(outputs))


def test_modes_agree_with_each_other_and_transformers(
    loaded: LoadedModel, folder: Path, self_draft: SpeculativeConfig, costs: Path
) -> None:
    """Guards against speculation that changes greedy tokens, and a comparison that never speculated."""
    llms = load_modes(loaded, self_draft, cost_table=costs, max_batch_size=3)
    result = compare_modes(llms, folder, PROMPTS, [GREEDY] * len(PROMPTS), repetitions=2)
    assert result.identical is True
    assert set(result.differing or {}) == {
        "none_vs_fixed", "none_vs_adaptive", "none_vs_transformers",
    }  # fmt: skip
    none, fixed, adaptive = (result.modes[mode] for mode in ("none", "fixed", "adaptive"))
    assert (none.report.drafted, none.report.acceptance_by_position) == (0, [])
    assert fixed.report.drafted == fixed.report.verified > 0
    assert fixed.report.accepted > 0.5 * fixed.report.verified
    assert adaptive.report.accepted > 0 and adaptive.report.rounds < none.report.rounds
    assert all(mode.num_tokens == mode.report.emitted for mode in result.modes.values())


def test_a_difference_is_found(
    loaded: LoadedModel, folder: Path, self_draft: SpeculativeConfig, costs: Path
) -> None:
    """Guards against a comparison that calls everything identical."""
    llms = load_modes(loaded, self_draft, cost_table=costs)
    fourth = llms["none"].generate("abc", GREEDY)[0].outputs[0].token_ids[3]
    other = dataclasses.replace(loaded, eos_token_ids=(fourth,))  # ends early
    llms["fixed"] = LLM(other, self_draft, cost_table=costs)
    result = compare_modes(llms, folder, ["abc"], [GREEDY])
    assert result.identical is False
    assert result.differing == {
        "none_vs_fixed": [0], "none_vs_adaptive": [], "none_vs_transformers": [],
    }  # fmt: skip
    sampled = compare_modes(llms, folder, ["abc"], [SamplingParams(max_tokens=4, seed=1)])
    assert sampled.identical is None


def test_comparison_needs_an_adaptive_engine(loaded: LoadedModel) -> None:
    """Guards against an "adaptive" column that never adapted."""
    with pytest.raises(UsageError, match="nothing to compare"):
        load_modes(loaded, SpeculativeConfig(av_mode="shadow"))


def test_reference_ignores_the_checkpoints_own_penalties(folder: Path) -> None:
    """Guards against transformers applying a generation_config that our greedy decoding does not know."""
    expected = transformers_greedy(folder, [[5, 6, 7]], [GREEDY], [0])
    config = folder / "generation_config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(before), "repetition_penalty": 1.9}))
        assert transformers_greedy(folder, [[5, 6, 7]], [GREEDY], [0]) == expected
    finally:
        config.write_text(before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch_size": "8"}, {"max_batch_size": 0}, {"max_seq_len": 2.5}, {"prefill_chunk": "x"},
        {"device": None}, {"cost_table": [1]},
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_one_line(
    loaded: LoadedModel, wrong: dict[str, Any]
) -> None:
    """Guards against a traceback out of torch for a size that was read from a text."""
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=f"{name}={re.escape(repr(value))}"):
        LLM(loaded, SpeculativeConfig(method="layer_skip"), **wrong)
