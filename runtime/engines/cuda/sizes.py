"""The sizes that graphs are captured for.

Invariants: every size is reached by padding up; sizes are dense where a step's cost rises with its rows
and sparse where it does not, so that padding stays below a quarter (an eighth from 256 on).
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

_FINE_FROM = 256


@cache
def sizes_up_to(last: int) -> tuple[int, ...]:
    """1, 2, 3, … 8, 10, 12, …, 256, 288, …: the sizes below ``last``, and ``last``."""
    sizes = []
    size = 1
    while size < last:
        sizes.append(size)
        power = 1 << (size.bit_length() - 1)
        size += max(1, power // (8 if size >= _FINE_FROM else 4))
    return (*sizes, last)


@cache
def request_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, 6, 8, 12, 16, …: request counts are padded up to these, ``max_requests`` the last."""
    steps = {start << shift for shift in range(max_requests.bit_length()) for start in (1, 2, 3)}
    return tuple(
        sorted({step for step in steps if step < max_requests and step != 3} | {max_requests})
    )


def padded(size: int, sizes: tuple[int, ...]) -> int:
    """The first of ``sizes`` that holds ``size``; IndexError beyond the last."""
    return sizes[bisect_left(sizes, size)]
