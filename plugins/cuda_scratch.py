"""Mailboxes: the words in which blocks of one launch that share a row send their partial results.

A kernel needs its mailboxes empty (0) and leaves them empty, so they are cleared once and never again.
Invariants: launches that can run at the same time never share mailboxes: eager launches share those of
their stream, which runs them one after another; a launch captured in a graph has its own for good,
because the graph may be replayed on any stream. After the first call nothing is allocated, except in
captures beyond the first ``_NUM_MAILBOXES``, which then clear their own in every replay.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from trtllm_av.runtime.errors import DeviceError

_NUM_MAILBOXES = 1 << 20
_PER_STREAM = 1 << 12


class _Mailboxes:
    """The mailboxes of one device."""

    def __init__(self, device: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "a kernel is used for the first time inside a graph capture; run its operator once before"
            )
        self._all = torch.zeros(_NUM_MAILBOXES, dtype=torch.int64, device=device)
        self._num_taken = 0
        self._of_stream: dict[int, Tensor] = {}
        torch.cuda.synchronize(device)  # other streams use them without waiting for this one

    def take(self, count: int, stream: int) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return self._cut(count)
        mailboxes = self._of_stream.get(stream)
        if mailboxes is None or mailboxes.numel() < count:
            mailboxes = self._of_stream[stream] = self._cut(max(count, _PER_STREAM))
        return mailboxes

    def _cut(self, count: int) -> Tensor:
        first = self._num_taken
        if first + count > _NUM_MAILBOXES:
            return torch.zeros(count, dtype=torch.int64, device=self._all.device)
        self._num_taken += count
        return self._all[first : first + count]


@functools.cache
def _mailboxes(device: int) -> _Mailboxes:
    return _Mailboxes(device)


def mailboxes(num_rows: int, num_blocks: int, device: int) -> Tensor | None:
    """Empty int64 mailboxes for one launch on the current stream, a word a block; None for one block a row."""
    of_device = _mailboxes(device)
    if num_blocks == 1:
        return None
    return of_device.take(num_rows * num_blocks, torch.cuda.current_stream(device).cuda_stream)
