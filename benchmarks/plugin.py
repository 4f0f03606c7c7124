"""The TensorRT plugins on one GPU, without TensorRT: correct under graph replay, and what they cost.

Objective: figures for ``enqueue`` of both forms with real device pointers, and for the control block under
replay. Invariants: every form is compared with the definition before it is timed; executions are captured
in CUDA graphs; logits rotate over more than 200 MB; times are medians of replays.

    python benchmarks/plugin.py --output benchmarks/results/plugin_h200.json
    python benchmarks/plugin.py --quick          # a few cases, for compute-sanitizer

``--core`` is a library from ``plugin_build.build_core``; ``--driver`` and ``--plugin`` are the adapter and the
library that drives it (tests/plugins/adapter_driver.cpp). Without them only the Python form runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels import environment, graph_us, rotating
from benchmarks.plugin_forms import (
    Form,
    adapter_form,
    check_control_block,
    check_form,
    check_levels,
    check_trims,
    core_form,
    python_form,
)
from tests.plugins import plugin_checks, tree_cases
from trtllm_av.plugins import cuda_ops, torch_ops
from trtllm_av.plugins.control_block import ControlBlock, process_block

assert cuda_ops.IMPLEMENTATIONS  # registered by the import

ROTATION_BYTES = 208_000_000
SCORE_SHAPES = ((1, 7, 129280), (8, 7, 129280), (64, 1, 129280), (64, 7, 129280), (256, 7, 129280))
TRIM_SHAPES = ((64, 7), (512, 8))
#: R, drafts, levels, children of a node at most: two chains, then trees.
TREES = ((64, 5, 5, 1), (512, 5, 5, 1), (64, 63, 4, 4), (512, 63, 4, 4), (512, 256, 5, 4))
LEVELS = ((1, 32000, 1), (64, 32000, 1), (64, 128256, 1), (64, 32000, 4))


def rotated(
    make: Callable[[], list[Tensor]], name: str, fields: dict[str, float], form: Form
) -> float:
    """Microseconds of one execution over enough sets of inputs that none finds its own in the cache."""
    sets = [make()]
    num_bytes = sum(tensor.nbytes for tensor in sets[0])
    sets += [make() for _ in range(min(15, ROTATION_BYTES // max(num_bytes, 1)))]
    layers = [form(name, fields, s, plugin_checks.empty_outputs(name, s)) for s in sets]
    return round(graph_us(rotating([partial(on_current_stream, layer) for layer in layers])), 3)


def operator_form(
    name: str, fields: dict[str, float], inputs: list[Tensor], outputs: list[Tensor]
) -> Callable[[int], None]:
    """``ScoreDrafts`` as the torch operator on the same kernel, on torch's current stream."""
    *given, draft_lens = inputs
    vocab_size = int(fields["vocab_size"])
    return lambda stream: torch_ops.score_drafts(
        *given, vocab_size=vocab_size, draft_lens=draft_lens
    )


def on_current_stream(enqueue: Callable[[int], None]) -> None:
    enqueue(torch.cuda.current_stream().cuda_stream)


def score_set(rows: int, columns: int, width: int) -> list[Tensor]:
    logits = torch.empty(rows, columns, width, dtype=torch.bfloat16, device="cuda").normal_(0, 3)
    return [
        logits,
        torch.ones(rows, device="cuda"),
        torch.tensor([0.5] + [-0.2] * columns, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.full((rows,), columns, dtype=torch.int32, device="cuda"),
    ]


def level_set(rows: int, width: int, children: int) -> list[Tensor]:
    """Inputs of ``ScoreLevel`` for the root's level: ``children`` drafts of each request."""
    tree = tree_cases.paths_of([-1] + [0] * children, children, 1)
    logits = torch.empty(rows, width, dtype=torch.float16, device="cuda").normal_(0, 3)
    return [
        logits,
        torch.tensor(rows, dtype=torch.int32, device="cuda"),
        torch.from_numpy(np.stack([tree] * rows)).cuda(),
        torch.full((rows,), children, dtype=torch.int32, device="cuda"),
    ]


def measure(forms: dict[str, Form]) -> list[dict[str, Any]]:
    """Times of every plugin in every form; of ScoreDrafts also the torch operator's, on the same kernel."""
    block = process_block()
    table: list[dict[str, Any]] = []

    def add(
        name: str, make: Callable[[], list[Tensor]], fields: dict[str, float], **shape: int
    ) -> None:
        with_operator = {"torch operator": operator_form} if name == "ScoreDrafts" else {}
        kinds = {**forms, **with_operator}
        times = {kind: rotated(make, name, fields, form) for kind, form in kinds.items()}
        table.append({"plugin": name, **shape, "us": times})
        torch.cuda.empty_cache()

    for rows, columns, width in SCORE_SHAPES:
        add(
            "ScoreDrafts",
            lambda r=rows, p=columns, v=width: score_set(r, p, v),
            {"vocab_size": width},
            R=rows,
            P=columns,
            V=width,
        )
    for rows, positions in TRIM_SHAPES:
        add(
            "TrimDrafts",
            lambda r=rows, k=positions: plugin_checks.trim_inputs(2, r, k),
            {},
            R=rows,
            K=positions,
        )
    for rows, width, children in LEVELS:
        fields = {"level": 0.0, "vocab_size": width, "max_non_leaves": 1.0}
        add(
            "ScoreLevel",
            lambda r=rows, v=width, c=children: level_set(r, v, c),
            fields,
            R=rows,
            V=width,
            children=children,
        )
    for rows, drafts, levels, children in TREES:
        block.write(
            budget=rows * drafts // 2,
            coefficients=[0.8] + [-0.2] * levels,
            round=block.progress().round,
        )
        add(
            "TrimTree",
            lambda t=(rows, drafts, levels, children): plugin_checks.tree_inputs(*t),
            {},
            R=rows,
            K=drafts,
            levels=levels,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--core", type=Path, help="library of the C++ core")
    parser.add_argument("--driver", type=Path, help="library that drives the adapter")
    parser.add_argument("--plugin", type=Path, help="plugin library")
    parser.add_argument("--quick", action="store_true", help="a few checks, no times")
    parser.add_argument("--replays", type=int, default=10_000, help="of the control block's check")
    args = parser.parse_args()
    name = f"trtllm_av_{os.getpid()}"
    block = ControlBlock.shared(name, create=True)
    os.environ["TRTLLM_AV_CONTROL_BLOCK"] = name
    forms: dict[str, Form] = {"python": python_form}
    if args.core is not None:
        forms["core"] = core_form(args.core)
    if args.driver is not None and args.plugin is not None:
        forms["adapter"] = adapter_form(args.driver, args.plugin)
    parts: dict[str, Callable[[], Any]] = {
        f"check_{kind}": lambda form=form: check_form(form, args.quick)
        for kind, form in forms.items()
    }
    parts["trim_trees"] = lambda: check_trims(args.quick)
    parts["score_levels"] = lambda: check_levels(args.quick)
    if not args.quick:
        parts["control_block"] = lambda: check_control_block(name, args.replays)
        parts["times"] = lambda: measure(forms)
    report: dict[str, Any] = {**environment(), "date": datetime.date.today().isoformat()}
    failed = False
    try:
        for part, run in parts.items():
            began = time.perf_counter()
            try:
                report[part] = run()
            except Exception:
                failed = True
                report[part] = traceback.format_exc()
            print(f"{part} ({time.perf_counter() - began:.1f} s): {report[part]}", flush=True)
    finally:
        block.unlink()
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
