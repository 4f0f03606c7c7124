"""The law of the next token: one function turns logits into it, for drafts and for the target alike.

Invariants: a token is drawn from and judged by the same tensors (a Distribution is stored, never
computed again, least of all in another precision); rows do not influence each other; greedy rows are
one-hot and never become a [N, V] table; columns at or behind ``vocab_size`` and tokens at −inf or NaN
never have probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_av.runtime.random_source import RandomKeys, RandomSource


@dataclass(slots=True)
class Distribution:
    """N laws over V tokens, one-hot ones stored as their token.

    ``dense`` [M, V] float holds probabilities; ``dense_row`` [N] int64 is the row's place in it, −1 where
    the law is one-hot at ``point`` [N] int64 (``point`` means nothing elsewhere). ``is_empty`` [N] bool
    marks rows whose logits allowed no token: they are one-hot at token 0 so that shapes hold, and the
    caller must not emit from them; None means that there are none.
    """

    point: Tensor
    dense: Tensor
    dense_row: Tensor
    is_empty: Tensor | None = None

    def __len__(self) -> int:
        return self.point.numel()

    @property
    def vocab_size(self) -> int:
        return self.dense.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.dense.dtype

    @classmethod
    def one_hot(
        cls, point: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32
    ) -> Distribution:
        """Certain tokens ``point`` [N] int64."""
        dense = torch.empty((0, vocab_size), dtype=dtype, device=point.device)
        return cls(point, dense, torch.full_like(point, -1))

    @classmethod
    def from_probabilities(cls, probabilities: Tensor) -> Distribution:
        """Laws given in full, ``probabilities`` [N, V] with rows that sum to 1; not copied."""
        row = torch.arange(probabilities.shape[0], device=probabilities.device)
        return cls(torch.zeros_like(row), probabilities, row)

    def rows(self, index: Tensor) -> Distribution:
        """The laws at ``index`` (int64 indices or a bool mask [N]); shares ``dense``."""
        is_empty = None if self.is_empty is None else self.is_empty[index]
        return Distribution(self.point[index], self.dense, self.dense_row[index], is_empty)

    def probability(self, tokens: Tensor) -> Tensor:
        """[N] probability of ``tokens`` [N] int64 (each within the vocabulary)."""
        at_point = (tokens == self.point).to(self.dtype)
        if self.dense.shape[0] == 0:
            return at_point
        return torch.where(
            self.dense_row < 0, at_point, self.dense[self.dense_row.clamp(min=0), tokens]
        )

    def full(self) -> Tensor:
        """All laws as one table [N, V]."""
        table = torch.zeros(
            (len(self), self.vocab_size), dtype=self.dtype, device=self.dense.device
        )
        is_dense = self.dense_row >= 0
        table[is_dense] = self.dense[self.dense_row[is_dense]]
        table[~is_dense, self.point[~is_dense]] = 1.0
        return table

    def remap(self, draft_to_target: Tensor, vocab_size: int) -> Distribution:
        """Laws over a reduced draft vocabulary as laws over the target's; 0 elsewhere.

        ``draft_to_target`` [V_d] int64 names the target token of each draft token.
        """
        dense = self.dense.new_zeros((self.dense.shape[0], vocab_size))
        dense[:, draft_to_target] = self.dense
        return Distribution(draft_to_target[self.point], dense, self.dense_row, self.is_empty)

    def draw(self, source: RandomSource, keys: RandomKeys) -> Tensor:
        """One token per row, [N] int64; one-hot rows leave their key unused."""
        if self.dense.shape[0] == 0:
            return self.point
        index = torch.nonzero(self.dense_row >= 0).flatten()
        if index.numel() == 0:
            return self.point
        where = self.dense_row[index]
        # Mostly the table holds exactly the rows asked for: spare the copy.
        is_whole = torch.equal(where, torch.arange(self.dense.shape[0], device=where.device))
        tokens = source.categorical(
            self.dense if is_whole else self.dense[where], keys.select(index)
        )
        return self.point.index_copy(0, index, tokens)


def distribution(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
) -> Distribution:
    """The laws of ``logits`` [N, ≥ vocab_size] (any float type) after temperature, top-k, top-p ([N] each).

    Temperature 0 is one-hot at the first maximum. ``top_k`` (int, 0 off) keeps the k largest logits and
    whatever ties with the k-th; then ``top_p`` (1 off) keeps the smallest set of likeliest tokens that
    holds this share of the mass, and whatever ties with its last. NaN counts as −inf, +inf as certain.
    ``dtype`` is that of all arithmetic and of the result; pass float64 for exact enumeration.
    """
    logits = logits[:, :vocab_size]
    best = logits.amax(-1)
    if torch.isnan(best).any():
        logits = torch.where(torch.isnan(logits), -torch.inf, logits)
        best = logits.amax(-1)
    is_empty = best == -torch.inf
    # A temperature that vanishes in this precision is greedy too: nothing can be divided by it.
    is_sampled = (temperature.to(dtype) > 0.0) & torch.isfinite(best)
    sampled = torch.nonzero(is_sampled).flatten()
    if sampled.numel() == 0:
        result = Distribution.one_hot(_first_maximum(logits), vocab_size, dtype)
    else:
        result = _mixed(logits, best, sampled, temperature, top_k, top_p, dtype)
    if is_empty.any():
        result.is_empty = is_empty
    return result


def _mixed(
    logits: Tensor,
    best: Tensor,
    sampled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    dtype: torch.dtype,
) -> Distribution:
    """Laws of a batch in which the rows ``sampled`` are dense and the others one-hot."""
    num_rows = logits.shape[0]
    point = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    dense_row = torch.full_like(point, -1)
    dense_row[sampled] = torch.arange(sampled.numel(), device=logits.device)
    if sampled.numel() < num_rows:
        greedy = torch.nonzero(dense_row < 0).flatten()
        point[greedy] = _first_maximum(logits[greedy])
        logits, best = logits[sampled], best[sampled]
        temperature, top_k, top_p = temperature[sampled], top_k[sampled], top_p[sampled]
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    dense = logits.to(dtype) - best.to(dtype)[:, None]
    dense.div_(temperature.to(dtype)[:, None])
    _cut_top_k(dense, top_k)
    dense.exp_()
    _cut_top_p(dense, top_p)
    dense.div_(dense.sum(-1, keepdim=True))
    return Distribution(point, dense, dense_row)


def _first_maximum(logits: Tensor) -> Tensor:
    """[N] int64, first index of the maximum; no NaN. NumPy's search is 10× torch's on a CPU."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def _cut_top_k(scaled: Tensor, top_k: Tensor) -> None:
    """Set what lies below each row's k-th largest value to −inf, in place."""
    width = scaled.shape[1]
    for row in torch.nonzero((top_k > 0) & (top_k < width)).flatten().tolist():
        values = scaled[row]
        smallest_kept = values.topk(int(top_k[row])).values[-1]
        values.masked_fill_(values < smallest_kept, -torch.inf)


def _cut_top_p(mass: Tensor, top_p: Tensor) -> None:
    """Set what lies outside each row's nucleus to 0, in place; ``mass`` need not be normalised.

    Holtzman et al., "The curious case of neural text degeneration", 2020. Only tokens with at least
    (1 − top_p) / V of the mass are sorted: all lighter ones together hold less than 1 − top_p, so the
    last token of the nucleus is never among them.
    """
    width = mass.shape[1]
    for row in torch.nonzero(top_p < 1.0).flatten().tolist():
        values, share = mass[row], float(top_p[row])
        total = float(values.sum(dtype=torch.float64))
        heavy = values[values >= (1.0 - share) * total / width].sort(descending=True).values
        before_end = heavy.cumsum(0, dtype=torch.float64) < share * total
        smallest_kept = heavy[min(int(before_end.sum()), heavy.numel() - 1)]
        values.masked_fill_(values < smallest_kept, 0.0)


def map_draft_logits(draft_logits: Tensor, draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """Logits [N, V_d] of a reduced draft vocabulary as logits [N, vocab_size]; −inf elsewhere.

    ``draft_to_target`` [V_d] int64 names the target token of each draft column. Masks and penalties
    apply to the result; where there are none, ``Distribution.remap`` does with less work.
    """
    logits = draft_logits.new_full((draft_logits.shape[0], vocab_size), -torch.inf)
    logits[:, draft_to_target] = draft_logits[:, : draft_to_target.numel()]
    return logits
