"""The ONNX local functions on onnxruntime, against the definition of each operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.plugins.test_trim import Round, rounds
from trtllm_av.plugins import onnx_functions, reference

onnx = pytest.importorskip("onnx", reason="needs the `onnx` extra")
ort = pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

FLOAT, INT32, BOOL = 1, 6, 9  # onnx.TensorProto
K = 5
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


def open_function(
    function: Any,
    inputs: Sequence[tuple[str, int, list[Any]]],
    outputs: Sequence[tuple[str, int, int]],
    **attributes: Any,
) -> Any:
    """A session of one node; ``inputs`` (name, type, shape), "" for one left out; ``outputs`` (name,
    type, rank)."""
    helper = onnx.helper
    node = helper.make_node(
        function.name,
        [name for name, _, _ in inputs],
        [name for name, _, _ in outputs],
        domain=function.domain,
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs if value[0]],
        [helper.make_tensor_value_info(n, t, [None] * rank) for n, t, rank in outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(function.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@cache
def trim_session(num_positions: int) -> Any:
    names = ("draft_lens", "base_lens", "min_verify_lens")
    return open_function(
        onnx_functions.trim_drafts_function(num_positions),
        [
            ("confidence", FLOAT, ["R", num_positions]),
            *((name, INT32, ["R"]) for name in names),
            ("draft_budget", INT32, [1]),
        ],
        [
            ("survival", FLOAT, 2),
            ("verify_lens", INT32, 1),
            ("cu_seqlens", INT32, 1),
            ("pack_index", INT32, 1),
        ],
    )


def assert_trims_alike(case: Round) -> None:
    names = ("confidence", "draft_lens", "base_lens", "min_verify_lens", "draft_budget")
    session = trim_session(case.confidence.shape[1])
    *found, pack_index = session.run(None, dict(zip(names, case.arguments, strict=True)))
    expected = reference.trim_drafts(*case.arguments)
    stride = case.confidence.shape[1] + 1
    assert pack_index.shape == (case.confidence.shape[0] * stride,)
    if case.base_lens.max(initial=0) <= 1:  # what it is defined for
        packed = reference.pack_drafts(
            case.base_lens, expected[1], stride=stride, capacity=pack_index.size
        )
        assert pack_index.dtype == packed.dtype and pack_index.tobytes() == packed.tobytes()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


@given(rounds(np.float32))
@EXAMPLES
def test_trim_equals_the_definition_bit_for_bit(case: Round) -> None:
    """Guards against: an engine that breaks ties, floors, dead rows or denormals differently, and so
    verifies other drafts than the runtime believes."""
    assert_trims_alike(case)


def test_trim_of_the_largest_batch() -> None:
    """Guards against: ranks that overflow or lose ties where R·K reaches its limit."""
    rng = np.random.default_rng(0)
    rows = onnx_functions.MAX_TRIM_SLOTS // 7
    confidence = rng.choice(np.float32([0.5, 0.75, 1]), (rows, 7))
    ones = np.ones(rows, np.int32)
    assert_trims_alike(Round(confidence, 7 * ones, ones, 0 * ones, 1234))


def test_pack_index_skips_dead_rows() -> None:
    """Guards against: packed rows of a verify pass that are read from a request that is not there."""
    confidence = np.full((4, K), 0.9, np.float32)
    lens = np.int32([K, K, 2, 0])
    assert_trims_alike(Round(confidence, lens, np.int32([1, 0, 1, 1]), 0 * lens, 6))
    assert_trims_alike(Round(confidence, lens, np.int32([0, 0, 0, 0]), 0 * lens, 6))


@cache
def score_session(vocab_size: int, num_columns: int, has_mask: bool = False) -> Any:
    mask = [("allowed_mask", BOOL, ["R", num_columns])] if has_mask else []
    return open_function(
        onnx_functions.score_drafts_function(has_allowed_mask=has_mask),
        [
            ("draft_logits", FLOAT, ["R", "P", num_columns]),
            ("temperature", FLOAT, ["R"]),
            ("coefficients", FLOAT, [1 + K]),
            ("position", INT32, [1]),
            ("draft_lens", INT32, ["R"]),
            *mask,
        ],
        [("features", FLOAT, 3), ("confidence", FLOAT, 2)],
        vocab_size=vocab_size,
        feature_bound=15.0,
        temperature_floor=0.5,
    )


def score_both(
    logits: np.ndarray,
    temperature: Any,
    *,
    position: int = 0,
    lens: Any = None,
    vocab_size: int = 0,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Features and confidence of the function, after they were compared with the definition."""
    rows, _, columns = logits.shape
    vocab_size = vocab_size or columns
    arguments = {
        "draft_logits": logits,
        "temperature": np.broadcast_to(np.float32(temperature), rows).copy(),
        "coefficients": np.float32([0.5, -0.2, 0.1, 0.3, -0.4, 0.0]),
        "position": np.array([position], np.int32),
        "draft_lens": np.broadcast_to(np.int32(K if lens is None else lens), rows).copy(),
    }
    if mask is not None:
        arguments["allowed_mask"] = mask
    found = score_session(vocab_size, columns, mask is not None).run(None, arguments)
    expected = reference.score_drafts(**arguments, vocab_size=vocab_size)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=0)
    return found[0], found[1]


@given(
    logits=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.just(6)),
        elements=st.sampled_from([-math.inf, math.inf, math.nan, 0.0, 1.0, 65504.0])
        | st.floats(-30, 30, width=32),
    ),
    temperature=st.floats(0, 4, width=32) | st.just(math.nan),
    position=st.integers(0, 2),
    lens=st.integers(0, K),
    mask=st.none() | st.integers(0, 2**24 - 1),
)
@EXAMPLES
def test_score_equals_the_definition(
    logits: np.ndarray, temperature: float, position: int, lens: int, mask: int | None
) -> None:
    """Guards against: a score that is poisoned by NaN rows, reads padding, counts forbidden tokens, or
    takes another position's intercept inside an engine only."""
    bits = None if mask is None else np.array([mask >> i & 1 for i in range(24)], bool)
    features, confidence = score_both(
        logits,
        temperature,
        position=position,
        lens=lens,
        vocab_size=5,
        mask=None if bits is None else bits.reshape(4, 6)[: len(logits)],
    )
    assert np.isfinite(features).all() and np.isfinite(confidence).all()


def test_score_has_no_cliff_where_the_top_token_is_nearly_certain() -> None:
    """Guards against: 1 − q computed as Σexp − 1, which reads the bound from a gap of 17 on."""
    gaps = np.float32([2.0, 9.0, 14.5, 17.0])
    logits = np.stack([gaps, np.zeros_like(gaps)], -1)[:, None]
    features, _ = score_both(logits, 1.0)
    np.testing.assert_allclose(features[:, 0, 0], [2.0, 9.0, 14.5, 15.0], atol=1e-5)


def test_cache_update_writes_each_slots_rows_and_nothing_else() -> None:
    """Guards against: rows written into a neighbour's slot when a slot is idle, or a lost tail."""
    session = open_function(
        onnx_functions.kv_cache_update_function(),
        [
            ("cache", FLOAT, ["B", 2, 9, 4]),
            ("update", FLOAT, ["T", 2, 4]),
            ("write", INT32, ["B"]),
            ("cu", INT32, ["B1"]),
        ],
        [("updated", FLOAT, 4)],
        update_form="packed_nhd",
    )
    rng = np.random.default_rng(1)
    lens, write = [0, 3, 0, 1, 2], np.int32([4, 6, 0, 8, 0])
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    cache_before = rng.random((5, 2, 9, 4), np.float32)
    update = rng.random((6, 2, 4), np.float32)
    expected = cache_before.copy()
    for slot, length in enumerate(lens):
        rows = update[cu[slot] : cu[slot + 1]].transpose(1, 0, 2)
        expected[slot, :, write[slot] : write[slot] + length] = rows
    feed = {"cache": cache_before, "update": update, "write": write, "cu": cu}
    np.testing.assert_array_equal(session.run(None, feed)[0], expected)


def test_attention_is_causal_from_the_right() -> None:
    """Guards against: a last query that misses its newest key, or a first one that sees the future."""
    heads, kv_heads, width, reach, size = 4, 2, 3, 7, 8
    session = open_function(
        onnx_functions.attention_function(),
        [
            ("q", FLOAT, ["B", heads, "M", size]),
            ("k", FLOAT, ["B", kv_heads, reach, size]),
            ("v", FLOAT, ["B", kv_heads, reach, size]),
            ("", FLOAT, []),
            ("", FLOAT, []),
            ("kv_lens", INT32, ["B"]),
        ],
        [("y", FLOAT, 4)],
        causal_kind="lower_right",
    )
    rng = np.random.default_rng(2)
    kv_lens = np.int32([3, 7])
    q = rng.standard_normal((2, heads, width, size)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, kv_heads, reach, size)).astype(np.float32)
    found = session.run(None, {"q": q, "k": k, "v": v, "kv_lens": kv_lens})[0]
    for row, kv_len in enumerate(kv_lens):
        for head in range(heads):
            for query in range(width):
                seen = kv_len - width + query + 1
                scores = k[row, head // 2, :seen] @ q[row, head, query]
                weights = np.exp(scores - scores.max())
                expected = weights / weights.sum() @ v[row, head // 2, :seen]
                np.testing.assert_allclose(found[row, head, query], expected, atol=1e-5)
