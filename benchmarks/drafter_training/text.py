"""The training text on the device, with everything of the target that training needs of it.

The target is frozen, so its hidden states and log-sums are computed once per run and kept; its logits
on the draft vocabulary are recomputed from the hidden states for each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decode import ChatMarks
from .target import FrozenTarget


@dataclass(slots=True)
class TrainingText:
    """``tokens`` [N, S] int32, ``hidden`` [N, S, H], ``log_total`` [N, S] float32 log-sum of all logits."""

    tokens: Tensor
    hidden: Tensor
    log_total: Tensor


def _log_total(hidden: Tensor, output_rows: Tensor) -> Tensor:
    return (hidden @ output_rows.T).float().logsumexp(-1)


@torch.no_grad()
def encode_text(target: FrozenTarget, tokens: Tensor, batch: int) -> TrainingText:
    """Run the target over ``tokens`` [N, S], ``batch`` sequences at a time; drops the last partial batch."""
    log_sum = torch.compile(_log_total) if target.device.type == "cuda" else _log_total
    count = max(len(tokens) // batch, 1) * batch
    tokens = tokens[:count].to(target.device)
    hidden = torch.empty(
        *tokens.shape, target.config.hidden_size, dtype=target.dtype, device=target.device
    )
    log_total = torch.empty(tokens.shape, device=target.device)
    for start in range(0, len(tokens), batch):
        rows = slice(start, start + batch)
        hidden[rows] = target.encode(tokens[rows])
        log_total[rows] = log_sum(hidden[rows], target.output_rows)
    return TrainingText(tokens, hidden, log_total)


def is_assistant(tokens: Tensor, marks: ChatMarks) -> Tensor:
    """[N, S] bool: tokens of the assistant's turns, the turn's closing mark included, its name not."""
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_start = tokens == marks.turn_start
    last_start = torch.where(is_start, position, -1).cummax(1).values
    speaker = (last_start + 1).clamp(max=tokens.shape[1] - 1)
    spoken = tokens.gather(1, speaker) == marks.assistant
    # Behind the mark stand the name and a line break, both given.
    inside = (last_start >= 0) & (position - last_start > marks.name_length + 1)
    closed = torch.where(tokens == marks.turn_end, position, -1).cummax(1).values
    is_open = (closed < last_start) | (closed == position)
    return spoken & inside & is_open


def drop_overlaps(tokens: Tensor, prompts: Sequence[Sequence[int]], window: int = 16) -> Tensor:
    """[N] bool: sequences that share no run of ``window`` tokens with any of ``prompts``."""
    generator = torch.Generator().manual_seed(window)
    factor = torch.randint(1, 2**62, (window,), generator=generator)

    def fingerprints(ids: Tensor) -> Tensor:
        # Wrapping int64 arithmetic: a random linear hash of every run.
        length = ids.shape[-1] - window + 1
        total = torch.zeros(*ids.shape[:-1], length, dtype=torch.int64, device=ids.device)
        for offset in range(window):
            total += ids[..., offset : offset + length].long() * int(factor[offset])
        return total

    known = [fingerprints(torch.tensor(p)) for p in prompts if len(p) >= window]
    if not known:
        return torch.ones(len(tokens), dtype=torch.bool)
    table = torch.cat(known).to(tokens.device)
    clean = [~torch.isin(fingerprints(part), table).any(1) for part in tokens.split(4096)]
    return torch.cat(clean)


def frequent_tokens(tokens: Tensor, weight: Tensor, count: int, vocab_size: int) -> Tensor:
    """[count] int64, ascending: the ids of largest total ``weight`` [N, S] in ``tokens`` [N, S]."""
    total = torch.zeros(vocab_size, dtype=torch.float64, device=tokens.device)
    for ids, share in zip(tokens.split(4096), weight.split(4096), strict=True):
        total += torch.bincount(ids.flatten().long(), share.flatten().double(), vocab_size)
    return total.topk(count).indices.sort().values
