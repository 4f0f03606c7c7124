"""Prompts into the caches, and the token behind each prompt, without waiting for the device.

Invariants: a pass holds chunks of different slots only; the first token is drawn under round 0 of its
request, as on the CPU; shapes follow the prompts, so that passes run uncaptured, outside of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtllm_av.plugins import sampling_ops
from trtllm_av.runtime.engines.cuda.round import DeviceRound
from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.engines.cuda.state import Field
from trtllm_av.runtime.engines.cuda.target import PackedTokens
from trtllm_av.runtime.engines.cuda.transfer import to_device
from trtllm_av.runtime.random_source import Purpose
from trtllm_av.runtime.step import NO_TOKEN


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens ``tokens`` of a slot from position ``start`` on; ``following`` is the prompt's next
    token, None if the chunk ends the prompt."""

    slot: int
    start: int
    tokens: list[int]
    following: int | None


def prefill(round: DeviceRound, chunks: list[Chunk], sampling: Sampling) -> Tensor:
    """Run one pass; first tokens [N] int64 on the device, of the chunks that end their prompt, in order."""
    target, state = round.target, round.state
    lengths = np.array([len(chunk.tokens) for chunk in chunks])
    ends = lengths.cumsum()
    starts = np.array([chunk.start for chunk in chunks])
    slots = np.array([chunk.slot for chunk in chunks])
    row = np.arange(len(chunks)).repeat(lengths)
    positions = starts[row] + np.arange(ends[-1]) - (ends - lengths)[row]
    parts = {
        "token_ids": np.array([token for chunk in chunks for token in chunk.tokens]),
        "positions": positions,
        "write_offsets": slots[row] * target.cache.max_len + positions,
        "next_ids": np.array(
            [
                token
                for chunk in chunks
                for token in (*chunk.tokens[1:], 0 if chunk.following is None else chunk.following)
            ]
        ),
        "slots": slots,
        "starts": starts,
        "cu_seqlens": np.concatenate(([0], ends)),
        "lengths": lengths,
        "done": np.array(
            [r for r, chunk in enumerate(chunks) if chunk.following is None], np.int64
        ),
    }
    flat = to_device(torch.from_numpy(np.concatenate(list(parts.values()))), target.device)
    sizes = [part.size for part in parts.values()]
    on_device = dict(zip(parts, flat.split(sizes), strict=True))
    batch = PackedTokens(
        on_device["token_ids"],
        on_device["positions"],
        on_device["write_offsets"],
        on_device["slots"],
        on_device["starts"].int(),
        on_device["cu_seqlens"].int(),
        int(lengths.max()),
    )
    hidden = target.forward(batch)
    done, next_ids = on_device["done"], on_device["next_ids"]
    last = on_device["cu_seqlens"][1:] - 1
    tokens: Tensor = done
    if done.numel():
        logit_rows = last.index_select(0, done)
        done_slots = on_device["slots"].index_select(0, done)
        integers = state.integers.index_select(1, done_slots)
        temperature, top_p = state.floats.index_select(1, done_slots)
        logits = target.logits(hidden.index_select(0, logit_rows))
        laws = sampling_ops.row_statistics(logits, temperature, target.config.vocab_size)
        tokens = laws.point
        if sampling is not Sampling.GREEDY:
            if sampling is Sampling.CUT:
                laws = sampling_ops.cut_thresholds(laws, integers[Field.TOP_K], top_p)
            uniforms = sampling_ops.keyed_uniforms(
                integers[Field.SEED],
                integers[Field.REQUEST],
                integers[Field.ROUNDS],
                torch.zeros_like(done),
                int(Purpose.BONUS),
            )
            tokens = sampling_ops.draw(laws, uniforms)
        tokens = torch.where(laws.maximum == -torch.inf, NO_TOKEN, tokens)
        next_ids.index_copy_(0, logit_rows, tokens.clamp(min=0))
        integers[Field.KV_LEN] = on_device["starts"].index_select(0, done)
        integers[Field.KV_LEN] += on_device["lengths"].index_select(0, done)
        integers[Field.LAST_TOKEN] = tokens.clamp(min=0)
        integers[Field.REMAINING] -= 1
        integers[Field.ROUNDS] += 1
        state.integers.index_copy_(1, done_slots, integers)
    if round.drafter is not None:
        positions = (on_device["starts"] + on_device["lengths"] - 1).int()
        round.drafter.follow(batch, hidden, next_ids, last, positions)
    return tokens
