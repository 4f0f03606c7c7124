"""The kernels of drafter training against their plain equals; on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from benchmarks.drafter_training.loss import Shares, distil_rows_plain

triton = pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from benchmarks.drafter_training import kernels  # noqa: E402 (decorated at import, as set above)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distil_rows(dtype: torch.dtype) -> None:
    """A gradient or overlap of the wrong target row, or of the padded columns."""
    batch, length, total, shift, width = 2, 3, 6, 2, 100
    draft = (2 * normal(batch * length, width, seed=1)).to(dtype)
    logits = (2 * normal(batch, total, width, seed=2)).to(dtype)
    log_total = logits.float().logsumexp(-1) + 0.3
    column = torch.tensor([-1, 0, 5, 99, 7, -1], device=DEVICE)
    weight = torch.rand(batch * length, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    log_p = (logits.float() - log_total[..., None])[:, shift : shift + length].flatten(0, 1)
    gradient, surprise, plain = distil_rows_plain(draft, log_p, column, weight, Shares(0.7, 0.6))
    expected = (gradient, surprise, plain.overlap, plain.ratio, plain.log_top, plain.spread)
    entropy, *figures = (torch.empty_like(weight) for _ in range(5))
    kernels.distil_rows[(batch * length,)](
        draft, logits, log_total, column, weight, entropy, *figures,
        length, total, shift, width, 0.7, 0.6, BLOCK=128,
    )  # fmt: skip
    for mine, theirs in zip((draft.float(), entropy, *figures), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-3, rtol=1e-2)


@pytest.mark.parametrize("position", [0, 63, 64, 150])
def test_decode_attention(position: int) -> None:
    """Keys beyond the live length, or a cache written at another position, at block boundaries."""
    batch, heads, kv_heads, dim, capacity = 3, 6, 2, 16, 200
    keys, values = (normal(batch, kv_heads, capacity, dim, seed=s) for s in (1, 2))
    qkv, table = normal(batch, (heads + 2 * kv_heads) * dim), normal(capacity, 2, dim // 2, seed=4)
    parts, (cos, sin) = qkv.view(batch, -1, dim), table[position]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    all_keys, all_values = keys.clone(), values.clone()
    all_keys[:, :, position] = rotated(parts[:, heads : heads + kv_heads])
    all_values[:, :, position] = parts[:, heads + kv_heads :]
    expected = torch.nn.functional.scaled_dot_product_attention(
        rotated(parts[:, :heads]).view(batch, kv_heads, -1, dim),
        all_keys[:, :, : position + 1],
        all_values[:, :, : position + 1],
    )
    q = torch.empty(batch, heads * dim, device=DEVICE)
    out, at = torch.empty_like(q), torch.tensor([position], device=DEVICE)
    kernels.rotate_and_store[(batch,)](
        qkv, table, at, q, keys, values, capacity,
        NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=16,
    )  # fmt: skip
    kernels.decode_attention[(batch * kv_heads,)](
        q, keys, values, out, at, capacity, dim**-0.5, GROUP=3, D=dim, BLOCK=64
    )
    torch.testing.assert_close(keys, all_keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, all_values, atol=0, rtol=0)
    torch.testing.assert_close(out, expected.reshape(batch, -1), atol=3e-3, rtol=3e-3)


def test_gumbel_argmax_draws_from_the_softmax() -> None:
    """Text drawn at another temperature, or quarters of a block that share their random numbers."""
    rows, vocab_size = 400, 4196
    logits = torch.full((rows, vocab_size), -20.0, device=DEVICE)
    support = [
        5,
        1029,
        2053,
        4190,
    ]  # one lane of three quarters, and the stretch behind a whole block
    logits[:, support] = torch.tensor([2.0, 1.0, 0.0, 1.0], device=DEVICE)
    scale = torch.ones(rows, device=DEVICE)
    scale[rows // 2 :] = 2.0
    out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    seed = torch.tensor([3], device=DEVICE)
    kernels.gumbel_argmax[(rows,)](logits, scale, seed, out, vocab_size, BLOCK=1024)
    for part, factor in ((out[: rows // 2], 1.0), (out[rows // 2 :], 2.0)):
        expected = (torch.tensor([2.0, 1.0, 0.0, 1.0]) * factor).softmax(-1)
        share = torch.tensor([(part == token).float().mean() for token in support])
        # 200 draws: a standard deviation of at most .035
        torch.testing.assert_close(share, expected, atol=0.11, rtol=0)
