"""Trim and pack on the CPU: the implementations behind the operators of that name for host tensors.

Objective: tens of microseconds at R = 64, K = 7, where one torch call costs more than its arithmetic, so
the work is NumPy on the tensors' own memory, by ufuncs rather than the slower convenience functions.
Invariants: O(R·K) memory; bit-equal to ``reference``.

Slots are kept position-major, [K, R]: its flat order is (position, request), the tie order, and the
survival product is K multiplications of whole rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_av.plugins.reference import check_pack

#: The least normal number of a float type: asking ``finfo`` in every round costs as much as the comparison.
_TINY = {np.dtype(kind): np.finfo(kind).tiny for kind in (np.float16, np.float32, np.float64)}


def trim_drafts(
    confidence: Tensor,
    draft_lens: Tensor,
    base_lens: Tensor,
    min_verify_lens: Tensor,
    draft_budget: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.trim_drafts``; survival [R, K], verify_lens [R] and cu_seqlens [R + 1] int32."""
    num_rows, num_positions = confidence.shape
    base = base_lens.numpy()
    lens = np.minimum(np.maximum(draft_lens.numpy(), 0), num_positions)
    lens *= base > 0
    floors = np.minimum(np.maximum(min_verify_lens.numpy(), 0), lens)
    positions = np.arange(num_positions, dtype=np.int32)[:, None]
    is_valid = positions < lens

    survival = _survival(confidence.numpy(), is_valid)
    num_floor = int(np.add.reduce(floors))
    num_free = np.count_nonzero(is_valid) - num_floor
    num_admitted = min(max(int(draft_budget) - num_floor, 0), num_free)
    if num_admitted == num_free:
        verify_lens = lens
    elif num_admitted == 0:
        verify_lens = floors
    else:
        is_candidate = is_valid if num_floor == 0 else is_valid & (positions >= floors)
        verify_lens = floors + _count_top(np.where(is_candidate, survival, -1), num_admitted)

    cu_seqlens = np.zeros(num_rows + 1, np.int32)
    np.add.accumulate(base + verify_lens, out=cu_seqlens[1:])
    return (
        torch.from_numpy(survival.T.copy()),
        torch.from_numpy(verify_lens),
        torch.from_numpy(cu_seqlens),
    )


def _survival(confidence: NDArray[Any], is_valid: NDArray[np.bool_]) -> NDArray[Any]:
    """Left-to-right products [K, R] of confidence [R, K].

    Denormals are dropped once, at the end: with factors in [0, 1] what follows one is smaller still.
    """
    survival = np.empty(is_valid.shape, confidence.dtype)
    np.fmax(confidence.T, 0, out=survival)  # fmax drops NaN
    np.minimum(survival, 1, out=survival)
    survival *= is_valid
    for before, at in pairwise(survival):
        at *= before
    np.copyto(survival, 0, where=survival < _TINY[survival.dtype])  # −0 as well
    return survival


def _count_top(survival: NDArray[Any], count: int) -> NDArray[np.int32]:
    """How many of the first ``count`` slots of the total order lie in each column of [K, R]."""
    slots = survival.ravel()
    ascending = slots.copy()
    ascending.partition(slots.size - count)
    threshold = ascending[slots.size - count]
    is_admitted = survival > threshold
    num_above = np.count_nonzero(is_admitted)
    ties = (slots == threshold).nonzero()[0]
    is_admitted.ravel()[ties[: count - num_above]] = True
    counts: NDArray[np.int32] = np.add.reduce(is_admitted, axis=0, dtype=np.int32)
    return counts


def pack_drafts(base_lens: Tensor, verify_lens: Tensor, *, stride: int, capacity: int) -> Tensor:
    """As ``reference.pack_drafts``; pack_index [capacity] int32."""
    lens = base_lens.numpy() + verify_lens.numpy()
    ends = np.add.accumulate(lens)
    total = int(ends[-1]) if ends.size else 0
    check_pack(int(lens.max(initial=0)), total, stride, capacity)
    pack_index = np.full(capacity, -1, np.int32)
    # The first packed row of request r stands at ends − lens and reads slot r·stride.
    shifts = np.arange(lens.size) * stride - (ends - lens)
    pack_index[:total] = shifts.repeat(lens) + np.arange(total)
    return torch.from_numpy(pack_index)
