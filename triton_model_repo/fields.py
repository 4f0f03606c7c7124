"""The tensors of one Triton request as values of its rows.

Invariants: a tensor is read by name or it is an error, so no input can be ignored; a value that does not
fit is refused with its name. Nothing here needs Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.errors import RequestError


class Fields:
    """Input tensors by name, all with a leading row dimension of ``num_rows``; ``row`` takes one row."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = tensors
        self._read: set[str] = set()
        rows = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in tensors.items()}
        self.num_rows = next(iter(rows.values()), 0)
        if len(set(rows.values())) > 1 or self.num_rows == 0:
            raise RequestError(
                f"inputs disagree on the number of rows: {rows}; send the same for all"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def row(self, name: str, index: int) -> NDArray[Any] | None:
        """Values of one row, flat; None if the tensor was not sent."""
        self._read.add(name)
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor[index]

    def scalar(self, name: str, index: int, default: Any = None) -> Any:
        """The one value of a row as a Python object; texts are decoded."""
        values = self.row(name, index)
        if values is None:
            return default
        if values.size != 1:
            raise RequestError(f"{name} has {values.size} values in row {index}; send one")
        value = values.reshape(-1)[0]
        return decode_text(name, value) if isinstance(value, bytes) else value.item()

    def texts(self, name: str, index: int) -> list[str]:
        """The non-empty texts of a row: empty ones are padding."""
        values = self.row(name, index)
        if values is None:
            return []
        return [text for value in values.reshape(-1) if (text := decode_text(name, value))]

    def ids(self, name: str, index: int) -> list[int]:
        values = self.row(name, index)
        return [] if values is None else [int(value) for value in values.reshape(-1)]

    def check_all_read(self) -> None:
        """Guard against an input that is declared and that no code reads."""
        if unread := self._tensors.keys() - self._read:
            raise RequestError(f"inputs {sorted(unread)} are not implemented; leave them out")


def decode_text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 at byte {error.start}; send valid UTF-8") from None


def word_lists(name: str, values: NDArray[Any] | None) -> list[list[int]]:
    """Token sequences from TensorRT-LLM's [2, n] layout: row 0 the tokens one after another, row 1 the
    end of each sequence, filled up with −1."""
    if values is None or values.size == 0:
        return []
    if values.ndim != 2 or values.shape[0] != 2:
        raise RequestError(f"{name} has shape {list(values.shape)} in a row; it must be [2, n]")
    tokens = [int(token) for token in values[0]]
    words: list[list[int]] = []
    start = 0
    for end in (int(end) for end in values[1] if end >= 0):
        if not start <= end <= len(tokens):
            raise RequestError(f"{name} has the end {end} behind {start}; ends must not fall")
        if end > start:
            words.append(tokens[start:end])
        start = end
    return words


def to_word_lists(words: list[list[int]]) -> NDArray[np.int32]:
    """The inverse of ``word_lists`` as [2, max(1, total)]; no words are [[0], [−1]]."""
    tokens = [token for word in words for token in word]
    ends = [int(end) for end in np.cumsum([len(word) for word in words])]
    width = max(1, len(tokens))
    result = np.full((2, width), -1, dtype=np.int32)
    result[0] = 0
    result[0, : len(tokens)] = tokens
    result[1, : len(ends)] = ends
    return result
