"""One network of an engine, exported or compiled, with the memory that its passes keep.

Invariants: the updated caches are written into the memory that they are read from; every slot of the cache
takes part in every pass, idle ones with no tokens; results are on the host, whatever ran the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trtllm_av.runtime.engines.base import ExecutorIdentity


@dataclass(frozen=True, slots=True)
class PassSizes:
    """What a pass is padded to: T packed tokens, M queries per slot and N rows whose logits are wanted."""

    num_tokens: int
    width: int
    num_logits: int


class Plan(Protocol):
    """A network that runs; ``num_slots`` and ``max_len`` are those of its cache (0 without one)."""

    @property
    def identity(self) -> ExecutorIdentity: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def max_row_tokens(self) -> int | None:
        """The most tokens that one row brings to a pass, None without a limit."""
        ...

    @property
    def caches(self) -> Mapping[str, Any]:
        """The cache inputs by name, as another plan of the same kind takes them for sharing."""
        ...

    def sizes(self, wanted: PassSizes) -> PassSizes:
        """The smallest sizes ≥ ``wanted`` that the plan runs, or that it has a captured graph for."""
        ...

    def run(self, feed: Mapping[str, Tensor], outputs: Sequence[str]) -> list[Tensor]:
        """The named outputs of one pass over ``feed``, all inputs but the caches, on the host."""
        ...
