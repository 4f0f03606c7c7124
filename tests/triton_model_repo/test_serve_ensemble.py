"""TensorRT-LLM's five models on a real Triton server, against the Python API."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.triton_model_repo.conftest import SPECULATIVE
from tests.triton_model_repo.serving import Server, Streams, tensors
from trtllm_av.runtime.api import LLM, SamplingParams
from trtllm_av.triton_model_repo.calls import CHECK_SECONDS

pytestmark = pytest.mark.triton

PROMPTS = ["hello", "abcabc and so on", "é – ü"]
TEXT_MODELS = ["ensemble", "tensorrt_llm_bls"]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, SPECULATIVE | {"av_mode": "fixed"})


@pytest.fixture
def streams(ensemble_server: Server) -> Iterator[Streams]:
    with Streams(ensemble_server) as one:
        yield one


def text_of(results: list[Any]) -> str:
    return "".join(result.as_numpy("text_output")[0, 0].decode() for result in results)


def tokens_of(results: list[Any]) -> list[int]:
    return [int(token) for result in results for token in result.as_numpy("output_ids").reshape(-1)]


def token_fields(prompt: list[int], count: int, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt, "input_lengths": len(prompt), "request_output_len": count, **fields,
    }  # fmt: skip


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_python_apis(
    ensemble_server: Server, streams: Streams, llm: LLM, model: str, prompt: str
) -> None:
    """Guards against a server that decodes differently from the runtime, whole or streamed."""
    expected = llm.generate(prompt, SamplingParams(max_tokens=40, temperature=0.0))[0].outputs[0]
    fields = {"text_input": prompt, "max_tokens": 40}
    whole = ensemble_server.generate(model, **fields, exclude_input_in_output=True)
    assert whole["text_output"] == expected.text
    assert ensemble_server.generate(model, **fields)["text_output"] == prompt + expected.text
    assert text_of(streams.collect(model, fields | {"stream": True})) == expected.text


@pytest.mark.parametrize("seed", [3, 4])
def test_sampled_tokens_and_log_probs_are_the_python_apis(
    streams: Streams, llm: LLM, seed: int
) -> None:
    """Guards against seeds, sampling fields or log-probabilities lost on the way."""
    prompt = llm.tokenizer.encode("abc")
    params = SamplingParams(
        max_tokens=24, temperature=0.9, top_k=20, top_p=0.9, seed=seed, logprobs=True, min_tokens=4,
        repetition_penalty=1.25, ignore_eos=True,
    )  # fmt: skip
    expected = llm.generate([prompt], params)[0].outputs[0]
    fields = token_fields(
        prompt, 24, temperature=0.9, runtime_top_k=20, runtime_top_p=0.9, seed=seed, min_tokens=4,
        repetition_penalty=1.25, end_id=-1, return_log_probs=True, exclude_input_in_output=True,
    )  # fmt: skip
    [whole] = streams.collect("tensorrt_llm", fields)
    parts = streams.collect("tensorrt_llm", fields | {"streaming": True})
    assert tokens_of([whole]) == tokens_of(parts) == expected.token_ids
    logprobs = np.concatenate([part.as_numpy("output_log_probs").reshape(-1) for part in parts])
    np.testing.assert_allclose(logprobs, expected.logprobs, atol=2e-4)
    assert whole.as_numpy("cum_log_probs")[0, 0] == pytest.approx(sum(expected.logprobs), abs=2e-3)


def test_sampled_streams_beside_each_other_are_the_python_apis(
    ensemble_server: Server, llm: LLM
) -> None:
    """Guards against seeds that reach another request once several run at a time."""
    prompts = [llm.tokenizer.encode(f"prompt {n}") for n in range(8)]
    params = [
        SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=n, ignore_eos=True)
        for n in range(8)
    ]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    tokens: dict[str, list[int]] = defaultdict(list)
    with Streams(ensemble_server) as streams:
        for n, prompt in enumerate(prompts):
            fields = token_fields(
                prompt, 24, temperature=0.9, runtime_top_p=0.95, seed=n, end_id=-1,
                streaming=True, exclude_input_in_output=True,
            )  # fmt: skip
            streams.send("tensorrt_llm", fields, request_id=str(n))
        num_open = 8
        while num_open:
            result, is_last = streams.next()
            num_open -= is_last
            tokens[result.get_response().id] += tokens_of(
                [result] if result.get_response().outputs else []
            )
    assert [tokens[str(n)] for n in range(8)] == expected


def test_output_ids_hold_the_input_unless_excluded(streams: Streams, llm: LLM) -> None:
    """Guards against clients that cut the prompt off an output that does not have it."""
    fields = token_fields([5, 6, 7], 4)
    [result] = streams.collect("tensorrt_llm", fields)
    assert result.as_numpy("output_ids").shape == (1, 1, 7)
    assert result.as_numpy("output_ids")[0, 0, :3].tolist() == [5, 6, 7]
    assert result.as_numpy("sequence_length").tolist() == [[7]]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_rows_of_a_batch_are_separate_requests(streams: Streams, llm: LLM, model: str) -> None:
    """Guards against a batch whose rows are mixed up, padded into each other, or refused."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, greedy)]
    fields: dict[str, Any] = {
        "text_input": np.array([[prompt.encode()] for prompt in PROMPTS], dtype=np.object_),
        "max_tokens": np.full((3, 1), 12),
        "exclude_input_in_output": np.full((3, 1), True),
    }
    [whole] = streams.collect(model, fields)
    assert [text.decode() for text in whole.as_numpy("text_output")[:, 0]] == expected
    texts = ["", "", ""]
    for part in streams.collect(model, fields | {"stream": np.full((3, 1), True)}):
        texts[part.as_numpy("batch_index")[0, 0]] += part.as_numpy("text_output")[0, 0].decode()
    assert texts == expected


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_stop_and_bad_words(ensemble_server: Server, llm: LLM, model: str) -> None:
    """Guards against words that are passed on and never applied."""
    fields: dict[str, Any] = {
        "text_input": "hello", "max_tokens": 120, "exclude_input_in_output": True,
    }  # fmt: skip
    plain = ensemble_server.generate(model, **fields)["text_output"]
    word = re.findall(r"[ -~]{2}", plain)[-1]  # two tokens
    stopped = ensemble_server.generate(model, **fields, stop_words=[word, "never there"])
    assert stopped["text_output"] == plain[: plain.index(word)]
    assert stopped["finish_reason"] == "stop"
    letter = next(one for one in plain if one.isascii() and one.isalnum())
    without = ensemble_server.generate(model, **fields, bad_words=[letter])["text_output"]
    assert letter in plain and letter not in without


def test_stop_input_ends_the_request_of_that_id(ensemble_server: Server, streams: Streams) -> None:
    """Guards against upstream's way to cancel being ignored."""
    prompt = [5, 6, 7]
    fields = token_fields(prompt, 200, streaming=True, end_id=-1)
    streams.send("tensorrt_llm", fields, request_id="one")
    streams.next()
    with Streams(ensemble_server) as other:
        other.send("tensorrt_llm", token_fields(prompt, 1, stop=True), request_id="one")
        assert other.next()[1]
        with pytest.raises(Exception, match="cancelled"):
            while True:
                streams.next()
    ensemble_server.wait_until_idle()


@pytest.mark.parametrize("model", ["tensorrt_llm", *TEXT_MODELS])
def test_a_client_that_leaves_frees_its_slot(ensemble_server: Server, model: str) -> None:
    """Guards against slots that decode for nobody until max_tokens, and requests that wait for nobody."""
    ensemble_server.wait_until_idle()
    before = ensemble_server.emitted()
    gone = Streams(ensemble_server)
    for _ in range(
        60
    ):  # more than slots and threads of Triton, which all could wait for the engine
        if model == "tensorrt_llm":
            gone.send(model, token_fields([5, 6, 7], 240, streaming=True, end_id=-1))
        else:
            gone.send(model, {"text_input": "abc", "max_tokens": 240, "stream": True, "end_id": -1})
    gone.next()
    gone.close(cancel=True)
    ensemble_server.wait_until_idle()
    assert ensemble_server.emitted() - before < 60 * 240 / 8


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_burst_of_requests_ends_without_an_error(ensemble_server: Server, model: str) -> None:
    """Guards against a stub, or the server, that crashes once many requests end at a time."""
    with Streams(ensemble_server) as streams:
        for n in range(150):
            streams.send(model, {"text_input": f"burst {n}", "max_tokens": 12, "end_id": -1})
        counts = []
        while len(counts) < 150:
            result, is_last = streams.next()
            counts += result.as_numpy("num_output_tokens").reshape(-1).tolist() if is_last else []
    assert counts == [12] * 150
    ensemble_server.wait_until_idle()


def wait_for_active(server: Server, number: int) -> None:
    """Until the engine has that many requests, running or waiting."""
    end = time.monotonic() + 30
    while server.gauge("nv_trt_llm_request_metrics", "active") < number:
        assert time.monotonic() < end, f"{number} requests do not reach the engine"


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_running_request_of_the_bls_model_ends_with_its_client(
    ensemble_server: Server, is_streaming: bool
) -> None:
    """Guards against a thread that waits for ever for the engine's error, until none is left to serve."""

    def count_asked() -> float:
        """Requests to the engine's model so far; a client that left is reported to it until it has ended."""
        return ensemble_server.sample("nv_inference_request_success", 'model="tensorrt_llm"')

    ensemble_server.wait_until_idle()
    emitted = ensemble_server.emitted()
    gone = Streams(ensemble_server)
    fields = {"text_input": "abc", "max_tokens": 240, "end_id": -1, "stream": is_streaming}
    gone.send("tensorrt_llm_bls", fields)
    end = time.monotonic() + 30
    while ensemble_server.emitted() == emitted:
        assert time.monotonic() < end, "the engine emits nothing for the request"
    gone.close(cancel=True)
    ensemble_server.wait_until_idle()
    asked = count_asked()
    time.sleep(10 * CHECK_SECONDS)
    assert count_asked() == asked


def test_the_bls_model_tells_its_client_that_the_engine_ended_a_request(
    ensemble_server: Server, streams: Streams
) -> None:
    """Guards against half an answer that passes for a whole one: Triton loses the engine's own error."""
    ensemble_server.wait_until_idle()
    [known] = streams.collect("tensorrt_llm", token_fields([5, 6, 7], 2, end_id=-1))
    call = int(known.as_numpy("av_call")[0, 0]) + 1  # the engine numbers its requests
    fields = {"text_input": "abc", "max_tokens": 240, "end_id": -1, "stream": True}
    streams.send("tensorrt_llm_bls", fields)
    streams.next()
    with Streams(ensemble_server) as other:
        other.send("tensorrt_llm", token_fields([5], 1, stop=True, av_call=call))
        assert other.next()[1]
        with pytest.raises(Exception, match="tensorrt_llm ended this request early"):
            while True:
                streams.next()
    ensemble_server.wait_until_idle()


def test_a_waiting_request_of_the_bls_model_leaves_with_its_client(ensemble_server: Server) -> None:
    """Guards against clients that are looked for only when a response comes."""

    def count_short() -> float:
        """Requests so far that ended with at most ten tokens."""
        return ensemble_server.sample(
            'nv_llm_output_token_len_bucket{model="tensorrt_llm"', 'le="10"'
        )

    ensemble_server.wait_until_idle()
    before = count_short()
    with Streams(ensemble_server) as busy:
        for _ in range(64):
            busy.send("tensorrt_llm", token_fields([5, 6, 7], 240, end_id=-1))
        wait_for_active(ensemble_server, 64)  # or the next one might get a slot before them
        gone = Streams(ensemble_server)
        gone.send("tensorrt_llm_bls", {"text_input": "abc", "max_tokens": 240, "end_id": -1})
        wait_for_active(ensemble_server, 65)
        gone.close(cancel=True)
        while True:  # the count rises before the gauge falls: read them the other way round
            is_waiting = ensemble_server.gauge("nv_trt_llm_request_metrics", "waiting") > 0
            if count_short() > before:
                break
            assert is_waiting
        for _ in range(64):
            busy.next()
    ensemble_server.wait_until_idle()
    assert count_short() == before + 1


def test_histograms_count_the_tokens_of_every_request(ensemble_server: Server) -> None:
    """Guards against panels of request lengths that stay empty or count a response for a request."""
    names = ("nv_llm_input_token_len_sum", "nv_llm_output_token_len_sum")
    label = 'model="tensorrt_llm"'
    ensemble_server.wait_until_idle()
    before = [ensemble_server.sample(name, label) for name in names]
    with Streams(ensemble_server) as streams:
        streams.collect("tensorrt_llm", token_fields([5, 6, 7], 20, streaming=True, end_id=-1))
    ensemble_server.wait_until_idle()
    after = [ensemble_server.sample(name, label) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 20]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 4}, "beam_width=4 is not supported"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 is not supported"),
        ({"lora_task_id": 1}, "lora_task_id is not supported"),
        ({"return_context_logits": True}, "return_context_logits=True is not supported"),
        ({"request_output_len": -3}, "max_tokens=-3"),
        ({"request_output_len": 100_000}, "exceeds max_seq_len"),
        ({"input_lengths": 9}, "input_lengths=9"),
        ({"input_ids": [5, 9999, 6]}, "token 9999 is outside the vocabulary"),
        ({"input_ids": [5, -6, 7]}, "input_ids holds -6 in row 0"),
        ({"temperature": float("nan"), "runtime_top_k": 5}, "temperature=nan"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"num_draft_tokens": 9}, "num_speculative_tokens=9 exceeds"),
    ],
)
def test_refusals_name_the_input(streams: Streams, fields: dict[str, Any], message: str) -> None:
    """Guards against inputs that are silently ignored, and against errors that stop the server."""
    with pytest.raises(Exception, match=message):
        streams.collect("tensorrt_llm", token_fields([5, 6, 7], 4) | fields)
    assert len(tokens_of(streams.collect("tensorrt_llm", token_fields([5, 6, 7], 4)))) == 7


def test_infer_over_http_and_unary_grpc_name_the_reason(ensemble_server: Server) -> None:
    """Guards against a decoupled model that hangs clients of the unary calls."""
    from tritonclient.grpc import InferenceServerClient

    status, text = ensemble_server.post(
        "models/tensorrt_llm_bls/infer",
        {"inputs": [
            {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]},
            {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4]},
        ]},
    )  # fmt: skip
    assert status >= 400 and "decoupled" in text
    inputs = tensors(token_fields([5, 6], 4), has_rows=True)
    with pytest.raises(Exception, match="decoupled"):
        InferenceServerClient(ensemble_server.grpc).infer("tensorrt_llm", inputs)


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([[[5, -6, 7]]], [[3]], "token ids start at 0"),
        ([[[5, 6, 7]]], [[3, 3]], "one beam a row"),
        ([[[5, 6], [7, 8]]], [[2]], "one beam a row"),
    ],
)
def test_postprocessing_names_what_it_cannot_decode(
    ensemble_server: Server, ids: list[Any], lengths: list[Any], message: str
) -> None:
    """Guards against a traceback with paths of the server in an answer."""
    from tritonclient.grpc import InferenceServerClient

    fields = {"TOKENS_BATCH": np.array(ids), "SEQUENCE_LENGTH": np.array(lengths)}
    with pytest.raises(Exception, match=message) as caught:
        InferenceServerClient(ensemble_server.grpc).infer(
            "postprocessing", tensors(fields, has_rows=True)
        )
    assert "At:" not in str(caught.value)


def test_generate_stream_is_server_sent_events(ensemble_server: Server, llm: LLM) -> None:
    """Guards against an event stream that web clients cannot read."""
    expected = llm.generate("hello", SamplingParams(max_tokens=10, temperature=0.0))[0].outputs[0]
    started = time.monotonic()
    _, text = ensemble_server.post(
        "models/ensemble/generate_stream", {"text_input": "hello", "max_tokens": 10, "stream": True}
    )
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == expected.text
    assert events[-1]["finish_reason"] == "length" and time.monotonic() - started < 30
