"""The training-time definition of chained drafting, for every start position of a text at once.

At chain step k, row t takes the token x_(t+1+k) of the text and predicts x_(t+2+k); its hidden state is
the target's at k = 0 and the head's own of step k−1 after that. It attends the step-0 entries 0 … t
(committed tokens, true hidden states) and the entries of its own chain, steps 1 … k: what the runtime's
KV cache holds while it drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trtllm_av.runtime.models.drafters.eagle_head import EagleHead


def chained_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B, T, heads·D] from q [B, T, heads, D] and, per chain step, k and v [B, T, kv_heads, D]."""
    group = q.shape[2] // keys[0].shape[2]
    q = q.transpose(1, 2) * q.shape[-1] ** -0.5
    keys = [k.transpose(1, 2).repeat_interleave(group, 1) for k in keys]
    values = [v.transpose(1, 2).repeat_interleave(group, 1) for v in values]
    length = q.shape[2]
    is_ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    score = (q @ keys[0].transpose(-1, -2)).masked_fill(is_ahead, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True).float() for k in keys[1:]]
    top = score.amax(-1, keepdim=True).float()
    for other in own:
        top = torch.maximum(top, other)
    top = top.detach()
    weight = (score.float() - top).exp()
    total = weight.sum(-1, keepdim=True)
    result = (weight.to(q.dtype) @ values[0]).float()
    for other, value in zip(own, values[1:], strict=True):
        share = (other - top).exp()
        total = total + share
        result = result + share * value.float()
    return (result / total).to(q.dtype).transpose(1, 2).flatten(2)


def chain_step(
    head: EagleHead, embedding: Tensor, hidden: Tensor, keys: list[Tensor], values: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One chained step: (hidden [B, T, H], k, v); ``keys`` and ``values`` are those of earlier steps."""
    positions = torch.arange(hidden.shape[1], device=hidden.device) + len(keys)
    residual, q, k, v = head.before_attention(embedding, hidden, positions)
    attention = chained_attention(q, [*keys, k], [*values, v])
    return head.after_attention(residual, attention), k, v


StepFunction = Callable[
    [EagleHead, Tensor, Tensor, list[Tensor], list[Tensor]], tuple[Tensor, Tensor, Tensor]
]


def run_chain(
    head: EagleHead,
    embedding_rows: Tensor,
    token_ids: Tensor,
    hidden: Tensor,
    num_steps: int,
    step: StepFunction = chain_step,
) -> Iterator[Tensor]:
    """Yield the head's hidden states [B, T, H] of step 0, 1, …; T = length − ``num_steps`` − 1.

    ``token_ids`` [B, length], ``hidden`` [B, length, H] the target's, ``embedding_rows`` [V, H].
    """
    length = token_ids.shape[1] - num_steps - 1
    state = hidden[:, :length]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for k in range(num_steps):
        embedding = embedding_rows[token_ids[:, 1 + k : 1 + k + length].long()]
        state, key, value = step(head, embedding.to(state.dtype), state, keys, values)
        keys.append(key)
        values.append(value)
        yield state
