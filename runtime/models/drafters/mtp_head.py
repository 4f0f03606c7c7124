"""The weights of multi-token prediction: one layer per depth, each on the states of the one before.

Module k is the layer of ``eagle_head``: entry t joins the state of entry t from module k − 1 (for k = 0
the target's hidden state) with the embedding of token t + 1 + k, and predicts token t + 2 + k.

Taken over from DeepSeek-V3 (DeepSeek-AI, 2024): one module per depth, norms of state and embedding before
their projection, one decoder layer, the whole causal chain at every depth, embedding and output layer of
the target. Not taken over: mixture of experts and latent attention in the module, training together with
the target; the state goes on behind the module's final norm.

Invariants: those of ``eagle_head``; module k is used at position k only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, EagleHeadConfig
from trtllm_av.runtime.models.drafters.head_file import load_weights, save_weights

_FAMILY = "mtp_head"


@dataclass(frozen=True)
class MTPHeadConfig:
    """Shape of every module, and how many there are."""

    layer: EagleHeadConfig
    num_modules: int

    @property
    def target_fingerprint(self) -> str:
        return self.layer.target_fingerprint


class MTPHead(nn.Module):
    """See the module docstring."""

    def __init__(self, config: MTPHeadConfig) -> None:
        super().__init__()
        self.config = config
        self._modules_by_depth = [EagleHead(config.layer) for _ in range(config.num_modules)]
        for depth, module in enumerate(self._modules_by_depth):
            self.add_module(f"depth{depth}", module)

    def at_depth(self, depth: int) -> EagleHead:
        """The module of draft position ``depth``."""
        return self._modules_by_depth[depth]

    def prepack(self) -> None:
        """Lay the matrices out for small batches; packed [N, H] states only from here on."""
        for module in self._modules_by_depth:
            module.prepack()


def save_mtp_head(path: Path, head: MTPHead, draft_to_target: Tensor) -> None:
    """Write weights and the map of draft ids [V_d]."""
    save_weights(path, _FAMILY, head.config, head, draft_to_target)


def load_mtp_head(path: Path, dtype: torch.dtype = torch.float32) -> tuple[MTPHead, Tensor]:
    """A head, frozen, and its map of draft ids (int64 [V_d]); raises as ``load_weights`` does."""

    def build(config: dict[str, Any]) -> MTPHead:
        return MTPHead(MTPHeadConfig(**config | {"layer": EagleHeadConfig(**config["layer"])}))

    return load_weights(path, _FAMILY, build, dtype)
