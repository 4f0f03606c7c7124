"""What the round asks of a drafter, whatever its family.

A drafter proposes up to ``max_draft_len`` tokens per row, one position at a time: ``start`` gives the
logits of position 0, ``step`` those of position i after the tokens of position i−1 were drawn. A block
drafter computes all positions in ``start`` and only hands them out in ``step``.

Invariants: the logits and the confidence of position i are functions of committed tokens
and of the drafts x_0 … x_{i−1} of the same row, never of x_i; neither depends on which
other rows are in the batch. The drafter keeps its own KV state per slot; what it wrote for drafts that
were rejected or trimmed is overwritten or ignored by the next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True)
class DraftContext:
    """The committed state of the rows that are to draft, fixed before the round.

    ``slots`` [R] int64; ``lens`` [R] int64: committed tokens of each row, prompt included — the last of
    them is not yet in the target's KV cache (the target holds ``lens − 1`` tokens); ``history``
    [num_slots, max_seq_len + margin] int64: committed tokens per slot, valid up to ``lens``.
    """

    slots: Tensor
    lens: Tensor
    history: Tensor


class Drafter(Protocol):
    """A family of drafters behind one face; see the module docstring for the invariants."""

    @property
    def name(self) -> str: ...

    @property
    def cost_key(self) -> str:
        """The name and whatever else of the drafter decides what a draft costs, for cached step costs."""
        ...

    @property
    def max_draft_len(self) -> int: ...

    @property
    def is_block(self) -> bool:
        """True if a draft costs the same at every depth, so that only 0 or K are worth trying."""
        ...

    @property
    def reads_hidden(self) -> bool:
        """True if ``observe`` needs the target's hidden states."""
        ...

    @property
    def draft_to_target(self) -> Tensor | None:
        """[V_d] int64 map of a reduced draft vocabulary; None means the target's own."""
        ...

    @property
    def has_confidence_head(self) -> bool:
        """True if ``confidence_logit`` may be called."""
        ...

    def reset(self, slot: int) -> None:
        """Forget a slot before another request uses it."""
        ...

    def observe(self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, hidden: Tensor) -> None:
        """Take the target's final hidden states [T, H] of packed tokens that are now committed.

        ``starts`` [R] is the position of each row's first token. Called after prefill and after each
        verification, with accepted positions only.
        """
        ...

    def lag(self, context: DraftContext) -> Tensor:
        """[R] int64, committed tokens that the drafter's own KV does not hold yet (0 without one)."""
        ...

    def refresh(self, context: DraftContext) -> None:
        """Bring the drafter's KV up to date without proposing (after prefill, and at depth 0)."""
        ...

    def start(self, context: DraftContext) -> Tensor:
        """Logits [R, V_d] of position 0, in the drafter's dtype; catches up its KV first."""
        ...

    def step(self, position: int, tokens: Tensor) -> Tensor:
        """Logits [R, V_d] of ``position`` ≥ 1, given ``tokens`` [R] int64 (target ids) drawn at position − 1.

        Rows whose own draft has ended pass any valid token; their logits are ignored.
        """
        ...

    def confidence_logit(self) -> Tensor:
        """[R] f32, the confidence head's logit for the position whose logits came last.

        It says how likely the target accepts the token that is about to be drawn there, given that it
        accepted all before, and is computed from tensors that exist before that token is drawn: never
        from a state behind it. Called once between ``start`` or ``step`` and the draw, and only where
        ``has_confidence_head``.
        """
        ...


class NoConfidenceHead:
    """The part of ``Drafter`` that families without a confidence head share."""

    has_confidence_head = False

    def confidence_logit(self) -> Tensor:
        """RuntimeError: nobody may ask."""
        raise RuntimeError(f"{type(self).__name__} has no confidence head; take the estimator")
