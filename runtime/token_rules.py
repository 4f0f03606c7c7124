"""What a request forbids or re-weights, as edits of one row of logits.

Invariants: an edit is a function of the prompt and of all output tokens before the row, a draft's own
earlier tokens included, never of the token at the row; target and draft rows get the same edit; a
request without rules costs nothing (``is_active``).

Order, as in common serving engines: logit bias; repetition (Keskar et al., "CTRL", 2019), presence and
frequency penalties; then what is forbidden outright.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.params import SamplingParams


class TokenRules:
    """The rules of one request.

    ``eos_token_ids`` count as stop tokens unless the request ignores them; ``vocab_size`` is the real
    one. RequestError if a rule names a token outside the vocabulary, or if no token could ever be
    emitted first.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int] = (),
        *,
        vocab_size: int,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("bad_words_ids", (token for word in params.bad_words_ids for token in word))
        self._check_ids("stop_token_ids", params.stop_token_ids)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(token for token in eos_token_ids if token < vocab_size)
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        self._prompt_ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._longer_bad_words = [tuple(word) for word in params.bad_words_ids if len(word) > 1]
        self._always_allowed = self._build_static_mask()
        if self.is_active and not self.allowed_mask(()).any():
            raise RequestError(
                f"no token is left to emit: allowed_token_ids={params.allowed_token_ids} without "
                f"bad_words_ids={params.bad_words_ids}, biases of -inf and, before min_tokens="
                f"{params.min_tokens}, stop tokens {sorted(stops)}; allow another token"
            )

    @property
    def is_active(self) -> bool:
        """False if ``apply`` would change nothing, whatever the output."""
        return self._params.is_constrained

    def allowed_mask(self, output_token_ids: Sequence[int]) -> Tensor:
        """[vocab_size] bool, the tokens that may follow ``output_token_ids``."""
        allowed = self._always_allowed.clone()
        if len(output_token_ids) < self._params.min_tokens:
            allowed[self._stops] = False
        for word in self._longer_bad_words:
            prefix = word[:-1]
            if tuple(output_token_ids[-len(prefix) :]) == prefix:
                allowed[word[-1]] = False
        return allowed

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> Tensor:
        """One row of logits [≥ vocab_size], edited for the token behind ``output_token_ids``.

        Returns a new tensor, of at least float32; the argument is left as it is.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        edited = logits.to(dtype, copy=True)
        if self._bias_ids.numel():
            edited[self._bias_ids] += self._biases.to(dtype)
        self._penalise(edited, output_token_ids)
        edited[: self._vocab_size].masked_fill_(~self.allowed_mask(output_token_ids), -torch.inf)
        return edited

    def _penalise(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        """Repetition scales what prompt or output hold; the others lower what the output holds."""
        params = self._params
        is_repetition_on = params.repetition_penalty != 1.0
        is_drop_on = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        if not (is_repetition_on or is_drop_on):
            return
        output, counts = np.unique(np.asarray(output_token_ids, dtype=np.int64), return_counts=True)
        if is_repetition_on:
            seen = torch.from_numpy(np.union1d(self._prompt_ids, output))
            value, penalty = logits[seen], params.repetition_penalty
            logits[seen] = torch.where(value > 0.0, value / penalty, value * penalty)
        if is_drop_on:
            count = torch.from_numpy(counts).to(logits.dtype)
            drop = params.presence_penalty + params.frequency_penalty * count
            logits[torch.from_numpy(output)] -= drop

    def _build_static_mask(self) -> Tensor:
        """[vocab_size] bool, what the rules that hold at every position leave."""
        params = self._params
        if params.allowed_token_ids is None:
            allowed = torch.ones(self._vocab_size, dtype=torch.bool)
        else:
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[params.allowed_token_ids] = True
        allowed[[word[0] for word in params.bad_words_ids if len(word) == 1]] = False
        allowed[self._bias_ids[self._biases == -torch.inf]] = False
        return allowed

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{field} names token {token}, which is outside the vocabulary of "
                    f"{self._vocab_size}; use ids from 0 to {self._vocab_size - 1}"
                )
