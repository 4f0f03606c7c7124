"""Speed of the CUDA kernels: microseconds an operator, as replays of CUDA graphs on one GPU.

Objective: the figures to reach on an H200, each with its target beside it, and the same work in plain
torch. Invariants: logits rotate over more than 200 MB, so that no call finds its own in the cache; the
small inputs of trim and statistics lie in the cache, as in a round whose score has just written them;
the read bandwidth that shares refer to is measured in the same run from 2 GB; times are medians.

    python benchmarks/kernels.py --output benchmarks/results/kernels_h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics as stats
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_av.plugins import cuda_ops, nvrtc, torch_ops, verify_pass

assert cuda_ops.IMPLEMENTATIONS  # registered by the import

#: R, K, V; microseconds of score and of trim and pack to stay under; of a round, its share of the public
#: reference's sum on the same card (score, allocation and accumulation), and that sum.
SHAPES = (
    (1, 7, 129280, 4.2, None, 0.65 * 21.6),
    (8, 7, 129280, 6.8, None, 0.65 * 27.0),
    (64, 7, 129280, 34.0, 6.0, 0.65 * 71.9),
    (256, 7, 129280, 115.0, None, 0.70 * 184.2),
    (512, 5, 49152, None, None, 0.70 * 124.4),
    (512, 8, 49152, None, 10.0, None),
)
#: Share of the read bandwidth that score has to reach, by the bytes it reads.
SHARES = ((400e6, 0.9), (100e6, 0.8))
Calls = Sequence[Callable[[], Any]]

ROTATION_BYTES = 208_000_000
MIN_CALLS = 16
REPLAYS = 25


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``torch_us``: the same work in plain torch operations, None if not measured."""

    op: str
    R: int
    K: int
    V: int
    dtype: str
    us: float
    target_us: float | None
    bandwidth_share: float | None = None
    target_share: float | None = None
    torch_us: float | None = None


def graph_us(calls: Calls) -> float:
    """Median microseconds of one call, from replays of a graph of all ``calls``."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(stats.median(times[3:]))


def read_bandwidth() -> float:
    """Bytes a second that a sum over 2 GB reads."""
    values = torch.empty(1 << 29, device="cuda").normal_()
    us = graph_us([lambda: torch.sum(values)] * 3)
    return values.nbytes / us * 1e6


def rotating(calls: Calls) -> list[Callable[[], Any]]:
    """``calls`` in turn, often enough that launch gaps at the ends do not count."""
    turns = -(-MIN_CALLS // len(calls))
    return list(calls) * turns


def make_round(rows: int, positions: int, vocab_size: int) -> dict[str, Tensor]:
    """What one round reads, on the GPU: three drafts in four within the budget."""

    def ints(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device="cuda")

    logits = torch.empty(rows, positions, vocab_size, dtype=torch.bfloat16, device="cuda")
    return {
        "logits": logits.normal_(0, 3),
        "temperature": torch.rand(rows, device="cuda") + 0.5,
        "coefficients": torch.tensor([0.5] + [-0.2] * positions, device="cuda"),
        "position": ints(0, 1),
        "draft_lens": ints(positions, rows),
        "base_lens": ints(1, rows),
        "min_verify_lens": ints(0, rows),
        "draft_budget": ints(max(1, rows * positions * 3 // 4), 1),
        "last_tokens": torch.randint(0, vocab_size, (rows,), device="cuda"),
        "draft_tokens": torch.randint(0, vocab_size, (rows, positions), device="cuda"),
        "kv_lens": torch.randint(0, 1000, (rows,), device="cuda"),
        "slots": torch.randperm(rows, device="cuda"),
        "trainable_lens": ints(positions, rows),
        "accepted_lens": torch.randint(0, positions + 1, (rows,), device="cuda").int(),
        "overlap": torch.rand(rows, device="cuda"),
        "confidence": torch.rand(rows, positions, device="cuda"),
        "features": torch.randn(rows, positions, 1, device="cuda"),
        "labels": torch.rand(rows, positions, device="cuda").round(),
    }


def score(a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch_ops.score_drafts(
        a["logits"],
        a["temperature"],
        a["coefficients"],
        a["position"],
        vocab_size=a["logits"].shape[2],
        draft_lens=a["draft_lens"],
    )
    return result


def trim_pack(a: dict[str, Tensor], confidence: Tensor) -> tuple[Tensor, ...]:
    rows, positions = confidence.shape
    names = ("draft_lens", "base_lens", "min_verify_lens", "draft_budget")
    gather = ("last_tokens", "draft_tokens", "kv_lens", "slots")
    result: tuple[Tensor, ...] = verify_pass.trim_and_pack(
        confidence,
        *(a[name] for name in names + gather),
        stride=positions + 1,
        capacity=rows * (positions + 1),
        slot_stride=4096,
        pad_offset=0,
    )
    return result


def label(a: dict[str, Tensor], verify_lens: Tensor) -> Tensor:
    result: Tensor = torch_ops.label_drafts(
        a["draft_lens"],
        verify_lens,
        a["accepted_lens"],
        a["trainable_lens"],
        a["overlap"],
        num_positions=a["confidence"].shape[1],
    )
    return result


def accumulate(a: dict[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
    result: Tensor = torch_ops.accumulate_statistics(features, labels, a["coefficients"])
    return result


def run_round(a: dict[str, Tensor]) -> Tensor:
    """Score, trim and pack, labels, statistics: four launches, each reading what the last one wrote."""
    features, confidence = score(a)
    verify_lens = trim_pack(a, confidence)[1]
    return accumulate(a, features, label(a, verify_lens))


def torch_score(a: dict[str, Tensor]) -> Tensor:
    scaled = a["logits"].float() / a["temperature"][:, None, None]
    top, index = scaled.max(-1, keepdim=True)
    feature = (top - scaled.scatter(-1, index, -torch.inf).logsumexp(-1, keepdim=True)).clamp(
        -15, 15
    )
    return torch.sigmoid(a["coefficients"][0] * feature[..., 0] + a["coefficients"][1:])


def torch_trim_pack(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
    rows, positions = a["confidence"].shape
    survival = a["confidence"].cumprod(1)
    order = survival.t().reshape(-1).argsort(stable=True, descending=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
    verify_lens = (rank < a["draft_budget"]).view(positions, rows).sum(0)
    ends = (a["base_lens"] + verify_lens).cumsum(0)
    packed = torch.arange(rows * (positions + 1), device="cuda")
    row = torch.searchsorted(ends, packed, right=True).clamp(max=rows - 1)
    offset = packed - (ends[row] - a["base_lens"][row] - verify_lens[row])
    tokens = torch.cat([a["last_tokens"][:, None], a["draft_tokens"]], 1)
    token_ids = tokens[row, offset.clamp(max=positions)]
    kv_positions = a["kv_lens"][row] + offset
    return verify_lens, token_ids, kv_positions, a["slots"][row] * 4096 + kv_positions


def torch_accumulate(a: dict[str, Tensor]) -> Tensor:
    f, y = a["features"][..., 0].double(), a["labels"].double()
    p = torch.sigmoid(a["coefficients"][0] * f + a["coefficients"][1:])
    w = (p * (1 - p)).clamp(min=0.125)
    terms = torch.stack([w * f * f, w * f, w, (y - p) * f, y - p, torch.ones_like(p)], -1)
    return torch.where(torch.isfinite(y)[..., None], terms, 0).sum(0)


def measure(shape: tuple[Any, ...], bandwidth: float) -> list[Row]:
    """All operators at one shape."""
    rows, positions, vocab_size, score_target, trim_target, round_target = shape
    at: Any = {"R": rows, "K": positions, "V": vocab_size}
    num_bytes = rows * positions * vocab_size * 2
    rounds = [make_round(*shape[:3]) for _ in range(ROTATION_BYTES // num_bytes + 2)]
    verify_lens = [trim_pack(a, a["confidence"])[1] for a in rounds]
    us = graph_us(rotating([partial(score, a) for a in rounds]))
    found = [
        Row(
            "score",
            **at,
            dtype="bfloat16",
            us=us,
            target_us=score_target,
            bandwidth_share=num_bytes / us * 1e6 / bandwidth,
            target_share=next((share for size, share in SHARES if num_bytes >= size), None),
            torch_us=graph_us([partial(torch_score, a) for a in rounds[:3]]),
        )
    ]
    small: list[tuple[str, float | None, Calls, Calls]] = [
        (
            "trim_pack",
            trim_target,
            [partial(trim_pack, a, a["confidence"]) for a in rounds],
            [partial(torch_trim_pack, a) for a in rounds],
        ),
        (
            "trim_pack_ties",
            trim_target,
            [partial(trim_pack, a, torch.ones_like(a["confidence"])) for a in rounds],
            [],
        ),
        (
            "labels",
            None,
            [partial(label, a, v) for a, v in zip(rounds, verify_lens, strict=True)],
            [],
        ),
        (
            "statistics",
            None,
            [partial(accumulate, a, a["features"], a["labels"]) for a in rounds],
            [partial(torch_accumulate, a) for a in rounds],
        ),
    ]
    for op, target, calls, plain in small:
        us = graph_us(rotating(calls))
        torch_us = graph_us(rotating(plain)) if plain else None
        found.append(Row(op, **at, dtype="float32", us=us, target_us=target, torch_us=torch_us))
    us = graph_us(rotating([partial(run_round, a) for a in rounds]))
    found.append(Row("round", **at, dtype="bfloat16", us=us, target_us=round_target))
    return found


def environment() -> dict[str, str]:
    """The card and the versions that the figures belong to."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "nvrtc": ".".join(map(str, nvrtc.compiler_version())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    bandwidth = read_bandwidth()
    rows = []
    for shape in SHAPES:
        rows += measure(shape, bandwidth)
        torch.cuda.empty_cache()
    if output is not None:
        report = {
            **environment(),
            "read_bandwidth_gb_s": round(bandwidth / 1e9, 1),
            "round": "score, trim_pack, labels and statistics as four launches of one graph",
            "rows": [
                {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
                for row in rows
            ],
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s")
    print(
        f"{'op':<15}{'R':>5}{'K':>3}{'V':>8}{'us':>8}{'target':>8}{'share':>7}{'target':>7}{'torch us':>10}"
    )
    for r in rows:
        cells = (r.us, r.target_us, r.bandwidth_share, r.target_share, r.torch_us)
        us, target, share, least, plain = ("-" if c is None else f"{c:.2f}" for c in cells)
        print(
            f"{r.op:<15}{r.R:>5}{r.K:>3}{r.V:>8}{us:>8}{target:>8}{share:>7}{least:>7}{plain:>10}"
        )


if __name__ == "__main__":
    main()
