"""What one request emits: which of its committed tokens count, which text they are, and when it ends.

Invariants: tokens are judged one after another as if they had been generated singly, so a draft of
any length ends where plain decoding would have ended; nothing behind a stop token, the last character
of a stop string or token number ``max_tokens`` is emitted; text that may be the beginning of a stop
string is held back until it is clear that it is none; joined texts of all emissions are the decoded
kept tokens, without the stop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from trtllm_av.runtime.detokenizer import Detokenizer, Tokenizer
from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Emission:
    """The result of one push.

    ``kept``: leading tokens of the push that count as output; a stop token and the tokens of a stop
    string are among them, although their text is not emitted. ``stop_reason``: the stop token's id or
    the stop string; None for the model's own end-of-sequence token.
    """

    kept: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class OutputStream:
    """The output side of one request; with ``tokenizer`` None all text is empty.

    ``eos_token_ids`` end the request unless ``params.ignore_eos``. A stop string that is completed
    before token number ``min_tokens`` does not count. Stop strings without a tokenizer raise
    RequestError.
    """

    __slots__ = (
        "_detokenizer", "_end", "_eos", "_held", "_num_tokens", "_params", "_stop_ids",
    )  # fmt: skip

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, eos_token_ids: Collection[int]
    ) -> None:
        if tokenizer is None and params.stop:
            raise RequestError(
                f"stop={params.stop!r} needs a tokenizer, and this model has none; use stop_token_ids"
            )
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._num_tokens = 0
        self._held = ""
        self._end: Emission | None = None

    def push(self, token_ids: Sequence[int]) -> Emission:
        """Take the next committed tokens; after the end of the request nothing is kept."""
        if self._end is not None:
            return self._end
        pieces: list[str] = []
        undecoded: list[int] = []
        for kept, token in enumerate(token_ids, 1):
            self._num_tokens += 1
            if token in self._eos:
                return self._finish(kept, pieces, undecoded, "stop", None)
            if token in self._stop_ids:
                if self._params.include_stop_str_in_output:
                    undecoded.append(token)
                return self._finish(kept, pieces, undecoded, "stop", token)
            undecoded.append(token)
            if self._params.stop:  # only these need to know which token brought which text
                piece, stop = self._search(self._decode(undecoded))
                pieces.append(piece)
                undecoded.clear()
                if stop is not None:
                    self._end = Emission(0, "", "stop", stop)
                    return Emission(kept, "".join(pieces), "stop", stop)
            if self._num_tokens == self._params.max_tokens:
                return self._finish(kept, pieces, undecoded, "length", None)
        pieces.append(self._decode(undecoded))
        return Emission(len(token_ids), "".join(pieces))

    def skip(self, num_tokens: int) -> None:
        """Count tokens that were judged elsewhere to hold no end; only where no text is asked for."""
        self._num_tokens += num_tokens

    def flush(self) -> str:
        """All text still held back, for a request that ends from outside (cancelled); "" after an end."""
        if self._end is not None:
            return ""
        return self._finish(0, [], [], "cancelled", None).text

    def _finish(
        self,
        kept: int,
        pieces: list[str],
        undecoded: list[int],
        reason: FinishReason,
        stop: int | None,
    ) -> Emission:
        self._end = Emission(0, "", reason, stop)
        pieces += [self._held, self._decode(undecoded)]
        if self._detokenizer is not None:
            pieces.append(self._detokenizer.flush())
        return Emission(kept, "".join(pieces), reason, stop)

    def _search(self, new_text: str) -> tuple[str, str | None]:
        """Text that may be emitted now, and the stop string that ``new_text`` completed, if any."""
        text = self._held + new_text
        if self._num_tokens >= self._params.min_tokens:
            matches = [
                (start + len(stop), start, stop)
                for stop in self._params.stop
                # It must end in the new text: held text may hold one that min_tokens made void.
                if (start := text.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
            ]
            if matches:
                end, start, stop = min(matches)  # what single characters would have completed first
                return text[: end if self._params.include_stop_str_in_output else start], stop
        held = max(_overlap(text, stop) for stop in self._params.stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def _decode(self, token_ids: list[int]) -> str:
        if self._detokenizer is None or not token_ids:
            return ""
        return self._detokenizer.push(token_ids)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
