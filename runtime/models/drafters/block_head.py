"""The weights of a block drafter: one layer that proposes every position of a block in one pass.

The layer is that of ``eagle_head``. A block behind the committed tokens 0 … n−1 has one entry per
position, at rotary positions n−2, n−1, …: every entry takes the embedding of the last committed token
(the anchor) and the target's hidden state of the token before it; entry i ≥ 1 adds the learned vector
``masks[i − 1]`` to the embedding, which says how far ahead it predicts. Entry 0 is the entry that a
committed token leaves in the KV cache, so entries of committed tokens are made of target states only.

Taken over from DFlash (Chen et al., 2026): the block in one pass, the anchor beside learned masks, keys
and values of the context made from the target's hidden states, embedding and output layer of the target.
Not taken over: several layers, features of several target layers, attention from an entry to those
behind it (an entry sees the context and the entries before it), several denoising steps.

Invariants: those of ``eagle_head``; a block has at most ``block_size`` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, EagleHeadConfig
from trtllm_av.runtime.models.drafters.head_file import load_weights, save_weights

_FAMILY = "block_head"


@dataclass(frozen=True)
class BlockHeadConfig:
    """Shape of a block head: its layer, and how many positions it was trained for."""

    layer: EagleHeadConfig
    block_size: int

    @property
    def target_fingerprint(self) -> str:
        return self.layer.target_fingerprint


class BlockHead(nn.Module):
    """See the module docstring; ``masks`` [block_size − 1, H]."""

    def __init__(self, config: BlockHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.layer = EagleHead(config.layer)
        self.masks = nn.Parameter(torch.zeros(config.block_size - 1, config.layer.hidden_size))

    def prepack(self) -> None:
        """Lay the matrices out for small batches; packed [N, H] states only from here on."""
        self.layer.prepack()

    def masked(self, anchor: Tensor, position: int) -> Tensor:
        """What entry ``position`` takes in place of an embedding; ``anchor`` [..., H]."""
        return anchor if position == 0 else anchor + self.masks[position - 1].to(anchor.dtype)


def save_block_head(path: Path, head: BlockHead, draft_to_target: Tensor) -> None:
    """Write weights and the map of draft ids [V_d]."""
    save_weights(path, _FAMILY, head.config, head, draft_to_target)


def load_block_head(path: Path, dtype: torch.dtype = torch.float32) -> tuple[BlockHead, Tensor]:
    """A head, frozen, and its map of draft ids (int64 [V_d]); raises as ``load_weights`` does."""

    def build(config: dict[str, Any]) -> BlockHead:
        return BlockHead(BlockHeadConfig(**config | {"layer": EagleHeadConfig(**config["layer"])}))

    return load_weights(path, _FAMILY, build, dtype)
