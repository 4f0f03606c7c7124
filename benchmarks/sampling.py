"""Speed of drawing and judging on the device: microseconds an operation, as replays of CUDA graphs.

Objective: what random choices cost a round beside its passes: a draft step draws for R rows, a verify pass
judges up to K + 1 rows for each. Invariants: as in ``kernels``: logits rotate over more than 200 MB, and
the floor is one reading of them at the bandwidth that the same run has measured.

    python -m benchmarks.sampling --output benchmarks/results/sampling_h200.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import ROTATION_BYTES, environment, graph_us, read_bandwidth, rotating
from trtllm_av.plugins import sampling_ops, sampling_torch
from trtllm_av.plugins.sampling_ops import Laws

#: Rows and vocabulary: a draft step's, and a verify pass's of eight rows a request.
SHAPES = ((1, 49152), (8, 49152), (64, 49152), (256, 49152), (64, 129280), (256, 129280))
DEPTH = 7
MAX_COPIES = 32


@dataclass(slots=True)
class Inputs:
    """One round's laws: R · 8 rows of the target and R · 7 of the drafter."""

    target: Tensor
    drafts: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def laws(self) -> tuple[Laws, Laws]:
        """Target's and drafter's."""
        width = self.target.shape[1]
        return (
            sampling_ops.row_statistics(self.target, self.temperature, width),
            sampling_ops.row_statistics(self.drafts, self.temperature[: len(self.drafts)], width),
        )


def make_inputs(num_rows: int, vocab_size: int) -> list[Inputs]:
    def logits(count: int) -> Tensor:
        size = (count, vocab_size)
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, 3)

    verified = num_rows * (DEPTH + 1)
    copies = min(MAX_COPIES, ROTATION_BYTES // (num_rows * vocab_size * 2) + 2)
    copies = max(2, min(copies, int(8e9) // (verified * vocab_size * 2)))
    rest = (
        torch.full((verified,), 0.8, device="cuda"),
        torch.full((verified,), 50, dtype=torch.int64, device="cuda"),
        torch.full((verified,), 0.9, device="cuda"),
    )
    return [Inputs(logits(verified), logits(num_rows * DEPTH), *rest) for _ in range(copies)]


def judge(a: Inputs, laws: tuple[Laws, Laws], numbers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Accept, and draw what follows the accepted drafts."""
    verdict = sampling_ops.accept(
        laws[0],
        numbers["first"],
        laws[1],
        numbers["tokens"],
        numbers["lens"],
        numbers["lens"],
        numbers["uniforms"],
    )
    return sampling_ops.draw_next(*laws, verdict, numbers["uniforms"][:, 0].contiguous())


def torch_draw(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """Statistics and draw in plain torch."""
    laws = sampling_torch.row_statistics(logits, temperature, logits.shape[1])
    return sampling_torch.draw(laws, uniforms)


def measure(num_rows: int, vocab_size: int, bandwidth: float) -> list[dict[str, Any]]:
    """All operations at one shape."""
    torch.manual_seed(0)
    inputs = make_inputs(num_rows, vocab_size)
    laws = [a.laws() for a in inputs]
    rows = torch.arange(num_rows, device="cuda")
    columns = torch.arange(DEPTH, device="cuda")
    numbers = {
        "first": rows * (DEPTH + 1),
        "tokens": torch.randint(vocab_size, (num_rows, DEPTH), device="cuda"),
        "lens": torch.full((num_rows,), DEPTH, dtype=torch.int32, device="cuda"),
        "uniforms": torch.rand(num_rows, DEPTH, dtype=torch.float64, device="cuda"),
    }
    temperature, u = inputs[0].temperature[:num_rows], numbers["uniforms"][:, 0].contiguous()
    width = vocab_size
    one = [a.drafts[:num_rows] for a in inputs]
    steps = [sampling_ops.row_statistics(x, temperature, width) for x in one]
    cut = (inputs[0].top_k[:num_rows], inputs[0].top_p[:num_rows])
    # These logits are flat: their nucleus has thousands of tokens, the slow case of the search.
    nucleus = (torch.zeros_like(cut[0]), cut[1])
    read = num_rows * vocab_size * 2
    calls: list[tuple[str, int, list[Callable[[], Any]]]] = [
        (
            "row_statistics",
            read,
            [partial(sampling_ops.row_statistics, x, temperature, width) for x in one],
        ),
        ("draw", 0, [partial(sampling_ops.draw, x, u) for x in steps]),
        ("draw_torch", read, [partial(torch_draw, x, temperature, u) for x in one[:2]]),
        ("cut_thresholds", read, [partial(sampling_ops.cut_thresholds, x, *cut) for x in steps]),
        (
            "cut_flat_nucleus",
            read,
            [partial(sampling_ops.cut_thresholds, x, *nucleus) for x in steps],
        ),
        ("cut_torch", read, [partial(sampling_torch.cut_thresholds, x, *cut) for x in steps[:2]]),
        (
            "verify_statistics",
            read * (DEPTH + 1),
            [partial(sampling_ops.row_statistics, a.target, a.temperature, width) for a in inputs],
        ),
        (
            "accept_and_draw_next",
            2 * read,
            [partial(judge, a, x, numbers) for a, x in zip(inputs, laws, strict=True)],
        ),
        (
            "keyed_uniforms",
            0,
            [
                partial(
                    sampling_ops.keyed_uniforms,
                    rows[:, None],
                    rows[:, None],
                    rows[:, None],
                    columns,
                    1,
                )
            ],
        ),
    ]
    return [
        {
            "op": op,
            "R": num_rows,
            "V": vocab_size,
            "us": round(graph_us(rotating(timed)), 3),
            "floor_us": round(num_bytes / bandwidth * 1e6, 3),
        }
        for op, num_bytes, timed in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    bandwidth = read_bandwidth()
    rows = []
    for shape in SHAPES:
        measured = measure(*shape, bandwidth)
        torch.cuda.empty_cache()
        rows += measured
        print(
            *shape, " ".join(f"{r['op']}={r['us']}({r['floor_us']})" for r in measured), flush=True
        )
    if output is not None:
        report = {**environment(), "read_bandwidth_gb_s": round(bandwidth / 1e9, 1), "rows": rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
