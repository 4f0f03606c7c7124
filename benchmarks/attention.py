"""Speed of the attention kernel: microseconds a layer, as replays of CUDA graphs on one GPU.

Objective: a verify pass's attention against the floor of reading the live keys and values once, beside
torch's own kernels, so that the choice is stated. Invariants: caches rotate over more than 200 MB, so
that no call finds its own in the cache; the read bandwidth that the floor refers to is measured in the
same run; times are medians of three graphs, with the least and the greatest beside them.

    python -m benchmarks.attention --output benchmarks/results/attention_h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics as stats
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernels import ROTATION_BYTES, environment, graph_us, read_bandwidth, rotating
from trtllm_av.plugins import attention

MAX_LENGTH = 8  # queries of a row: a token and up to seven drafts
RUNS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """R rows over a cache of S tokens each, rows filled evenly from nothing to all of it.

    ``target_us`` and ``target_ratio``: microseconds, and the multiple of the floor, to stay under.
    """

    R: int
    S: int
    H: int
    Hk: int
    D: int
    target_us: float | None = None
    target_ratio: float | None = None


SHAPES = (
    Shape(256, 512, 9, 3, 64, target_us=40.0),
    Shape(64, 512, 32, 8, 128, target_ratio=3.0),
    Shape(256, 512, 32, 8, 128, target_ratio=3.0),
    Shape(64, 4096, 32, 8, 128, target_ratio=3.0),
    Shape(256, 4096, 32, 8, 128, target_ratio=3.0),
    Shape(1, 512, 9, 3, 64),
    Shape(1, 4096, 32, 8, 128),
    Shape(8, 4096, 32, 8, 128),
)
#: FlexAttention compiles for each shape, so only two are measured.
FLEX_SHAPES = (SHAPES[0], SHAPES[3])


@dataclass(slots=True)
class Inputs:
    """Arguments of ``attend`` for one layer."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor
    out: Tensor


def make_inputs(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> list[Inputs]:
    """Layers enough to rotate; all with the same lengths."""
    lengths = torch.randint(1, MAX_LENGTH + 1, (shape.R,), device="cuda")
    kv_lens = (torch.rand(shape.R, device="cuda") * (shape.S - MAX_LENGTH)).int()
    if shape.R == 1:  # one row says nothing about an average: give it that
        lengths.fill_(MAX_LENGTH // 2)
        kv_lens.fill_(shape.S // 2)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    slots = torch.randperm(shape.R, device="cuda")
    layers = max(2, int(ROTATION_BYTES // live_bytes(shape, kv_lens, lengths)) + 1)
    layers = min(layers, 64)
    inputs = []
    for _ in range(layers):
        queries, *cache = (
            torch.empty(size, dtype=dtype, device="cuda").normal_()
            for size in (
                (int(cu_seqlens[-1]), shape.H, shape.D),
                (shape.R, shape.Hk, shape.S, shape.D),
                (shape.R, shape.Hk, shape.S, shape.D),
            )
        )
        out = torch.empty_like(queries)
        inputs.append(Inputs(queries, *cache, slots, kv_lens, cu_seqlens, out))
    return inputs


def live_bytes(shape: Shape, kv_lens: Tensor, lengths: Tensor, itemsize: int = 2) -> float:
    """Keys and values that one layer has to read."""
    return float((kv_lens + lengths).sum()) * shape.Hk * shape.D * 2 * itemsize


def attend(a: Inputs) -> Tensor:
    return attention.attend(
        a.queries, a.keys, a.values, a.slots, a.kv_lens, a.cu_seqlens, MAX_LENGTH, a.out
    )


def padded_queries(a: Inputs) -> Tensor:
    """[R, H, MAX_LENGTH, D] queries of rows padded with their neighbours' tokens."""
    columns = torch.arange(MAX_LENGTH, device="cuda")
    token = (a.cu_seqlens[:-1, None] + columns).clamp(max=len(a.queries) - 1)
    return a.queries[token].transpose(1, 2)


def sdpa_call(a: Inputs) -> Callable[[], Tensor]:
    """torch's attention over padded rows in the order of the cache, mask and padding prepared."""
    order = a.slots.argsort()
    queries = padded_queries(a)[order].contiguous()
    group = queries.shape[1] // a.keys.shape[1]
    folded = queries.view(len(queries), a.keys.shape[1], group * MAX_LENGTH, -1)
    last = (a.kv_lens[:, None] + torch.arange(MAX_LENGTH, device="cuda"))[order]
    is_visible = torch.arange(a.keys.shape[2], device="cuda") <= last[:, :, None]
    mask = is_visible.repeat(1, group, 1)[:, None]
    return partial(F.scaled_dot_product_attention, folded, a.keys, a.values, attn_mask=mask)


def flex_call(a: Inputs, compiled: Any) -> Callable[[], Tensor]:
    """torch's FlexAttention over padded rows, its block mask prepared."""
    order = a.slots.argsort()
    queries = padded_queries(a)[order].contiguous()
    kv_lens = a.kv_lens[order]

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= kv_lens[row] + query

    mask = create_block_mask(is_visible, len(kv_lens), None, MAX_LENGTH, a.keys.shape[2])
    return partial(compiled, queries, a.keys, a.values, block_mask=mask, enable_gqa=True)


def timed(calls: list[Callable[[], Any]]) -> list[float]:
    """Median, least and greatest microseconds a call over ``RUNS`` graphs."""
    times = [graph_us(rotating(calls)) for _ in range(RUNS)]
    return [stats.median(times), min(times), max(times)]


def measure(shape: Shape, bandwidth: float, compiled: Any) -> dict[str, Any]:
    """One row of the report."""
    torch.manual_seed(0)
    inputs = make_inputs(shape)
    lengths = inputs[0].cu_seqlens.diff()
    floor = live_bytes(shape, inputs[0].kv_lens, lengths) / bandwidth * 1e6
    us, least, greatest = timed([partial(attend, a) for a in inputs])
    sdpa = timed([sdpa_call(a) for a in inputs])
    flex = timed([flex_call(a, compiled) for a in inputs]) if compiled is not None else [None]
    return {
        "op": "attend",
        **asdict(shape),
        "dtype": "bfloat16",
        "us": us,
        "us_least": least,
        "us_greatest": greatest,
        "floor_us": floor,
        "ratio": us / floor,
        "sdpa_padded_us": sdpa[0],
        "flex_attention_us": flex[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    compiled = torch.compile(flex_attention, dynamic=False)
    bandwidth = read_bandwidth()
    rows = []
    print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s")
    for shape in SHAPES:
        row = measure(shape, bandwidth, compiled if shape in FLEX_SHAPES else None)
        torch.cuda.empty_cache()
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        print(" ".join(f"{k}={v}" for k, v in rows[-1].items() if v is not None), flush=True)
    if arguments.output is not None:
        report = {
            **environment(),
            "read_bandwidth_gb_s": round(bandwidth / 1e9, 1),
            "queries": f"1 to {MAX_LENGTH} a row, evenly; cached tokens 0 to S, evenly",
            "rows": rows,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
