"""Drafters on the target's hidden states over static caches: all rows draft at once, wherever they stand.

Entry t takes the embedding of token t + 1 and the target's hidden state of token t, as in the runtime's
drafters of the same names, whose weights these run; entries written for drafts are overwritten by the
next round.

Invariants: entries of committed tokens are made of the target's states; what a row holds is one entry
short of its committed tokens when a round begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.drafter_training.target import FrozenTarget
from trtllm_av.runtime.models.drafters.dspark_head import DSparkHead, figures_of_logits
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead

from .cached import LayerCache, Place


class StateRows:
    """The cache that both share, for ``num_rows`` rows of ``capacity`` positions."""

    def __init__(
        self,
        layer: EagleHead,
        draft_to_target: Tensor,
        target: FrozenTarget,
        *,
        num_rows: int,
        capacity: int,
        num_positions: int,
    ) -> None:
        self.draft_to_target = draft_to_target
        self._layer, self._target, self._num_positions = layer, target, num_positions
        self._output = target.output_rows[draft_to_target]
        config = layer.config.as_layer()
        self._group = config.num_heads // config.num_kv_heads
        self._cache = LayerCache(config, num_rows, capacity, target.dtype, target.device)
        self._hidden = torch.zeros(
            num_rows, capacity, config.hidden_size, dtype=target.dtype, device=target.device
        )
        self._held = torch.zeros(num_rows, dtype=torch.int64, device=target.device)

    def prefill(self, rows: Tensor, tokens: Tensor, hidden: Tensor, lens: Tensor) -> None:
        """Prompts ``tokens`` [N, C] of ``lens`` [N] with the target's ``hidden`` [N, C, H] enter ``rows``."""
        length = tokens.shape[1]
        self._hidden[rows, :length] = hidden
        place = Place(torch.zeros_like(lens), length - 1, length - 1, self._group, rows)
        self._feed(self._target.embedding[tokens[:, 1:]], hidden[:, :-1], place)
        self._held[rows] = lens - 1

    def observe(self, starts: Tensor, hidden: Tensor) -> None:
        """Hidden states [R, C, H] of the verified tokens at ``starts`` … ``starts`` + C − 1."""
        where = starts[:, None] + torch.arange(hidden.shape[1], device=starts.device)
        self._hidden[torch.arange(len(starts), device=starts.device)[:, None], where] = hidden

    def _catch_up(self, history: Tensor, lens: Tensor, reach: int) -> Tensor:
        """State [R, 1, H] of the last committed entry; the missing ones before it enter the cache."""
        held = torch.minimum(
            self._held, lens - 2
        )  # a slot that became idle stands at its beginning
        place = Place(held, self._num_positions + 1, reach, self._group)
        hidden = self._hidden[place.rows[:, None], place.positions]
        embedding = self._target.embedding[history.gather(1, place.positions + 1)]
        states = self._feed(embedding, hidden, place)
        self._held.copy_(lens - 1)
        return states[place.rows, lens - 2 - held][:, None]

    def _logits(self, state: Tensor) -> Tensor:
        """[R, V_d] f32 of ``state`` [R, H]."""
        logits: Tensor = state @ self._output.T
        return logits.float()

    def _feed(self, embedding: Tensor, hidden: Tensor, place: Place) -> Tensor:
        """Head states [N, C, H] of the entries at ``place``."""
        shape = embedding.shape[:2]
        residual, q, k, v = self._layer.before_attention(
            embedding.flatten(0, 1), hidden.flatten(0, 1), place.positions.flatten()
        )
        attention = self._cache.attend(
            q.unflatten(0, shape), k.unflatten(0, shape), v.unflatten(0, shape), place
        )
        states = self._layer.after_attention(residual, attention.flatten(0, 1))
        unpacked: Tensor = states.unflatten(0, shape)
        return unpacked


class EagleRows(StateRows):
    """The autoregressive head: each position from the head's own state of the one before."""

    name = "eagle"
    _ends: Tensor
    _state: Tensor
    _reach: int

    def start(self, history: Tensor, lens: Tensor, reach: int) -> Tensor:
        """Logits [R, V_d] f32 of position 0 behind ``history`` [R, S] of ``lens`` [R] tokens."""
        self._state = self._catch_up(history, lens, reach)
        self._ends, self._reach = lens - 1, reach
        return self._logits(self._state[:, 0])

    def step(self, position: int, tokens: Tensor) -> Tensor:
        """Logits [R, V_d] f32 of ``position`` ≥ 1 after ``tokens`` [R] at the one before."""
        place = Place(self._ends + (position - 1), 1, self._reach, self._group)
        self._state = self._feed(self._target.embedding[tokens][:, None], self._state, place)
        return self._logits(self._state[:, 0])

    def head_logit(self) -> Tensor | None:
        """This family has no confidence head."""
        return None


class DSparkRows(StateRows):
    """The block drafter: one pass for all positions, corrected by what was drawn before each."""

    name = "dspark"
    _states: Tensor
    _read: Tensor
    _carried: Tensor
    _last: Tensor

    def __init__(
        self, head: DSparkHead, draft_to_target: Tensor, target: FrozenTarget, **sizes: int
    ) -> None:
        """``sizes`` are those of ``StateRows``."""
        super().__init__(head.layer, draft_to_target, target, **sizes)
        self._head, self._position = head, 0

    def start(self, history: Tensor, lens: Tensor, reach: int) -> Tensor:
        """Logits [R, V_d] f32 of position 0 behind ``history`` [R, S] of ``lens`` [R] tokens."""
        first = self._catch_up(history, lens, reach)
        every = torch.arange(len(lens), device=lens.device)
        anchor = self._target.embedding[history[every, lens - 1]]
        width = self._num_positions - 1
        place = Place(lens - 1, width, reach, self._group)
        masked = torch.stack([self._head.masked(anchor, i + 1) for i in range(width)], 1)
        hidden = self._hidden[every, lens - 2][:, None].expand_as(masked)
        self._states = torch.cat([first, self._feed(masked, hidden, place)], 1)
        self._read = self._head.sequential.read_block(self._states)
        return self._correct(0, anchor, None)

    def step(self, position: int, tokens: Tensor) -> Tensor:
        """Logits [R, V_d] f32 of ``position`` ≥ 1 after ``tokens`` [R] at the one before."""
        return self._correct(position, self._target.embedding[tokens], self._carried)

    def head_logit(self) -> Tensor | None:
        """[R] f32: the confidence head's, of the position whose logits were returned last."""
        logit: Tensor = self._head.confidence(
            self._states[:, self._position], self._carried, figures_of_logits(self._last)
        )
        return logit

    def _correct(self, position: int, embedding: Tensor, carried: Tensor | None) -> Tensor:
        sequential = self._head.sequential
        self._carried = sequential.advance(self._read[:, position], embedding, carried)
        self._position = position
        self._last = self._logits(self._states[:, position] + sequential.lifted(self._carried))
        return self._last
