"""Plugins on a GPU against their definitions; used by tests and by ``benchmarks/plugin.py``.

Each function raises AssertionError with what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.plugins.tree_cases import chain, random_tree, trim_case
from trtllm_av.plugins import plugin_core, plugin_runtime, reference, tree_reference
from trtllm_av.plugins.control_block import process_block
from trtllm_av.plugins.plugin_launch import Binding
from trtllm_av.plugins.plugin_runtime import DTYPES, binding_of

#: Enqueues one execution on a stream, given its address.
Enqueue = Callable[[int], None]
TRACE_MARKER = 16726.0


def bindings(tensors: Sequence[Tensor]) -> list[Binding]:
    return list(map(binding_of, tensors))


def empty_outputs(name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of the plugin ``name`` for ``inputs``, filled with bytes that no kernel writes."""
    spec = plugin_core.find_plugin(name)
    kinds = {kind: dtype for dtype, kind in DTYPES.items()}
    shapes = plugin_core.output_dims(spec, [tuple(tensor.shape) for tensor in inputs])
    return [
        torch.full(shape, 77, dtype=kinds[output.dtypes[0]], device="cuda")
        for output, shape in zip(spec.outputs, shapes, strict=True)
    ]


def replay(enqueue: Enqueue, times: int = 1) -> torch.cuda.CUDAGraph:
    """Capture one execution on a stream of its own and replay it ``times``; waits for the end."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        enqueue(stream.cuda_stream)
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def score_inputs(
    seed: int, dtype: torch.dtype, rows: int, columns: int, width: int, *, masked: bool
) -> tuple[list[Tensor], int]:
    """Inputs of ``ScoreDrafts`` and the real vocabulary; every fifth row is broken in its own way."""
    g = torch.Generator("cuda").manual_seed(seed)
    vocab_size = width - seed % 3
    logits = torch.randn(rows, columns, width, generator=g, device="cuda") * 3
    broken = (float("nan"), float("inf"))
    for row in range(0, rows, 5):
        logits[row, 0, seed % vocab_size] = broken[row % 2]
    inputs = [
        logits.to(dtype),
        torch.rand(rows, generator=g, device="cuda") * 2,
        torch.tensor([0.7] + [-0.3] * 9, device="cuda"),
        torch.tensor([seed % 2], dtype=torch.int32, device="cuda"),
        torch.randint(0, columns + 2, (rows,), generator=g, device="cuda").int(),
    ]
    if masked:
        inputs.append(torch.rand(rows, width, generator=g, device="cuda") > 0.5)
    return inputs, vocab_size


def check_scores(inputs: Sequence[Tensor], vocab_size: int, outputs: Sequence[Tensor]) -> float:
    """Greatest difference to the definition, which is within float32 of sums over the vocabulary."""
    arrays = [tensor.float().cpu().numpy() for tensor in inputs]
    features, confidence = reference.score_drafts(
        *arrays[:4],
        vocab_size=vocab_size,
        draft_lens=inputs[4].cpu().numpy(),
        allowed_mask=None if len(inputs) == 5 else inputs[5].cpu().numpy(),
        dtype=np.float64,
    )
    worst = 0.0
    for got, wanted in zip(outputs, (features, confidence), strict=True):
        difference = np.abs(got.double().cpu().numpy() - wanted).max()
        assert difference < 2e-4, difference
        worst = max(worst, float(difference))
    return worst


def trim_inputs(seed: int, rows: int, positions: int) -> list[Tensor]:
    """Inputs of ``TrimDrafts``."""
    g = np.random.default_rng(seed)
    arrays = (
        g.choice([np.nan, 1e-39, 0.5, 0.9, 1.0, 2.0], (rows, positions)).astype(np.float32)
        if seed % 2
        else g.random((rows, positions), np.float32),
        g.integers(-1, positions + 2, rows),
        g.choice([0, 1, 1, 1], rows),
        g.integers(0, 3, rows),
        g.integers(0, rows * positions + 2, 1),
    )
    return [
        torch.from_numpy(a if a.dtype == np.float32 else a.astype(np.int32)).cuda() for a in arrays
    ]


def check_trim(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Bit-equal to the definition, ``pack_index`` included."""
    arrays = [tensor.cpu().numpy() for tensor in inputs]
    survival, verify_lens, cu_seqlens = reference.trim_drafts(*arrays)
    stride = arrays[0].shape[1] + 1
    pack_index = reference.pack_drafts(
        arrays[2], verify_lens, stride=stride, capacity=arrays[0].shape[0] * stride
    )
    for got, wanted in zip(outputs, (survival, verify_lens, cu_seqlens, pack_index), strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), wanted)


def check_trim_tree(seed: int, rows: int, drafts: int, levels: int) -> None:
    """One case of ``TrimTree``: lengths bit-equal given its confidences, which are close, and the trace."""
    case = trim_case(seed, rows, drafts, levels)
    block = process_block()
    before = block.progress()
    version = block.write(
        budget=case["budget"],
        coefficients=case["coefficients"],
        floor=case["floor"],
        round=before.round,
    )
    g = np.random.default_rng(seed + 1)
    last = [g.integers(0, 9, rows).astype(np.int32) for _ in range(3)]
    named = ("features", "next_draft_lens", "paths")
    inputs = [torch.from_numpy(array).cuda() for array in (*(case[n] for n in named), *last)]
    (trimmed, trace), workspace = plugin_runtime.run(
        "TrimTree", *inputs, total_multiple=case["total_multiple"], min_draft_len=1
    )
    torch.cuda.synchronize()
    assert block.progress().round == before.round + 1
    assert block.progress().version == version
    confidence = snapshot_confidence(workspace, rows, drafts)
    close = tree_reference.node_confidence(case["features"], case["paths"], case["coefficients"])
    drafted = np.arange(drafts) < np.clip(case["next_draft_lens"], 0, drafts)[:, None]
    np.testing.assert_allclose(confidence, np.where(drafted, close, 0), rtol=2e-6, atol=1e-12)
    wanted = tree_reference.trim_tree(
        confidence,
        case["next_draft_lens"],
        case["paths"],
        budget=case["budget"],
        floor=case["floor"],
        total_multiple=case["total_multiple"],
    )
    got = trimmed.cpu().numpy()
    np.testing.assert_array_equal(got, wanted)
    rows_of_trace = trace.cpu().numpy()
    header = [
        np.full(rows, TRACE_MARKER),
        np.full(rows, before.round + 1),
        np.full(rows, version),
        *last,
        case["next_draft_lens"],
        got,
    ]
    np.testing.assert_array_equal(rows_of_trace[:, :8], np.stack(header, 1).astype(np.float32))
    np.testing.assert_array_equal(rows_of_trace[:, 8:], case["features"])


def snapshot_confidence(workspace: Tensor, rows: int, drafts: int) -> Any:
    """Confidences [R, K] that ``TrimTree`` left in its workspace."""
    values = workspace.cpu().numpy()[256 : 256 + rows * drafts * 4]
    return values.view(np.float32).reshape(rows, drafts).copy()


def check_score_level(seed: int, dtype: torch.dtype, rows: int, width: int) -> float:
    """One level of a random tree in ``ScoreLevel`` against its definition; greatest difference."""
    case = trim_case(seed, rows, drafts=int(3 + seed % 40), levels=int(1 + seed % 5))
    paths, lens = case["paths"], case["next_draft_lens"]
    num_levels = paths.shape[2] - 1
    level, vocab_size = seed % num_levels, width - seed % 7
    most = max(1, _most_inner(paths, level))
    g = np.random.default_rng(seed)
    logits = torch.from_numpy(g.normal(0, 3, (rows * most, width)).astype(np.float32))
    if seed % 4 == 1:
        logits = logits.round()  # ties among the greatest
    logits[::7, seed % vocab_size] = float("nan") if seed % 2 else float("-inf")
    logits = logits.to(dtype)
    num_rows = int(g.integers(1, rows * most + 1))
    inputs = [
        logits.cuda(),
        torch.tensor(num_rows, dtype=torch.int32, device="cuda"),
        torch.from_numpy(paths).cuda(),
        torch.from_numpy(lens).cuda(),
    ]
    (features, passed), _ = plugin_runtime.run(
        "ScoreLevel", *inputs, level=level, vocab_size=vocab_size, max_non_leaves=most
    )
    wanted = tree_reference.score_level(
        logits.float().numpy(), num_rows, paths, level=level, vocab_size=vocab_size
    )
    np.testing.assert_array_equal(passed.cpu().numpy(), lens)
    got = features.cpu().numpy()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=1e-5)
    return float(np.nanmax(np.abs(got - wanted), initial=0.0))


def _most_inner(paths: Any, level: int) -> int:
    counts = []
    for tree in paths:
        parent, depth = tree_reference.decode_tree(tree)
        counts.append(int(((depth == level) & np.isin(np.arange(depth.size), parent)).sum()))
    return max(counts)


def tree_inputs(rows: int, drafts: int, levels: int, children: int) -> list[Tensor]:
    """Inputs of ``TrimTree``: one template for all requests, features that differ."""
    g = np.random.default_rng(3)
    is_chain = children == 1
    one = chain(drafts) if is_chain else random_tree(g, drafts, levels, children)
    lens = np.full(rows, drafts, np.int32)
    arrays = [
        g.normal(0.5, 2, (rows, drafts)).astype(np.float32),
        lens,
        np.stack([one] * rows),
        lens,
        np.ones(rows, np.int32),
        np.zeros(rows, np.int32),
    ]
    return [torch.from_numpy(array).cuda() for array in arrays]
