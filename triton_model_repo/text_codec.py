"""The tokenizer of a folder, and what the text models do with it. Nothing here needs Triton."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.errors import CheckpointError, RequestError
from trtllm_av.triton_model_repo.fields import Fields, to_word_lists


def load_tokenizer(folder: str) -> Any:
    """The Hugging Face tokenizer of a local folder; CheckpointError if there is none."""
    from transformers import AutoTokenizer  # takes seconds, and engine models may bring their own

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizer classes raise whatever their parsers raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"cannot read the tokenizer of {folder!r}: {reason}") from None


def encode_request(
    fields: Fields, tokenizer: Any, *, add_special_tokens: bool = True
) -> dict[str, NDArray[Any]]:
    """Inputs of ``preprocessing`` to its outputs, all with the rows of the request.

    INPUT_ID [rows, longest] is filled up with the pad token, STOP_WORDS_IDS and BAD_WORDS_IDS [rows, 2, n]
    are in TensorRT-LLM's layout, EMBEDDING_BIAS [rows, vocabulary] is [rows, 0] without biases.
    """
    if "DECODER_QUERY" in fields:
        raise RequestError("DECODER_QUERY is not supported: there are no encoder-decoder models")
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    rows = range(fields.num_rows)
    prompts, ends, pads = [], [], []
    for index in rows:
        text = fields.scalar("QUERY", index)
        if not text:
            raise RequestError("the text is empty; send at least one character")
        prompts.append(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        ends.append(fields.scalar("END_ID", index, -1 if eos is None else eos))
        pads.append(fields.scalar("PAD_ID", index, ends[-1] if pad is None else pad))
    ids = np.empty((len(rows), max(map(len, prompts))), dtype=np.int32)
    for index, prompt in enumerate(prompts):
        ids[index, : len(prompt)] = prompt
        ids[index, len(prompt) :] = pads[index]
    lengths = [fields.scalar("REQUEST_OUTPUT_LEN", index) for index in rows]
    return {
        "INPUT_ID": ids,
        "REQUEST_INPUT_LEN": _column([len(prompt) for prompt in prompts]),
        "REQUEST_OUTPUT_LEN": _column(lengths),
        "STOP_WORDS_IDS": _words(fields, "STOP_WORDS_DICT", tokenizer),
        "BAD_WORDS_IDS": _words(fields, "BAD_WORDS_DICT", tokenizer),
        "EMBEDDING_BIAS": _bias(fields, tokenizer),
        "OUT_END_ID": _column(ends),
        "OUT_PAD_ID": _column(pads),
    }


def decode_tokens(
    token_ids: NDArray[np.int32], lengths: NDArray[np.int32], tokenizer: Any
) -> list[str]:
    """Texts of [rows, 1 beam, n] tokens, each up to its length; RequestError for what is no such tensor.

    n is 0 in a last response that brings no token.
    """
    if token_ids.shape[1] != 1 or lengths.shape[1] != 1:
        raise RequestError(
            f"TOKENS_BATCH {list(token_ids.shape)} and SEQUENCE_LENGTH {list(lengths.shape)} "
            "must hold one beam a row"
        )
    beams = [
        beam[:length].tolist()
        for beam, length in zip(token_ids[:, 0], lengths[:, 0].clip(min=0), strict=True)
    ]
    if (lowest := min(itertools.chain.from_iterable(beams), default=0)) < 0:
        raise RequestError(f"TOKENS_BATCH holds {lowest}; token ids start at 0")
    return [tokenizer.decode(beam, skip_special_tokens=True) for beam in beams]


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)[:, None]


def _words(fields: Fields, name: str, tokenizer: Any) -> NDArray[np.int32]:
    rows = [
        to_word_lists(
            [tokenizer.encode(text, add_special_tokens=False) for text in fields.texts(name, index)]
        )
        for index in range(fields.num_rows)
    ]
    result = np.full((len(rows), 2, max(row.shape[1] for row in rows)), -1, dtype=np.int32)
    result[:, 0] = 0
    for index, row in enumerate(rows):
        result[index, :, : row.shape[1]] = row
    return result


def _bias(fields: Fields, tokenizer: Any) -> NDArray[np.float32]:
    """The weight of each word on each of its tokens, as upstream."""
    names = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
    if not any(name in fields for name in names):
        return np.empty((fields.num_rows, 0), dtype=np.float32)
    result = np.zeros((fields.num_rows, len(tokenizer)), dtype=np.float32)
    for index in range(fields.num_rows):
        words, weights = fields.row(names[0], index), fields.row(names[1], index)
        if words is None or weights is None or words.size != weights.size:
            raise RequestError(
                f"{names[0]} and {names[1]} differ in length; send one weight a word"
            )
        texts = fields.texts(names[0], index)
        if len(texts) != weights.size:
            raise RequestError(f"{names[0]} holds an empty word; remove it and its weight")
        for text, weight in zip(texts, weights.reshape(-1), strict=True):
            result[index, tokenizer.encode(text, add_special_tokens=False)] += weight
    return result
