"""The networks of a block drafter: its pass over a block, and the sequential head behind it.

Objective: the mathematics of ``runtime.models.drafters.dflash`` and ``dspark`` with plain weights. The runtime
draws between the positions of a block, so the sequential head is a network of its own. Invariants: those of
``networks``; a carried state of zeros is the start of a block, because its norm is zero too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtllm_av.builder.networks import HeadStepNetwork, Packing
from trtllm_av.runtime.models.drafters.block_head import BlockHead
from trtllm_av.runtime.models.drafters.dspark_head import DSparkHead, figures_of_logits


class BlockStepNetwork(HeadStepNetwork):
    """A pass over blocks, and over committed entries, whose ``mask_idx`` is 0."""

    def __init__(self, head: BlockHead, embedding: Tensor, output: Tensor) -> None:
        super().__init__(head.layer, embedding, output)
        masks = torch.cat([torch.zeros_like(head.masks[:1]), head.masks])
        self.masks = nn.Parameter(masks.to(embedding.dtype), requires_grad=False)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        cu_q: Tensor,
        kv_write: Tensor,
        kv_len: Tensor,
        pad_idx: Tensor,
        pack_idx: Tensor,
        logit_idx: Tensor,
        mask_idx: Tensor,
        caches: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``HeadStepNetwork``; ``mask_idx`` [T] is each entry's position in its block."""
        packing = Packing(cu_q, kv_write, kv_len, pad_idx, pack_idx)
        embedded = F.embedding(input_ids, self.embedding) + F.embedding(mask_idx, self.masks)
        return self._step(embedded, hidden, position_ids, packing, logit_idx, caches)


class ChainNetwork(nn.Module):
    """One position of the sequential head: what the token before it adds to the block's logits."""

    def __init__(self, head: DSparkHead, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.sequential, self.confidence = head.sequential, head.confidence
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        lift = head.sequential.lift.detach().to(output.dtype)
        self.bias = nn.Parameter(output @ lift, requires_grad=False)

    def forward(
        self, block_state: Tensor, block_logits: Tensor, input_ids: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits [R, V_d], carried state [R, state_size] and the confidence head's logit [R] float32.

        ``block_state`` [R, H] and ``block_logits`` [R, V_d] of the position, ``input_ids`` [R] the token
        before it, ``carried`` the state before it.
        """
        read = self.sequential.read_block(block_state)
        after = self.sequential.advance(read, F.embedding(input_ids, self.embedding), carried)
        logits = block_logits + F.linear(after, self.bias)
        return logits, after, self.confidence(block_state, after, figures_of_logits(logits))
