"""The live state of requests, one row of a table per KV-cache slot.

Invariants: ``history[slot, :lens[slot]]`` holds the committed tokens (prompt, then emitted ones); the
target's cache holds ``lens − 1`` of them once a slot decodes; a slot's ``rounds`` grows by one with every
round in which the request draws and is never reset while it lives, so no random key repeats.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotTable:
    """Per-slot tensors: ``history`` [S, L] int64, ``lens``, ``rounds``, ``seeds``, ``request_numbers``,
    ``top_k`` [S] int64, ``temperature``, ``top_p`` [S] f32."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.history = torch.zeros(num_slots, max_len, dtype=torch.int64)
        self.lens = torch.zeros(num_slots, dtype=torch.int64)
        self.rounds = torch.zeros(num_slots, dtype=torch.int64)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64)
        self.request_numbers = torch.zeros(num_slots, dtype=torch.int64)
        self.temperature = torch.zeros(num_slots, dtype=torch.float32)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64)
        self.top_p = torch.ones(num_slots, dtype=torch.float32)

    def admit(
        self,
        slot: int,
        prompt: Tensor,
        *,
        seed: int,
        request_number: int,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> None:
        """Give the slot to a request whose prompt is ``prompt`` [n] int64."""
        self.history[slot, : prompt.numel()] = prompt
        self.lens[slot] = prompt.numel()
        self.rounds[slot] = 0
        self.seeds[slot] = seed
        self.request_numbers[slot] = request_number
        self.temperature[slot] = temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = top_p

    def commit(self, slot: int, tokens: list[int]) -> None:
        """Append emitted tokens to the slot's history."""
        start = int(self.lens[slot])
        self.history[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self.lens[slot] = start + len(tokens)
