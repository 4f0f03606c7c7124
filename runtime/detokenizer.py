"""Token ids to text, a few tokens at a time, at a cost that does not grow with the output.

Invariants: the pieces handed out, joined with ``flush()``, are the decoded text of all tokens (special
tokens skipped); no piece ends inside a UTF-8 character; each push decodes a short window only.

A window of earlier tokens stands in front of the new ones, because what a token looks like can depend
on its left neighbour (a SentencePiece decoder drops the first word's space; bytes join to characters).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = (
    "\N{REPLACEMENT CHARACTER}"  # what decoders print for bytes that are no character (yet)
)

# A character has at most four bytes, so text that is still no text after this many tokens is garbage
# and is handed out as such; otherwise a model that repeats a lone byte would be decoded quadratically.
_MAX_PENDING = 16
_WINDOW_AFTER_GARBAGE = 4


class Tokenizer(Protocol):
    """The one method of a Hugging Face tokenizer that output needs: ids to text (also typed as lists)."""

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any
    ) -> str | list[str]: ...


class Detokenizer:
    """The text of one request's output."""

    __slots__ = ("_emitted", "_read", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text is complete
        self._emitted = 0  # characters of the window's text already handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """The new complete text; "" while it still ends inside a character."""
        was_complete = self._read == len(self._window)
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._emitted :]
            if piece:
                self._rebase(self._read)
            elif was_complete:
                # Skipped special tokens: a window of nothing else would lose its left neighbour.
                del self._window[self._read :]
            return piece
        if len(self._window) - self._read <= _MAX_PENDING:
            return ""
        # The last replacement character may still become a real one; those before it cannot.
        piece = text[self._emitted : -1]
        self._rebase(len(self._window) - _WINDOW_AFTER_GARBAGE)
        return piece

    def flush(self) -> str:
        """What is left at the end: an unfinished character, printed as the decoder prints it."""
        piece = self._decode(self._window)[self._emitted :]
        self._window.clear()
        self._read = self._emitted = 0
        return piece

    def _rebase(self, start: int) -> None:
        del self._window[:start]
        self._read = len(self._window)
        text = self._decode(self._window)
        self._emitted = len(text) - text.endswith(REPLACEMENT)

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list comes from a list of lists only
        return text
