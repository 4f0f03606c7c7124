"""Attention kernels on CUDA against the plain torch form in float64. Needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trtllm_av.plugins import attention
from trtllm_av.runtime.errors import UsageError

pytestmark = pytest.mark.cuda

#: ‖out − reference‖ / ‖reference‖ that a type may reach.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@dataclass(slots=True)
class Case:
    """Arguments of ``attend`` on the GPU; what lies behind a row's length in the cache is NaN."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor
    max_length: int

    def run(self) -> Tensor:
        """The result in an output full of 7, the tail's included."""
        out = torch.full_like(self.queries, 7.0)
        return attention.attend(
            self.queries,
            self.keys,
            self.values,
            self.slots,
            self.kv_lens,
            self.cu_seqlens,
            self.max_length,
            out,
        )

    def expected(self) -> Tensor:
        """The same in float64 by plain torch operations."""
        out = torch.full_like(self.queries, 7.0, dtype=torch.float64)
        cache = (x.double().nan_to_num(0.0) for x in (self.keys, self.values))
        return attention.attend_torch(
            self.queries.double(),
            *cache,
            self.slots,
            self.kv_lens,
            self.cu_seqlens,
            self.max_length,
            out,
        )

    def fill(self, lengths: Tensor, kv_lens: Tensor, generator: torch.Generator) -> None:
        """New lengths, cache and queries in place."""
        for x in (self.queries, self.keys, self.values):
            x.normal_(generator=generator)
        self.slots.copy_(torch.randperm(self.keys.shape[0])[: len(self.slots)])
        self.kv_lens.copy_(kv_lens)
        self.cu_seqlens[1:] = lengths.cumsum(0)
        for slot, end in zip(self.slots.tolist(), (kv_lens + lengths).tolist(), strict=True):
            self.keys[slot, :, end:] = torch.nan
            self.values[slot, :, end:] = torch.nan


def make_case(
    dtype: torch.dtype,
    num_rows: int,
    heads: tuple[int, int, int],
    max_length: int,
    reach: int,
    seed: int = 0,
) -> Case:
    """Random rows: ``heads`` are query heads, KV heads and head size; some rows have no queries."""
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    lengths = torch.randint(0, max_length + 1, (num_rows,))
    lengths[-1] = max_length
    kv_lens = (torch.rand(num_rows) * (reach - lengths + 1)).long()
    kv_lens[0] = 0
    num_tokens = int(lengths.sum()) + 5
    shape = (num_rows + 2, num_kv_heads, reach, head_dim)
    # Queries as a model has them: a part of each row of a wider projection.
    wide = torch.empty(
        num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device="cuda"
    )
    case = Case(
        wide[:, :num_heads],
        torch.empty(shape, dtype=dtype, device="cuda"),
        torch.empty(shape, dtype=dtype, device="cuda"),
        torch.zeros(num_rows, dtype=torch.long, device="cuda"),
        torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
        torch.zeros(num_rows + 1, dtype=torch.int32, device="cuda"),
        max_length,
    )
    case.fill(lengths, kv_lens, generator)
    return case


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert not result.isnan().any()
    error = (result.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[result.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize(
    ("dtype", "num_rows", "heads", "max_length", "reach"),
    [
        (torch.bfloat16, 64, (9, 3, 64), 8, 512),
        (torch.bfloat16, 300, (9, 3, 64), 1, 160),
        (torch.bfloat16, 16, (32, 8, 128), 8, 1024),  # rows share their keys among programs
        (torch.bfloat16, 3, (32, 8, 128), 200, 640),  # a prefill: many tiles of queries
        (torch.bfloat16, 40, (9, 3, 64), 30, 300),  # short rows beside others of two tiles
        (torch.bfloat16, 9, (32, 1, 64), 3, 200),  # one query has more heads than a short tile rows
        (torch.bfloat16, 5, (8, 8, 80), 5, 77),  # no groups, an odd head size, an odd cache
        (torch.float16, 1, (9, 3, 64), 8, 4096),
        (torch.float32, 33, (9, 3, 64), 8, 300),
        (torch.float32, 2, (9, 3, 64), 70, 300),
        (torch.float32, 7, (8, 2, 128), 4, 200),
        (torch.float32, 4, (4, 2, 8), 3, 40),
    ],
)
def test_results_are_those_of_plain_torch(
    dtype: torch.dtype, num_rows: int, heads: tuple[int, int, int], max_length: int, reach: int
) -> None:
    """Guards against wrong heads, masks, tiles and splits, and against NaN from behind a row's end."""
    case = make_case(dtype, num_rows, heads, max_length, reach)
    result = case.run()
    assert_close(result, case.expected())
    assert (result[int(case.cu_seqlens[-1]) :] == 7.0).all()
    assert torch.equal(result, case.run())


@pytest.mark.parametrize("num_rows", [4, 64])
def test_one_graph_serves_any_lengths(num_rows: int) -> None:
    """Guards against lengths, slots or a grid that a captured graph has frozen, and against a stall."""
    case = make_case(torch.bfloat16, num_rows, (9, 3, 64), 8, 512)
    out = case.run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            result = case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    generator = torch.Generator("cuda").manual_seed(9)
    total = case.queries.shape[0]
    for _ in range(3):
        lengths = torch.randint(0, min(8, total // num_rows) + 1, (num_rows,))
        kv_lens = torch.randint(0, 504, (num_rows,))
        case.fill(lengths, kv_lens, generator)
        graph.replay()
        assert_close(result, case.expected())
    assert out.shape == result.shape


def test_writes_are_those_of_plain_torch() -> None:
    """Guards against keys written to another head, position or slot."""
    torch.manual_seed(2)
    wide = torch.randn(50, 7, 64, device="cuda")
    cache = torch.zeros(2, 9, 3, 40, 64, device="cuda")
    expected = cache.clone()
    offsets = torch.randperm(9 * 40)[:50].cuda()
    attention.write_kv(wide[:, 1:4], wide[:, 4:], *cache, offsets)
    attention.write_kv_torch(wide[:, 1:4], wide[:, 4:], *expected, offsets)
    assert torch.equal(cache, expected)


def test_what_would_be_misread_is_refused() -> None:
    """Guards against a cache of another type, read as bits of the wrong length."""
    case = make_case(torch.bfloat16, 2, (9, 3, 64), 2, 64)
    case.keys, case.values = case.keys.float(), case.values.float()
    with pytest.raises(UsageError, match="float32"):
        case.run()
