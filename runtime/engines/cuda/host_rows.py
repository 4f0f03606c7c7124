"""What the host plans rounds from, as arrays over slots: a round of 512 rows costs no loop over them.

Invariants: figures are those of the last round that was read; ``owner`` names the request that holds a
slot, so that results of one that has left are told apart from those of its successor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.request import Request

_SAMPLINGS = (Sampling.GREEDY, Sampling.PLAIN, Sampling.CUT)
_NOBODY = 0  # request ids start at 1


class HostRows:
    """Arrays [S]: ``owner`` request id; ``remaining`` tokens to emit; ``context`` prompt and output tokens;
    ``is_watched``: every token must be looked at, for stops or text."""

    def __init__(self, num_slots: int, num_positions: int) -> None:
        self.owner = np.zeros(num_slots, np.int64)
        self.remaining = np.zeros(num_slots, np.int64)
        self.context = np.zeros(num_slots, np.int64)
        self.is_watched = np.zeros(num_slots, np.bool_)
        self.ignores_eos = np.zeros(num_slots, np.bool_)
        self._num_positions = num_positions
        self._limit = np.zeros(num_slots, np.int64)
        self._sampling = np.zeros(num_slots, np.int8)
        self._is_adaptive = np.ones(num_slots, np.bool_)
        self._is_decoding = np.zeros(num_slots, np.bool_)
        self._slots: NDArray[np.int64] | None = None
        self._adaptive_flags: list[bool] = []

    def admit(self, request: Request, *, has_text: bool) -> None:
        """A request takes its slot; it does not decode yet."""
        slot, params = request.slot, request.params
        limit = params.num_speculative_tokens
        self.owner[slot] = request.request_id
        self.remaining[slot] = params.max_tokens
        self.context[slot] = len(request.prompt)
        self.is_watched[slot] = has_text or bool(params.stop_token_ids)
        self.ignores_eos[slot] = params.ignore_eos
        self._limit[slot] = self._num_positions if limit is None else limit
        self._sampling[slot] = _SAMPLINGS.index(sampling_of(params))
        self._is_adaptive[slot] = params.adaptive

    def start(self, slot: int) -> None:
        """The prompt is on its way: from the next round on the request decodes."""
        self._is_decoding[slot] = True
        self._slots = None

    def release(self, slot: int) -> None:
        """The request has ended."""
        self.owner[slot] = _NOBODY
        self._is_decoding[slot] = False
        self._slots = None

    @property
    def decoding(self) -> NDArray[np.int64]:
        """Slots [R] that decode, in ascending order; not to be written to."""
        if self._slots is None:
            self._slots = np.flatnonzero(self._is_decoding)
            self._adaptive_flags = self._is_adaptive[self._slots].tolist()
        return self._slots

    @property
    def adaptive_flags(self) -> list[bool]:
        """Of the slots that ``decoding`` gave last: False where the whole draft is to be verified."""
        return self._adaptive_flags

    def draft_limits(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The most each row may draft: a round emits one token more than it accepts."""
        room = np.maximum(self.remaining[slots] - 1, 0)
        return np.minimum(self._limit[slots], room)

    def sampling(self, slots: NDArray[np.int64]) -> Sampling:
        """The cheapest way that serves all of ``slots``."""
        return _SAMPLINGS[int(self._sampling[slots].max(initial=0))]


def sampling_of(params: SamplingParams) -> Sampling:
    """How a request draws."""
    if params.temperature == 0.0:
        return Sampling.GREEDY
    return Sampling.CUT if params.top_k > 0 or params.top_p < 1.0 else Sampling.PLAIN
