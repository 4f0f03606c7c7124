"""The TensorRT plugins in each of their forms, compared with their definitions under graph replay.

Invariants: an execution is captured once and replayed with inputs that change; a control block that
another process writes without pause is checked row by row, from a log that the graph itself keeps.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.plugins import fake_tensorrt, plugin_checks
from tests.plugins.csrc_library import Adapter, Core
from trtllm_av.plugins import tensorrt_plugin
from trtllm_av.plugins.control_block import (
    HEADER_WORDS,
    MAX_COEFFICIENTS,
    ControlBlock,
    process_block,
)

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SNAPSHOT_WORDS = HEADER_WORDS + MAX_COEFFICIENTS
#: Offset between a budget and the round it names, so that both show which write they are from.
BUDGET_OFFSET = 5

Form = Callable[[str, dict[str, float], list[Tensor], list[Tensor]], Callable[[int], None]]


def python_form(
    name: str, fields: dict[str, float], inputs: list[Tensor], outputs: list[Tensor]
) -> Callable[[int], None]:
    """The Python plugin object as an engine holds it."""
    (creator,) = (c for c in tensorrt_plugin.creators(fake_tensorrt) if c.name == name)
    kinds = {field.name: field.type for field in creator.field_names}
    given = [
        fake_tensorrt.PluginField(key, np.array([value]), kinds[key])
        for key, value in fields.items()
    ]
    plugin = creator.create_plugin(
        "layer", fake_tensorrt.PluginFieldCollection(given), fake_tensorrt.TensorRTPhase.RUNTIME
    )
    return fake_tensorrt.Layer(plugin, inputs, outputs).enqueue


def core_form(path: Path) -> Form:
    """The C++ core through its C entry points."""
    core = Core(path)

    def make(
        name: str, fields: dict[str, float], inputs: list[Tensor], outputs: list[Tensor]
    ) -> Callable[[int], None]:
        mailboxes = core.prepare(name)
        size = core.workspace_bytes(name, [tuple(tensor.shape) for tensor in inputs])
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")
        sources, results = plugin_checks.bindings(inputs), plugin_checks.bindings(outputs)

        def enqueue(stream: int) -> None:
            core.enqueue(
                name,
                fields,
                sources,
                results,
                workspace=workspace.data_ptr(),
                mailboxes=mailboxes,
                stream=stream,
            )

        return enqueue

    return make


def adapter_form(driver: Path, plugin: Path) -> Form:
    """The C++ ``IPluginV3`` through TensorRT's interfaces."""
    adapter = Adapter(driver, plugin)

    def make(
        name: str, fields: dict[str, float], inputs: list[Tensor], outputs: list[Tensor]
    ) -> Callable[[int], None]:
        sources, results = plugin_checks.bindings(inputs), plugin_checks.bindings(outputs)
        attached = adapter.attach(adapter.create(name, fields))
        size = adapter.configure(attached, sources, results)
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")

        def enqueue(stream: int) -> None:
            adapter.enqueue(
                attached, sources, results, workspace=workspace.data_ptr(), stream=stream
            )

        return enqueue

    return make


def check_form(form: Form, quick: bool) -> dict[str, Any]:
    """ScoreDrafts and TrimDrafts under replay with inputs that change, against the definitions."""
    worst, num_scores, num_trims = 0.0, 0, 0
    for seed, (dtype, masked) in enumerate((d, m) for d in DTYPES.values() for m in (False, True)):
        for rows, columns in ((3, 1),) if quick else ((1, 1), (3, 7), (70, 1)):
            make = [
                plugin_checks.score_inputs(
                    seed + 6 * turn, dtype, rows, columns, 5003, masked=masked
                )
                for turn in (0, 2)
            ]
            inputs, vocab_size = make[0]
            outputs = plugin_checks.empty_outputs("ScoreDrafts", inputs)
            enqueue = form("ScoreDrafts", {"vocab_size": vocab_size}, inputs, outputs)
            graph = plugin_checks.replay(enqueue)
            for given, _ in make:
                for tensor, value in zip(inputs, given, strict=True):
                    tensor.copy_(value)
                graph.replay()
                torch.cuda.synchronize()
                worst = max(worst, plugin_checks.check_scores(inputs, vocab_size, outputs))
                num_scores += 1
    for seed, (rows, positions) in enumerate(((4, 7),) if quick else ((1, 1), (64, 7), (300, 16))):
        inputs = plugin_checks.trim_inputs(seed, rows, positions)
        outputs = plugin_checks.empty_outputs("TrimDrafts", inputs)
        enqueue = form("TrimDrafts", {}, inputs, outputs)  # owns the workspace
        graph = plugin_checks.replay(enqueue)
        for turn in range(2 if quick else 20):
            given_now = plugin_checks.trim_inputs(seed + 10 * turn + turn % 2, rows, positions)
            for tensor, value in zip(inputs, given_now, strict=True):
                tensor.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            plugin_checks.check_trim(inputs, outputs)
            num_trims += 1
    return {"score_cases": num_scores, "worst_difference": worst, "trim_cases": num_trims}


def check_trims(quick: bool) -> dict[str, Any]:
    """TrimTree against NumPy; shapes from small to the largest that are accepted."""
    cases = [(s, 1 + s % 9, 1 + s % 37, 1 + s % 6) for s in range(6 if quick else 2100)]
    chains = [(5 * s, 1 + s % 70, 1 + s % 9, 1 + s % 9) for s in range(1 if quick else 60)]
    large = [(7001, 512, 256, 5), (7003, 512, 63, 4), (7010, 512, 16, 16), (7012, 300, 200, 32)]
    cases += chains + ([] if quick else large)
    run_all(plugin_checks.check_trim_tree, cases)
    return {"cases": len(cases)}


def check_levels(quick: bool) -> dict[str, Any]:
    """ScoreLevel against NumPy."""
    cases = [
        (seed, dtype, 1 + seed % 5, (130, 4099, 32003)[seed % 3])
        for dtype in DTYPES.values()
        for seed in range(2 if quick else 40)
    ]
    worst = max(run_all(plugin_checks.check_score_level, cases))
    return {"cases": len(cases), "worst_difference": worst}


def run_all(check: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``check`` of every case; AssertionError with the first failure and their number."""
    results, failures = [], []
    for case in cases:
        try:
            results.append(check(*case))
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases differ, the first: {failures[0]}"
    return results


def write_block(name: str, stop: Any, count: Any) -> None:
    """Another process: changes the block without pause, with rounds that have not run yet among its own."""
    block = ControlBlock.shared(name, create=False)
    ahead = 0
    while not stop.is_set():
        named = block.progress().round + ahead
        block.write(
            budget=named + BUDGET_OFFSET, coefficients=[named] * MAX_COEFFICIENTS, round=named
        )
        ahead = (ahead + 1) % 3
        count.value += 1


def check_control_block(name: str, num_replays: int) -> dict[str, Any]:
    """Replays while another process changes the block: what each replay used, from a log on the device.

    AssertionError if one used parts of two writes, or a write of its own round.
    """
    block = process_block()
    inputs = plugin_checks.tree_inputs(64, 5, 5, 1)
    outputs = plugin_checks.empty_outputs("TrimTree", inputs)
    (creator,) = (c for c in tensorrt_plugin.creators(fake_tensorrt) if c.name == "TrimTree")
    plugin = creator.create_plugin("layer", [], fake_tensorrt.TensorRTPhase.RUNTIME)
    layer = fake_tensorrt.Layer(plugin, inputs, outputs)
    log = torch.zeros(num_replays + 1, SNAPSHOT_WORDS, dtype=torch.int32, device="cuda")
    turn = torch.zeros(1, dtype=torch.int64, device="cuda")
    snapshot = layer.workspace[: SNAPSHOT_WORDS * 4].view(torch.int32)
    log.index_copy_(0, turn, snapshot[None])  # loads what the capture needs
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        layer.enqueue(stream.cuda_stream)
        log.index_copy_(0, turn, snapshot[None])
        turn += 1
    turn.zero_()
    context = multiprocessing.get_context("spawn")
    stop, count = context.Event(), context.Value("q", 0)
    writer = context.Process(target=write_block, args=(name, stop, count))
    writer.start()
    try:
        while count.value == 0 and writer.is_alive():
            time.sleep(0.01)
        first, began = count.value, time.perf_counter()
        for replay in range(num_replays):
            graph.replay()
            if replay % 8 == 7:  # the host is never far ahead, so that the writer sees rounds end
                torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        seconds, writes = time.perf_counter() - began, count.value - first
    finally:
        stop.set()
        writer.join(10)
    rows = log[:num_replays].cpu().numpy()
    rounds, versions, budgets = rows[:, 0], rows[:, 1], rows[:, 2]
    coefficients = np.ascontiguousarray(rows[:, HEADER_WORDS:]).view(np.float32)
    trims = versions != -1
    named = coefficients[:, 0].astype(np.int64)
    torn = (coefficients != coefficients[:, :1]).any(1) | (budgets != named + BUDGET_OFFSET)
    assert (np.diff(rounds) == 1).all()
    assert block.progress().round == rounds[-1]
    result = {
        "replays": num_replays,
        "writes_meanwhile": int(writes),
        "versions_used": int(np.unique(versions[trims]).size),
        "torn_reads": int((torn & trims).sum()),
        "used_in_own_round": int((named >= rounds)[trims].sum()),
        "verify_all": int((~trims).sum()),
        "us_a_replay": round(seconds / num_replays * 1e6, 2),
    }
    assert result["torn_reads"] == result["used_in_own_round"] == 0, result
    return result
