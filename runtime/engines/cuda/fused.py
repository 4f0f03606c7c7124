"""What lies between a decoder's matrix products, each as one operation.

Objective: a decode step of a small model is bound by the number of kernels, so norms, rotation, cache
writes and activations are one kernel each. Invariants: arithmetic in float32, results rounded once to the
tensors' type; no synchronisation, static shapes. On CUDA the kernels of ``fused_triton`` run; the plain
torch forms here define what they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.plugins import attention
from trtllm_av.runtime.models.rope import rotate, rotation


def rotation_table(max_len: int, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), each [max_len, D] of ``dtype``, for ``rotate_and_store``."""
    positions = torch.arange(max_len, device=frequencies.device)
    cos, signed_sin = rotation(positions, frequencies, dtype)
    return cos[:, 0].contiguous(), signed_sin[:, 0].contiguous()


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, its root-mean-square norm times ``weight``), [T, H] each; ``delta`` None adds nothing."""
    if x.is_cuda:
        from trtllm_av.runtime.engines.cuda import fused_triton

        return fused_triton.add_rms_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    return total, F.rms_norm(total, (total.shape[1],), weight, eps)


def join_norms(
    token_ids: Tensor, embedding: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """[T, 2·H]: the norm of each token's embedding beside that of ``hidden`` [T, H].

    ``embedding`` [V, H]; ``weights`` [H] of the two norms, in that order.
    """
    if hidden.is_cuda:
        from trtllm_av.runtime.engines.cuda import fused_triton

        return fused_triton.join_norms(token_ids, embedding, hidden, weights, eps)
    width = (hidden.shape[1],)
    embedded = F.rms_norm(F.embedding(token_ids, embedding), width, weights[0], eps)
    return torch.cat((embedded, F.rms_norm(hidden, width, weights[1], eps)), -1)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of ``gate_up`` [T, 2·I], gates first; [T, I]."""
    if gate_up.is_cuda:
        from trtllm_av.runtime.engines.cuda import fused_triton

        return fused_triton.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotate_and_store(
    qkv: Tensor,
    table: tuple[Tensor, Tensor],
    positions: Tensor,
    write_offsets: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Rotated queries [T, H, D]; rotated keys and the values go into the cache.

    Args:
        qkv: [T, (H + 2·Hk)·D], queries first.
        table: of ``rotation_table``.
        positions: [T] int64.
        write_offsets: [T] int64, slot · L + position.
        keys, values: [S, Hk, L, D], one layer of the cache.
    """
    if qkv.is_cuda:
        from trtllm_av.runtime.engines.cuda import fused_triton

        return fused_triton.rotate_and_store(qkv, table, positions, write_offsets, keys, values)
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * kv_heads
    cos, signed_sin = (part[positions][:, None] for part in table)
    rotated = rotate(heads[:, : num_heads + kv_heads], cos, signed_sin)
    attention.write_kv(
        rotated[:, num_heads:], heads[:, num_heads + kv_heads :], keys, values, write_offsets
    )
    return rotated[:, :num_heads].contiguous()
