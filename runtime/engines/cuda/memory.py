"""What a device engine needs in memory, added up before anything is allocated.

Invariants: every buffer that grows with the model, the requests or their length is in the list; an engine
that does not fit is refused with the list, not by an allocation in the middle of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_av.plugins.sampling_laws import CUT_CANDIDATES
from trtllm_av.runtime.engines.cuda.buffers import RoundShape
from trtllm_av.runtime.engines.cuda.target import SlotCache
from trtllm_av.runtime.engines.cuda.transfer import carved_bytes
from trtllm_av.runtime.engines.cuda.weights import DecoderWeights
from trtllm_av.runtime.errors import DeviceError
from trtllm_av.runtime.models.config import LlamaConfig

_GIB = 2.0**30
#: Tensors of one packed token that are alive at once in a pass: states, queries, activations of the MLP.
_LIVE_STATES = 6
#: CUDA context, kernels, work space of the matrix products and of rows that share their keys in attention.
_RUNTIME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """``num_bytes`` for ``what``."""

    what: str
    num_bytes: int


def decoder_needs(
    name: str,
    config: LlamaConfig,
    dtype: torch.dtype,
    *,
    num_slots: int,
    max_len: int,
    num_tokens: int,
) -> list[Need]:
    """Needs of a decoder that runs ``num_tokens`` packed tokens at once."""
    states = _LIVE_STATES * config.hidden_size + 3 * config.intermediate_size
    return [
        Need(f"weights of the {name}", DecoderWeights.num_bytes(config, dtype)),
        Need(
            f"KV cache of the {name} ({num_slots} × {max_len} positions)",
            SlotCache.num_bytes(config, num_slots, max_len, dtype),
        ),
        Need(
            f"logits of {num_tokens} tokens of the {name}",
            num_tokens * config.vocab_size * dtype.itemsize,
        ),
        Need(
            f"activations of {num_tokens} tokens of the {name}",
            num_tokens * states * dtype.itemsize,
        ),
    ]


def round_needs(shape: RoundShape, max_requests: int) -> list[Need]:
    """Needs of the round's own buffers."""
    parts = (shape.inputs, shape.results, shape.scratch)
    return [
        Need(
            f"drafts and their logits of {max_requests} requests",
            sum(carved_bytes(part(max_requests)) for part in parts),
        ),
        Need(
            f"candidates of top-k and top-p for {max_requests} requests",
            max_requests * (1 + shape.num_positions) * CUT_CANDIDATES * 4,
        ),
        Need("CUDA context and work space", _RUNTIME_BYTES),
    ]


def check_memory(needs: list[Need], device: torch.device) -> None:
    """DeviceError with the whole list if it does not fit into what is free on ``device``."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    total = sum(need.num_bytes for need in needs)
    if total > free:
        raise DeviceError(f"{device} has {free / _GIB:.1f} GiB free; {describe(needs)}")


def describe(needs: list[Need]) -> str:
    """One line: the total, the buffers from the largest on, and what to do."""
    total = sum(need.num_bytes for need in needs)
    ordered = sorted(needs, key=lambda need: -need.num_bytes)
    parts = ", ".join(f"{need.what} {need.num_bytes / _GIB:.2f}" for need in ordered)
    return (
        f"the engine needs {total / _GIB:.1f} GiB ({parts}); lower max_batch_size, max_seq_len or "
        "num_speculative_tokens"
    )
