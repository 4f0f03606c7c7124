"""Which GPU this process would run an engine on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """``compute_capability`` in two digits, as in 89 for 8.9."""

    name: str
    compute_capability: int


def current_gpu() -> Gpu | None:
    """The current CUDA device, None without one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Gpu(torch.cuda.get_device_name(), 10 * major + minor)
