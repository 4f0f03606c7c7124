"""Matrix products with weights laid out once for small batches.

Objective: a decode step multiplies a few rows by every weight of the model, so its speed is the speed
of reading weights. oneDNN's prepacked f32 layout reads them several times faster than a plain GEMM with
2…64 rows on many CPUs. Invariants: the same product as ``torch.nn.functional.linear`` to f32 rounding;
where the prepacked operator is missing (another device, dtype or torch build) the plain one is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

_Apply = Callable[[Tensor, Tensor, Tensor | None, str, list[float | None], str | None], Tensor]


@cache
def _prepacked_operators() -> tuple[Callable[[Tensor], Tensor], _Apply] | None:
    """oneDNN's (pack, apply), or None where this torch cannot run them."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        pack = torch.ops.mkldnn._reorder_linear_weight
        apply = torch.ops.mkldnn._linear_pointwise
        weight = torch.zeros(16, 16)
        apply(weight, pack(weight), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return pack, apply


class Linear:
    """y = x Wᵀ + b with W [out, in], b [out] or None; x [N, in] of the weight's dtype."""

    __slots__ = ("_apply", "_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        operators = _prepacked_operators()
        self._bias = bias
        self._apply: _Apply | None = None
        if operators is not None and weight.dtype == torch.float32 and weight.device.type == "cpu":
            pack, self._apply = operators
            self._weight = pack(weight)
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] → [N, out]."""
        if self._apply is None:
            return F.linear(x, self._weight, self._bias)
        return self._apply(x, self._weight, self._bias, "none", [], "")

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """W [out, in] in rows and b, for an executor that multiplies in its own way."""
        is_packed = self._apply is not None
        return self._weight.to_dense() if is_packed else self._weight, self._bias
