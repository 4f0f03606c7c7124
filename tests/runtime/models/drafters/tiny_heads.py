"""Heads of random weights for every family on the target's hidden state, and what each should compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.block_head import (
    BlockHead,
    BlockHeadConfig,
    save_block_head,
)
from trtllm_av.runtime.models.drafters.dflash import DFlashDrafter
from trtllm_av.runtime.models.drafters.dspark import DSparkDrafter
from trtllm_av.runtime.models.drafters.dspark_head import (
    DSparkHead,
    DSparkHeadConfig,
    figures_of_logits,
    save_dspark_head,
)
from trtllm_av.runtime.models.drafters.eagle import EagleDrafter
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, EagleHeadConfig, save_head
from trtllm_av.runtime.models.drafters.head_file import target_fingerprint
from trtllm_av.runtime.models.drafters.mtp import MTPDrafter
from trtllm_av.runtime.models.drafters.mtp_head import MTPHead, MTPHeadConfig, save_mtp_head
from trtllm_av.runtime.models.kv_cache import KVCache

#: Positions that every head here is made for.
NUM_POSITIONS = 4
_GROUP = 2  # query heads that share a key head


def layer_config(target: LoadedModel) -> EagleHeadConfig:
    return EagleHeadConfig(
        hidden_size=target.config.hidden_size,
        num_heads=4,
        num_kv_heads=4 // _GROUP,
        head_dim=8,
        intermediate_size=40,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        target_fingerprint=target_fingerprint(target.model.embed, target.config.vocab_size),
    )


def randomise(head: nn.Module, seed: int = 7) -> None:
    """Weights large enough that every input of the head matters."""
    head.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)


@dataclass(frozen=True)
class Expected:
    """``logits`` [V_d] of one position and, with a confidence head, its logit."""

    logits: Tensor
    confidence: Tensor | None = None


Definition = Callable[[LoadedModel, Any, Tensor, list[int], list[int]], list[Expected]]


@dataclass(frozen=True)
class Family:
    """How a family's head is made, stored and run, and what it defines: logits of positions 0 …
    len(drafts) behind committed tokens, from nothing but the definition."""

    name: str
    new_head: Callable[[EagleHeadConfig], Any]
    save: Callable[[Path, Any, Tensor], None]
    drafter: Callable[..., Any]
    definition: Definition

    def head(self, target: LoadedModel) -> Any:
        head = self.new_head(layer_config(target))
        randomise(head)
        return head


def draft_ids(vocab_size: int, count: int = 41) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randperm(vocab_size, generator=generator)[:count].sort().values


def _layer(head: EagleHead, embedding: Tensor, hidden: Tensor) -> Tensor:
    """States [N, H] of entries 0 … N − 1, each seeing those up to itself."""
    count = len(embedding)
    residual, q, k, v = head.before_attention(embedding, hidden, torch.arange(count))
    k, v = k.repeat_interleave(_GROUP, 1), v.repeat_interleave(_GROUP, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    is_ahead = torch.ones(count, count, dtype=torch.bool).triu(1)
    weight = score.masked_fill(is_ahead, -torch.inf).softmax(-1)
    return head.after_attention(residual, torch.einsum("hqk,khd->qhd", weight, v).flatten(1))


def _states(target: LoadedModel, committed: list[int]) -> Tensor:
    """The target's hidden states of all committed tokens but the last, whose state nobody has yet."""
    cache = KVCache(target.config, 1, len(committed))
    output = target.model(PackedBatch.from_lists([committed], [0], [0]), cache)
    return output.hidden[:-1]


def eagle_definition(
    target: LoadedModel, head: EagleHead, ids: Tensor, committed: list[int], drafts: list[int]
) -> list[Expected]:
    hidden = _states(target, committed)
    embedding = target.model.embed(torch.tensor(committed + drafts))
    result = []
    for _ in range(len(drafts) + 1):
        state = _layer(head, embedding[1 : 1 + len(hidden)], hidden)[-1:]
        result.append(Expected(target.model.logits(state)[0, ids]))
        hidden = torch.cat([hidden, state])
    return result


def mtp_definition(
    target: LoadedModel, head: MTPHead, ids: Tensor, committed: list[int], drafts: list[int]
) -> list[Expected]:
    states = _states(target, committed)
    embedding = target.model.embed(torch.tensor(committed + drafts))
    result = []
    for depth in range(len(drafts) + 1):
        taken = embedding[1 + depth : 1 + depth + len(states)]
        states = _layer(head.at_depth(depth), taken, states)
        result.append(Expected(target.model.logits(states[-1:])[0, ids]))
    return result


def _block_states(target: LoadedModel, head: BlockHead, committed: list[int]) -> Tensor:
    hidden = _states(target, committed)
    embedding = target.model.embed(torch.tensor(committed[1:]))
    masked = torch.cat([embedding, embedding[-1:] + head.masks])
    last = hidden[-1:].expand(len(head.masks), -1)
    states = _layer(head.layer, masked, torch.cat([hidden, last]))
    return states[len(embedding) - 1 :]


def dflash_definition(
    target: LoadedModel, head: BlockHead, ids: Tensor, committed: list[int], drafts: list[int]
) -> list[Expected]:
    logits = target.model.logits(_block_states(target, head, committed))[:, ids]
    return [Expected(row) for row in logits[: len(drafts) + 1]]


def dspark_definition(
    target: LoadedModel, head: DSparkHead, ids: Tensor, committed: list[int], drafts: list[int]
) -> list[Expected]:
    states = _block_states(target, head, committed)
    before = target.model.embed(torch.tensor([committed[-1], *drafts]))
    carried, result, sequential = None, [], head.sequential
    for position in range(len(drafts) + 1):
        rows = slice(position, position + 1)
        read = sequential.read_block(states[rows])
        carried = sequential.advance(read, before[rows], carried)
        logits = target.model.logits(states[rows] + sequential.lifted(carried))[:, ids]
        confidence = head.confidence(states[rows], carried, figures_of_logits(logits))
        result.append(Expected(logits[0], confidence[0]))
    return result


FAMILIES = (
    Family("eagle", EagleHead, save_head, EagleDrafter, eagle_definition),
    Family(
        "mtp",
        lambda layer: MTPHead(MTPHeadConfig(layer, NUM_POSITIONS)),
        save_mtp_head,
        MTPDrafter,
        mtp_definition,
    ),
    Family(
        "dflash",
        lambda layer: BlockHead(BlockHeadConfig(layer, NUM_POSITIONS)),
        save_block_head,
        DFlashDrafter,
        dflash_definition,
    ),
    Family(
        "dspark",
        lambda layer: DSparkHead(DSparkHeadConfig(layer, NUM_POSITIONS, 12, 20, 8)),
        save_dspark_head,
        DSparkDrafter,
        dspark_definition,
    ),
)
