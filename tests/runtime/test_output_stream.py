"""OutputStream: which tokens count, which text they are, and when a request ends."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.runtime.tiny_checkpoint import EOS, byte_level_tokenizer
from trtllm_av.runtime.detokenizer import REPLACEMENT
from trtllm_av.runtime.errors import MissingDependencyError, RequestError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.output_stream import Emission, OutputStream
from trtllm_av.runtime.params import SamplingParams


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2 style: words with a marked space, single bytes for everything else."""
    words = ["▁Hello", "▁world", "▁a", "b", "▁"]
    vocab = {"<eos>": EOS} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<eos>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def fallback_bytes(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def stream(tokenizer: PreTrainedTokenizerFast | None, **params: object) -> OutputStream:
    return OutputStream(tokenizer, SamplingParams(**{"max_tokens": 10_000, **params}), [EOS])


def push_in_chunks(
    output: OutputStream, token_ids: list[int], sizes: list[int]
) -> tuple[list[int], str, Emission]:
    """Push in pieces of the given sizes (repeated); kept tokens, joined text and the last emission."""
    kept: list[int] = []
    text = ""
    emission = Emission(0, "")
    at = turn = 0
    while at < len(token_ids) and emission.finish_reason is None:
        chunk = token_ids[at : at + sizes[turn % len(sizes)]]
        emission = output.push(chunk)
        kept += chunk[: emission.kept]
        text += emission.text
        at += len(chunk)
        turn += 1
    return kept, text, emission


def test_no_piece_ends_inside_a_character(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against half an emoji being sent as a replacement character that no later text corrects."""
    text = "a 👨‍👩‍👧 你好 é END"
    output = stream(byte_level)
    pieces = [output.push([token]).text for token in encode(byte_level, text)]
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == text
    assert "你" in pieces and "好" in pieces  # as soon as its last byte is there, not at the end


def test_llama_style_bytes_and_spaces(byte_fallback: PreTrainedTokenizerFast) -> None:
    """Guards against lost spaces at piece borders, and against valid bytes turned to garbage by a neighbour."""
    vocab = byte_fallback.get_vocab()
    ids = [vocab["▁Hello"], *fallback_bytes("好好"), vocab["▁world"], vocab["b"], vocab["▁a"]]
    for sizes in ([1], [2], [3, 1], [100]):
        kept, text, _ = push_in_chunks(stream(byte_fallback), ids, sizes)
        assert text == "Hello好好 worldb a" and kept == ids


@pytest.mark.parametrize("sizes", [[1], [3], [1, 8, 2], [500]])
def test_any_bytes_decode_as_a_whole(byte_level: PreTrainedTokenizerFast, sizes: list[int]) -> None:
    """Guards against text that depends on how the rounds cut the output, garbage bytes included."""
    rng = random.Random(7)
    for _ in range(60):
        ids = [rng.randrange(1, len(byte_level)) for _ in range(rng.randrange(1, 90))]
        if rng.random() < 0.3:
            ids = [rng.choice(ids[:2]) for _ in ids]  # long runs of the same lone bytes
        output = stream(byte_level)
        _, text, _ = push_in_chunks(output, ids, sizes)
        assert text + output.flush() == byte_level.decode(ids)


def test_decoding_does_not_grow_with_the_output(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against quadratic detokenisation: plain text, skipped special tokens, endless lone bytes."""
    longest = 0

    class Counting:
        def decode(
            self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object
        ) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return str(byte_level.decode(token_ids, skip_special_tokens, **kwargs))

    lone_byte = encode(byte_level, "好")[0]
    for ids in (encode(byte_level, "ab 你 c") * 100, [EOS] * 500, [lone_byte] * 500):
        output = OutputStream(
            Counting(), SamplingParams(max_tokens=10_000, ignore_eos=True, stop=["zz"]), [EOS]
        )
        for token in ids:
            output.push([token])
    assert longest < 40


def test_special_tokens_do_not_eat_the_space(byte_fallback: PreTrainedTokenizerFast) -> None:
    """Guards against a word behind skipped tokens being decoded as the first one, without its space."""
    vocab = byte_fallback.get_vocab()
    ids = [vocab["▁Hello"], *[EOS] * 60, vocab["▁world"]]
    _, text, _ = push_in_chunks(stream(byte_fallback, ignore_eos=True), ids, [1])
    assert text == "Hello world"


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [100]])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_and_inside_tokens(
    byte_level: PreTrainedTokenizerFast, sizes: list[int], include: bool
) -> None:
    """Guards against a stop string that is missed at a token border, or whose beginning was already sent."""
    ids = encode(byte_level, "xabcab END tail")
    word = byte_level.convert_tokens_to_ids("END")
    for stop, until in (("cab E", "xab"), ("ND", "xabcab E"), ("b", "xa")):
        output = stream(byte_level, stop=[stop], include_stop_str_in_output=include)
        kept, text, last = push_in_chunks(output, ids, sizes)
        assert text == until + (stop if include else "")
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        # Tokens up to the one with the stop's last character count, none behind it.
        decoded = byte_level.decode(kept)
        assert until + stop == decoded[: len(until + stop)]
        assert until + stop not in byte_level.decode(kept[:-1])
    assert word in ids  # "ND" really ended inside one token


def test_possible_beginning_of_a_stop_is_held_then_sent(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    """Guards against held-back text that gets lost, or text held back without need."""
    output = stream(byte_level, stop=["ENDING"])
    pieces = [output.push([token]).text for token in encode(byte_level, "a END of EN")]
    assert pieces[:2] == ["a", " "] and "END" not in pieces[2]
    assert "".join(pieces) == "a END of "
    assert output.flush() == "EN"

    output = stream(byte_level, stop=["ENDING"], max_tokens=4)
    ids = encode(byte_level, "a END!")
    emission = output.push(ids[:4])
    assert (emission.text, emission.finish_reason) == ("a END!", "length")


def test_stop_completed_first_wins(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against the order of the list, not of the text, choosing the stop inside one push."""
    ids = encode(byte_level, "x y END abc")
    for order in (["abc", "END"], ["END", "abc"]):
        emission = stream(byte_level, stop=order).push(ids)
        assert (emission.text, emission.stop_reason) == ("x y ", "END")
    for order in (["END", "N"], ["N", "END"]):  # both inside one token
        assert stream(byte_level, stop=order).push(ids) == Emission(5, "x y E", "stop", "N")


def test_stop_token_and_stop_string_in_one_push(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against a later stop of the other kind overruling an earlier one within a draft."""
    stop_id = byte_level.convert_tokens_to_ids("END")
    params = {"stop": ["z"], "stop_token_ids": [stop_id]}
    token_first = encode(byte_level, "xENDyz")
    emission = stream(byte_level, **params).push(token_first)
    assert emission == Emission(2, "x", "stop", stop_id)
    string_first = encode(byte_level, "xzEND")
    assert stream(byte_level, **params).push(string_first) == Emission(2, "x", "stop", "z")


def test_stop_token_text_only_on_request(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against the stop token's text in the output, and against held text placed behind it."""
    stop_id = byte_level.convert_tokens_to_ids("END")
    ids = encode(byte_level, "xyENDq")
    for include, text in ((False, "xy"), (True, "xyEND")):
        output = stream(
            byte_level, stop=["y?"], stop_token_ids=[stop_id], include_stop_str_in_output=include
        )
        assert output.push(ids) == Emission(3, text, "stop", stop_id)


def test_eos_counts_but_is_no_text(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against end-of-sequence markers in the text, and against ignore_eos that still stops."""
    ids = [*encode(byte_level, "abc"), EOS, *encode(byte_level, "x")]
    emission = stream(byte_level, include_stop_str_in_output=True).push(ids)
    assert emission == Emission(2, "abc", "stop", None)
    emission = stream(byte_level, ignore_eos=True).push(ids)
    assert emission == Emission(3, "abcx", None, None)


def test_nothing_after_the_end(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against tokens of the round after an end being counted or sent."""
    output = stream(byte_level, max_tokens=3)
    ids = encode(byte_level, "xyzuv")
    assert output.push(ids) == Emission(3, "xyz", "length", None)
    assert output.push(ids) == Emission(0, "", "length", None)
    assert output.flush() == ""


def test_stop_on_the_last_allowed_token_is_a_stop(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against "length" being reported for a request that ended by itself."""
    assert stream(byte_level, max_tokens=2).push([5, EOS]).finish_reason == "stop"
    ids = encode(byte_level, "xy")
    assert stream(byte_level, max_tokens=2, stop=["xy"]).push(ids) == Emission(2, "", "stop", "xy")


def test_stop_string_waits_for_min_tokens(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against min_tokens that stop strings undercut, and a void stop that fires later."""
    output = stream(byte_level, stop=["xy", "xyz"], min_tokens=4)
    kept, text, last = push_in_chunks(output, encode(byte_level, "xyuvxy!"), [1])
    assert (text, len(kept), last.stop_reason) == ("xyuv", 6, "xy")
    assert stream(byte_level, stop=["xy"], min_tokens=2).push([*kept]).kept == 2
    output = stream(byte_level, stop=["xy", "xyz"], min_tokens=3)
    _, text, last = push_in_chunks(output, encode(byte_level, "xyu"), [1])
    assert (text, last.finish_reason) == ("xyu", None)


def test_length_end_inside_a_character(byte_level: PreTrainedTokenizerFast) -> None:
    """Guards against a text that is not the decoded tokens when max_tokens cuts a character."""
    ids = encode(byte_level, "a好")[:3]
    emission = stream(byte_level, max_tokens=3).push(ids)
    assert emission.text == byte_level.decode(ids) == "a" + REPLACEMENT


def test_without_a_tokenizer() -> None:
    """Guards against stop strings that are silently ignored where no text exists."""
    assert stream(None).push([5, 6]) == Emission(2, "")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        stream(None, stop=["x"])


def test_smollm2_text_round_trips() -> None:
    """Guards against a real vocabulary (tokens that end inside characters) breaking what a toy one does not."""
    try:
        folder = smollm2.converted_folder()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    text = "Bees 🐝 and 👨‍👩‍👧, 鱻魚 costs 5 €.\n\tEnd of story"
    ids = encode(tokenizer, text)
    assert any(tokenizer.decode([token]).endswith(REPLACEMENT) for token in ids)
    for size in (1, 3, 8):
        output = OutputStream(
            tokenizer, SamplingParams(max_tokens=10_000, stop=["of st"]), [tokenizer.eos_token_id]
        )
        pieces = []
        for at in range(0, len(ids), size):
            pieces.append(output.push(ids[at : at + size]).text)
        assert REPLACEMENT not in "".join(pieces)
        assert "".join(pieces) == text[: text.index("of st")]
