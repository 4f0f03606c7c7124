"""Tensors to requests, without a server: every input is used or refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runtime.tiny_checkpoint import EOS, byte_level_tokenizer
from trtllm_av.runtime.errors import RequestError, UsageError
from trtllm_av.triton_model_repo.fields import Fields, to_word_lists, word_lists
from trtllm_av.triton_model_repo.model_request import (
    ModelRequest,
    read_text_request,
    read_token_request,
)
from trtllm_av.triton_model_repo.parameters import Parameters
from trtllm_av.triton_model_repo.repository import LAYOUTS, write_repository
from trtllm_av.triton_model_repo.template import fill
from trtllm_av.triton_model_repo.text_codec import decode_tokens, encode_request

TOKENIZER = byte_level_tokenizer()


def token_request(**fields: Any) -> ModelRequest:
    tensors = {
        "input_ids": np.array([[5, 6, 7]]), "input_lengths": np.array([[3]]),
        "request_output_len": np.array([[9]]),
    } | {name: np.asarray(value)[None] for name, value in fields.items()}  # fmt: skip
    return read_token_request(Fields(tensors), TOKENIZER, (EOS,))


def text_request(**fields: Any) -> ModelRequest:
    tensors = {"text_input": np.array([[b"abc"]], dtype=np.object_), "max_tokens": np.array([[9]])}
    tensors |= {name: np.asarray(value)[None] for name, value in fields.items()}
    return read_text_request(Fields(tensors), TOKENIZER)


@pytest.mark.parametrize("model", [name for names in LAYOUTS.values() for name in names])
def test_templates_fill_and_leave_optional_parameters_alone(model: str, tmp_path: Path) -> None:
    """Guards against a template that Triton cannot parse once it is filled."""
    layout = next(layout for layout, names in LAYOUTS.items() if model in names)
    write_repository(tmp_path, layout, {"engine_dir": 'a"b'})
    text = (tmp_path / model / "config.pbtxt").read_text()
    assert f'name: "{model}"' in text
    assert not re.search(r"^[^\"#]*\$\{", text, re.MULTILINE)
    assert text.count("{") == text.count("}") and text.count("[") == text.count("]")
    if "gpt_model_path" in text:
        assert 'string_value: "a\\"b"' in text


def test_declared_inputs_are_all_read(tmp_path: Path) -> None:
    """Guards against an input that the configuration offers and no code looks at."""
    write_repository(tmp_path, "ensemble", {})
    text = (tmp_path / "tensorrt_llm" / "config.pbtxt").read_text()
    names = re.findall(r'name: "(\w+)"', text[text.index("input [") : text.index("output [")])
    neutral = {
        "runtime_top_p_decay": 1.0,
        "runtime_top_p_reset_ids": -1,
        "seed": 3,
        "random_seed": 3,
    }
    assert len(names) > 50
    for name in set(names) - {"input_ids", "input_lengths", "request_output_len", "stop"}:
        value = [[]] * 2 if name.endswith("words_list") else [neutral.get(name, 1)]
        try:
            token_request(**{name: value})
        except RequestError as error:
            assert str(error).startswith((name, f"{name}=")), name


def test_fields_reach_the_parameters() -> None:
    """Guards against values that are read and dropped."""
    request = token_request(
        temperature=[0.5], runtime_top_k=[4], seed=[8], min_tokens=[2], av_enable=[False],
        num_draft_tokens=[1], end_id=[7], embedding_bias=[0.0, -1.5], streaming=[True],
        bad_words_list=[[9, 8, 7], [1, 3, -1]],
    )  # fmt: skip
    params = request.rows[0].params
    assert request.is_streaming and not request.is_input_excluded
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 4, 1.0, 8)
    assert (params.min_tokens, params.adaptive, params.num_speculative_tokens) == (2, False, 1)
    assert params.ignore_eos and params.stop_token_ids == [7]
    assert params.logit_bias == {1: -1.5} and params.bad_words_ids == [[9], [8, 7]]
    assert not token_request(end_id=[EOS]).rows[0].params.ignore_eos


def test_requests_without_truncation_are_greedy_as_upstream() -> None:
    """Guards against sampled answers for clients of the repository that never asked for them."""
    assert token_request(temperature=[0.7]).rows[0].params.temperature == 0.0
    assert token_request(temperature=[0.7], runtime_top_p=[0.9]).rows[0].params.temperature == 0.7
    assert text_request().rows[0].params.temperature == 0.0
    assert text_request(temperature=[0.7]).rows[0].params.temperature == pytest.approx(0.7)


def test_word_lists_round_trip() -> None:
    """Guards against words that are joined or cut by the padded layout."""
    for words in ([], [[3]], [[3, 4], [5]], [[1], [2], [3, 4, 5]]):
        assert word_lists("x", to_word_lists(words)) == words
    with pytest.raises(RequestError, match="must not fall"):
        word_lists("x", np.array([[1, 2, 3], [3, 1, -1]]))


def test_stop_words_of_many_rows_keep_their_row() -> None:
    """Guards against stop words of one row that end another."""
    texts = np.array([[b"ab", b""], [b"END", b"x"]], dtype=np.object_)
    outputs = encode_request(
        Fields({
            "QUERY": np.array([[b"a"], [b"bc"]], dtype=np.object_),
            "REQUEST_OUTPUT_LEN": np.array([[4], [5]]), "STOP_WORDS_DICT": texts,
        }),
        TOKENIZER,
    )  # fmt: skip
    words = [word_lists("x", row) for row in outputs["STOP_WORDS_IDS"]]
    assert [[TOKENIZER.decode(word) for word in row] for row in words] == [["ab"], ["END", "x"]]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[1], [2]]


def test_parameters_refuse_what_would_change_tokens() -> None:
    """Guards against a repository that promises trees, beams or a plugin and serves without."""

    def parameters(**texts: str) -> Parameters:
        return Parameters(
            {"parameters": {name: {"string_value": text} for name, text in texts.items()}}
        )

    assert parameters(eagle_choices="${eagle_choices}", decoding_mode="").check() == []
    assert parameters(kv_cache_free_gpu_mem_fraction="0.5").check() == [
        "kv_cache_free_gpu_mem_fraction"
    ]
    for name in ("eagle_choices", "av_plugin_path"):
        with pytest.raises(UsageError, match=f"parameter {name}='x' is not supported"):
            parameters(**{name: "x"}).check()
    with pytest.raises(UsageError, match="max_beam_width=4"):
        parameters(max_beam_width="4").check()
    assert parameters(av_mode="off").speculative_config().resolved_mode == "off"
    with pytest.raises(UsageError, match="no value and no default"):
        fill("max_batch_size: ${triton_max_batch_size}", {})


@pytest.mark.parametrize(
    ("groups", "num_instances"),
    [([], 1), ([{"count": 1, "gpus": []}], 1), ([{"count": 1, "gpus": [1]}], 1),
     ([{"count": 2, "gpus": []}], 2), ([{"count": 2, "gpus": [0, 1]}, {"count": 1}], 5)],
)  # fmt: skip
def test_several_instances_of_an_engine_are_refused(
    groups: list[dict[str, Any]], num_instances: int
) -> None:
    """Guards against a second engine that never hears of a stop and overwrites the gauges of the first."""
    parameters = Parameters({"instance_group": groups})
    if num_instances == 1:
        assert parameters.check() == []
    else:
        with pytest.raises(UsageError, match=f"asks for {num_instances} instances"):
            parameters.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": [5, -6, 7]}, "input_ids holds -6 in row 0; token ids start at 0"),
        ({"min_tokens": [99]}, "min_tokens=99 exceeds max_tokens=9"),
        ({"runtime_top_k": [-1]}, "top_k=-1: Input should be greater than or equal to 0"),
    ],
)
def test_refusals_are_short_whatever_the_client_sent(fields: dict[str, Any], message: str) -> None:
    """Guards against a traceback for a negative token, and a message of all fields for one wrong pair."""
    with pytest.raises(RequestError) as caught:
        token_request(**fields)
    assert str(caught.value) == message


def test_values_in_messages_are_cut() -> None:
    """Guards against an answer as long as the biases of a whole vocabulary."""
    bias = [1.0] * 260 + [float("nan")]
    with pytest.raises(RequestError, match="must be finite") as caught:
        token_request(embedding_bias=bias)
    assert len(str(caught.value)) < 200


def test_responses_are_decoded_with_and_without_tokens() -> None:
    """Guards against a last response without a token, which ends the stream of an upstream ensemble."""
    tokens = np.array([[TOKENIZER.encode("xyz")]], dtype=np.int32)
    assert decode_tokens(tokens, np.array([[2]]), TOKENIZER) == ["xy"]
    nothing = np.zeros((2, 1, 0), dtype=np.int32)
    assert decode_tokens(nothing, np.zeros((2, 1), dtype=np.int32), TOKENIZER) == ["", ""]
    for wrong, lengths, message in (
        (tokens, np.array([[2, 2]]), "one beam a row"),
        (np.zeros((1, 0, 0), np.int32), np.zeros((1, 0), np.int32), "one beam a row"),
        (-tokens, np.array([[3]]), "token ids start at 0"),
    ):
        with pytest.raises(RequestError, match=message):
            decode_tokens(wrong, lengths, TOKENIZER)


def test_onednn_is_bounded_before_the_engine_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server whose memory grows for hours, by the code of each new matrix shape."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    seen = []

    def load(*_: object, **__: object) -> SimpleNamespace:
        seen.append(os.environ.get(name))
        return SimpleNamespace(tokenizer=TOKENIZER)

    monkeypatch.setattr("trtllm_av.triton_model_repo.parameters.load_engine", load)
    parameters = Parameters({"parameters": {"gpt_model_path": {"string_value": "x"}}})
    for value in ("", "64"):  # what the operator sets stays
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
        parameters.load_engine()
    assert seen == ["256", "64"]
