"""The live state of requests on the device, one column of two tables per slot.

Invariants: slot S, the scratch slot, belongs to no request and has nothing remaining, so that padding rows
of a batch are dead rows; a request's ``rounds`` grows by one with every round it takes part in; state is
written in stream order only, by the round itself and by admissions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from trtllm_av.runtime.engines.cuda.transfer import to_device


class Field(IntEnum):
    """Rows of the integer table."""

    KV_LEN = 0
    LAST_TOKEN = 1
    REMAINING = 2
    ROUNDS = 3
    SEED = 4
    REQUEST = 5
    TOP_K = 6


@dataclass(slots=True)
class Admission:
    """What a request brings to its slot, before its prompt is computed."""

    slot: int
    max_tokens: int
    seed: int
    request_number: int
    temperature: float
    top_k: int
    top_p: float


class DeviceState:
    """``integers`` [7, S+1] int64 (rows: ``Field``), ``floats`` [2, S+1] f32 (temperature, top-p)."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.integers = torch.zeros(len(Field), num_slots + 1, device=device, dtype=torch.int64)
        self.floats = torch.zeros(2, num_slots + 1, device=device)
        self.floats[1] = 1.0

    def admit(self, admissions: list[Admission]) -> None:
        """Give slots to new requests; their prompts are not in the cache yet."""
        slots = torch.tensor([a.slot for a in admissions])
        integers = torch.zeros(len(Field), len(admissions), dtype=torch.int64)
        integers[Field.REMAINING] = torch.tensor([a.max_tokens for a in admissions])
        integers[Field.SEED] = torch.tensor([a.seed for a in admissions])
        integers[Field.REQUEST] = torch.tensor([a.request_number for a in admissions])
        integers[Field.TOP_K] = torch.tensor([a.top_k for a in admissions])
        floats = torch.tensor([[a.temperature for a in admissions], [a.top_p for a in admissions]])
        device = self.integers.device
        on_device = to_device(slots, device)
        self.integers.index_copy_(1, on_device, to_device(integers, device))
        self.floats.index_copy_(1, on_device, to_device(floats, device))
