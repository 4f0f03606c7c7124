"""Registers the CUDA implementations of ``torch.ops.trtllm_av.*``.

Importing needs neither a GPU nor cuda-python: both are asked for by the first call with CUDA tensors.
Arguments and results are those of the CPU implementations in float32 arithmetic. What cannot be seen
without reading the device is not checked; the implementations say what happens instead.

``law_features`` alone has no kernel: its torch calls run here as they do on the CPU.

Invariants: one launch an operator that has a kernel; no synchronisation; after an operator's first call nothing but its
results and O(R·K) scratch is allocated, from torch's caching allocator.
"""

from __future__ import annotations

import torch

from trtllm_av.plugins import cpu_score, cuda_score, cuda_training, cuda_trim

IMPLEMENTATIONS = (
    cuda_score.score_drafts,
    cuda_score.score_features,
    cpu_score.law_features,
    cuda_trim.trim_drafts,
    cuda_trim.pack_drafts,
    cuda_trim.trim_and_pack,
    cuda_training.label_drafts,
    cuda_training.accumulate_statistics,
    cuda_training.overlap_mass,
)

# Importing the implementations has defined the operators.
for _implementation in IMPLEMENTATIONS:
    torch.library.impl(f"trtllm_av::{_implementation.__name__}", "cuda")(_implementation)
