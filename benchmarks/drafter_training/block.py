"""The training-time definition of block drafting, for every start position of a text at once.

The block of row t stands behind the tokens 0 … t + 1: its entry k attends the step-0 entries 0 … t
(committed tokens, true hidden states) and the entries 0 … k of its own block, as in ``chain``. Every
entry takes the target's hidden state of token t; the token before position k enters by the sequential
head only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from trtllm_av.runtime.models.drafters.dspark_head import DSparkHead, SequentialHead

from .chain import StepFunction, chain_step


@dataclass(slots=True)
class Proposal:
    """One depth of a drafter: the state [B, T, H] that the output layer reads, and for a drafter with a
    confidence head the function from ``draft_figures`` [B, T, 2] to its logits [B, T]."""

    state: Tensor
    confidence: Callable[[Tensor], Tensor] | None = None


def advance(
    head: SequentialHead, block: Tensor, embedding: Tensor, carried: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(corrected state [B, T, H], carried state [B, T, state_size]) of one position."""
    carried = head.advance(head.read_block(block), embedding, carried)
    return block + head.lifted(carried), carried


AdvanceFunction = Callable[[SequentialHead, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def run_block(
    head: DSparkHead,
    embedding_rows: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    num_steps: int,
    step: StepFunction = chain_step,
    move: AdvanceFunction = advance,
) -> Iterator[Proposal]:
    """Yield positions 0, 1, … of every block; T = length − ``num_steps`` − 1.

    ``token_ids`` [B, length], ``hidden`` [B, length, H] the target's, ``embedding_rows`` [V, H]. The
    confidence head reads the states without a gradient: it learns about them and does not shape them.
    """
    length = token_ids.shape[1] - num_steps - 1
    known = hidden[:, :length]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    carried: Tensor | None = None
    anchor = embedding_rows[token_ids[:, 1 : 1 + length].long()].to(known.dtype)
    for k in range(num_steps):
        block, key, value = step(head.layer, head.masked(anchor, k), known, keys, values)
        keys.append(key)
        values.append(value)
        before = embedding_rows[token_ids[:, 1 + k : 1 + k + length].long()].to(known.dtype)
        state, carried = move(head.sequential, block, before, carried)
        yield Proposal(state, partial(head.confidence, block.detach(), carried.detach()))
