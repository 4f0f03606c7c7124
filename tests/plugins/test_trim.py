"""Trim: the survival, the total order under the budget, and the packed rows that follow from it."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trtllm_av.plugins import reference, torch_ops

TINY = float(np.finfo(np.float32).tiny)
SIGMOID_20 = float(torch.sigmoid(torch.tensor(20.0)))  # 1.0 in float32: ties are exact
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Round:
    """The arguments of a trim, as arrays."""

    confidence: np.ndarray
    draft_lens: np.ndarray
    base_lens: np.ndarray
    min_verify_lens: np.ndarray
    draft_budget: int

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        lens = (self.draft_lens, self.base_lens, self.min_verify_lens, [self.draft_budget])
        return (self.confidence, *(np.asarray(values, np.int32) for values in lens))

    def take(self, rows: Any) -> Round:
        """The same round with its requests reordered."""
        lens = (self.draft_lens, self.base_lens, self.min_verify_lens)
        return Round(self.confidence[rows], *(values[rows] for values in lens), self.draft_budget)

    def trim(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The operator's answer, after it was compared with the reference bit for bit."""
        result = torch_ops.trim_drafts(*(torch.from_numpy(value) for value in self.arguments))
        expected = reference.trim_drafts(*self.arguments, dtype=self.confidence.dtype)
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.numpy().dtype == theirs.dtype
            assert ours.numpy().tobytes() == theirs.tobytes()
        return expected

    def verify_lens(self) -> list[int]:
        return [int(n) for n in self.trim()[1]]


def a_round(
    confidence: Any, budget: int, *, lens: Any = None, base: Any = None, floors: Any = None
) -> Round:
    p = np.asarray(confidence, np.float32)
    rows, positions = p.shape
    return Round(
        p,
        np.asarray(np.full(rows, positions) if lens is None else lens),
        np.asarray(np.ones(rows, int) if base is None else base),
        np.asarray(np.zeros(rows, int) if floors is None else floors),
        budget,
    )


@st.composite
def rounds(draw: st.DrawFn, dtype: Any = None) -> Round:
    """Rounds full of ties, saturated and broken confidences, floors and dead rows."""
    dtype = draw(st.sampled_from([np.float32, np.float64])) if dtype is None else dtype
    rows, positions = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    coarse = [0.0, 0.25, 0.5, 0.75, 1.0]
    broken = [-0.0, -1.0, 1.5, np.nan, np.inf, -np.inf, TINY, TINY / 2, 2.0**-70, SIGMOID_20]
    smooth = st.floats(0, 1, width=32)
    element = draw(
        st.sampled_from([st.sampled_from(coarse), st.sampled_from(coarse + broken), smooth])
    )
    lens = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, positions)))
    floors = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, positions)))
    return Round(
        draw(hnp.arrays(dtype, (rows, positions), elements=element)),
        lens,
        draw(hnp.arrays(np.int64, rows, elements=st.sampled_from([0, 1, 1, 1, 9]))),
        np.where(draw(st.booleans()), floors, 0),
        draw(st.integers(-1, rows * positions + 1)),
    )


def effective(case: Round) -> tuple[np.ndarray, np.ndarray]:
    """Valid drafts and floors of each request: a dead row has neither."""
    lens = np.where(case.base_lens > 0, case.draft_lens, 0)
    return lens, np.minimum(case.min_verify_lens, lens)


@given(rounds())
@EXAMPLES
def test_the_likeliest_slots_are_admitted(case: Round) -> None:
    """Guards against: budget left unused or overdrawn, floors ignored, an admitted slot that ranks
    behind a refused one, and lengths that differ between operator and reference."""
    survival, verify_lens, cu_seqlens = case.trim()
    lens, floors = effective(case)
    wanted = min(max(case.draft_budget, floors.sum()), lens.sum())
    assert verify_lens.sum() == wanted
    assert (floors <= verify_lens).all() and (verify_lens <= lens).all()
    assert cu_seqlens.tolist() == [0, *np.cumsum(case.base_lens + verify_lens)]
    ranks = [
        ((-float(survival[row, i]), i, row), i < verify_lens[row])
        for row in range(lens.size)
        for i in range(floors[row], lens[row])
    ]
    admitted = [rank for rank, is_in in ranks if is_in]
    refused = [rank for rank, is_in in ranks if not is_in]
    assert not admitted or not refused or max(admitted) < min(refused)


@given(rounds())
@EXAMPLES
def test_survival_is_a_product_that_never_rises(case: Round) -> None:
    """Guards against: NaN, denormals or confidences above 1 breaking the prefix of a draft."""
    survival = case.trim()[0]
    lens, _ = effective(case)
    assert ((survival == 0) | (survival >= np.finfo(survival.dtype).tiny)).all()
    assert (survival <= 1).all() and not np.signbit(survival).any()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (survival[np.arange(survival.shape[1]) >= lens[:, None]] == 0).all()


@given(rounds())
@EXAMPLES
def test_a_larger_budget_never_verifies_less(case: Round) -> None:
    """Guards against: an order that depends on the budget, by which a request could lose a draft."""
    more = replace(case, draft_budget=case.draft_budget + 1)
    assert (more.trim()[1] >= case.trim()[1]).all()


@given(rounds(), st.randoms(use_true_random=False))
@EXAMPLES
def test_the_order_of_requests_decides_ties_only(case: Round, random: Any) -> None:
    """Guards against: a request favoured for its slot number where survival already decides."""
    order = np.array(random.sample(range(case.draft_lens.size), case.draft_lens.size))
    survival, verify_lens, _ = case.trim()
    moved_survival, moved_verify_lens, _ = case.take(order).trim()
    assert moved_survival.tobytes() == survival[order].tobytes()
    _, floors = effective(case)

    def admitted(
        values: np.ndarray, lens: np.ndarray, start: np.ndarray
    ) -> list[tuple[float, int]]:
        return sorted(
            (float(values[row, i]), i)
            for row in range(lens.size)
            for i in range(start[row], lens[row])
        )

    assert admitted(survival, verify_lens, floors) == admitted(
        moved_survival, moved_verify_lens, floors[order]
    )


@given(rounds())
@EXAMPLES
def test_what_lies_behind_the_first_trimmed_draft_is_not_looked_at(case: Round) -> None:
    """Guards against: a lookahead leak, which would let a draft's own later confidences keep or drop it
    and so bias what is emitted."""
    verify_lens = case.trim()[1]
    changed = case.confidence.copy()
    for row, verified in enumerate(verify_lens):
        changed[row, verified + 1 :] = 1 - np.nan_to_num(changed[row, verified + 1 :])
    assert replace(case, confidence=changed).trim()[1].tolist() == verify_lens.tolist()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, [1, 0, 0]),
        (2, [1, 1, 0]),
        (3, [1, 1, 1]),
        (4, [2, 1, 1]),
        (5, [2, 2, 1]),
        (7, [3, 2, 2]),
    ],
)
def test_exact_ties_go_to_the_shallower_then_the_earlier(budget: int, expected: list[int]) -> None:
    """Guards against: saturated confidences (σ(20) = 1.0 in float32) trimmed in an order of chance."""
    assert SIGMOID_20 == 1.0
    assert a_round(np.full((3, 3), SIGMOID_20), budget).verify_lens() == expected


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_shallow_tie_outranks_an_earlier_request(budget: int) -> None:
    """Guards against: (survival, request, position) order, which differs from the stated one."""
    case = a_round([[1.0, 1.0], [0.5, 1.0], [1.0, 1.0]], budget)
    assert case.verify_lens() == {1: [1, 0, 0], 2: [1, 0, 1], 3: [2, 0, 1]}[budget]


def test_survival_multiplies_from_left_to_right_in_float32() -> None:
    """Guards against: a scan or float64 product, whose last bit flips lengths between devices."""
    generator = np.random.default_rng(7)
    p = generator.random((64, 7), np.float32)
    survival = a_round(p, 0).trim()[0]
    for row in range(64):
        product = np.float32(1)
        for i in range(7):
            product = np.float32(product * p[row, i])
            assert survival[row, i] == product
    assert (survival[:, -1] != np.prod(p[:, ::-1], axis=1)).any()
    assert (survival[:, -1] != np.prod(p.astype(np.float64), axis=1).astype(np.float32)).any()


def test_denormal_products_are_zero() -> None:
    """Guards against: devices that flush denormals ordering slots that others keep apart."""
    survival = a_round([[2.0**-63, 2.0**-63, 0.5, 1.0], [TINY, 1.0, 0.99, 1.0]], 0).trim()[0]
    assert survival.tolist() == [[2.0**-63, TINY, 0, 0], [TINY, TINY, 0, 0]]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (a_round([[0.9]], 0), [0]),
        (a_round([[0.9]], 1), [1]),
        (a_round([[0.9, 0.8]], 99), [2]),
        (a_round([[0.9, 0.8]] * 2, 9, lens=[0, 0]), [0, 0]),
        (a_round([[0.9, 0.8]] * 3, 9, lens=[2, 0, 1], base=[1, 512, 1]), [2, 0, 1]),
        (a_round([[0.9, 0.8]] * 3, 9, lens=[2, 2, 1], base=[1, 0, 1]), [2, 0, 1]),
        (a_round([[0.1, 0.1], [0.9, 0.9]], 2, floors=[2, 0]), [2, 0]),
        (a_round([[0.1, 0.1], [0.9, 0.9]], 3, floors=[2, 0]), [2, 1]),
        (a_round([[0.1, 0.1], [0.9, 0.9]], 0, floors=[2, 0]), [2, 0]),
        (a_round([[0.1, 0.1], [0.9, 0.9]], 2, floors=[1, 0]), [1, 1]),
        (a_round([[0.0, 0.0], [np.nan, 1.0]], 2), [1, 1]),
        (a_round([[0.0, 0.0], [0.0, 1.0]], 3), [2, 1]),
        (a_round([[0.9, 0.8]], 2, lens=[-3]), [0]),
        (a_round([[0.9, 0.8]], 2, lens=[5], floors=[9]), [2]),
        (a_round(np.zeros((0, 2)), 5), []),
    ],
    ids=[
        "no budget",
        "one slot",
        "budget above all",
        "nothing drafted",
        "prefill in the batch",
        "dead row",
        "floors use the budget",
        "rest after floors",
        "floors exceed the budget",
        "partial floor",
        "worthless slots still fill the budget",
        "zeros keep their order",
        "negative length",
        "lengths beyond K",
        "no requests",
    ],
)
def test_edges(case: Round, expected: list[int]) -> None:
    """Guards against: the sizes at which an index or a comparison is off by one."""
    assert case.verify_lens() == expected


@pytest.mark.parametrize("kind", ["random", "saturated", "coarse"])
@pytest.mark.parametrize(("rows", "positions"), [(1, 16), (1024, 1), (1024, 16)])
def test_large_batches(kind: str, rows: int, positions: int) -> None:
    """Guards against: a limit of block or key width that only a full batch meets."""
    generator = np.random.default_rng(rows + positions)
    p = generator.random((rows, positions), np.float32)
    if kind == "saturated":
        p[:] = SIGMOID_20
    elif kind == "coarse":
        p = np.ceil(p * 4) / 4
    lens = generator.integers(0, positions + 1, rows)
    floors = np.where(generator.random(rows) < 0.1, lens, 0)
    base = generator.integers(0, 3, rows)
    case = a_round(p, 0, lens=lens, floors=floors, base=base)
    for budget in (0, 1, rows // 2, int(lens.sum()) // 2, int(lens.sum()), rows * positions):
        replace(case, draft_budget=budget).trim()


def test_memory_is_linear_in_the_slots() -> None:
    """Guards against: rank counting with an [R·K, R·K] comparison, 268 MB at R = 1024."""
    case = a_round(np.random.default_rng(0).random((1024, 16), np.float32), 5000)
    arguments = [torch.from_numpy(value) for value in case.arguments]
    torch_ops.trim_drafts(*arguments)
    tracemalloc.start()
    torch_ops.trim_drafts(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 1024 * 16


@given(rounds(), st.integers(0, 3))
@EXAMPLES
def test_pack_index_names_every_row_once(case: Round, spare: int) -> None:
    """Guards against: packed rows of a neighbouring request, and a tail that reads row 0."""
    verify_lens, cu_seqlens = case.trim()[1:]
    base = case.base_lens.astype(np.int32)
    stride = int((base + verify_lens).max()) + spare
    capacity = int(cu_seqlens[-1]) + spare
    pack_index = torch_ops.pack_drafts(
        torch.from_numpy(base), torch.from_numpy(verify_lens), stride=stride, capacity=capacity
    ).numpy()
    expected = reference.pack_drafts(base, verify_lens, stride=stride, capacity=capacity)
    assert pack_index.dtype == expected.dtype and pack_index.tolist() == expected.tolist()
    for row in range(base.size):
        owned = pack_index[cu_seqlens[row] : cu_seqlens[row + 1]] - row * stride
        assert owned.tolist() == list(range(base[row] + verify_lens[row]))
    assert (pack_index[cu_seqlens[-1] :] == -1).all()


@pytest.mark.parametrize(
    ("stride", "capacity", "named"), [(3, 9, "stride=3"), (4, 5, "capacity=5")]
)
def test_a_batch_that_does_not_fit_is_refused(stride: int, capacity: int, named: str) -> None:
    """Guards against: overlapping or lost rows, which would emit another request's tokens."""
    base = torch.tensor([1, 1], dtype=torch.int32)
    verify_lens = torch.tensor([3, 1], dtype=torch.int32)
    for module in (torch_ops, reference):
        with pytest.raises(ValueError, match=named):
            module.pack_drafts(base, verify_lens, stride=stride, capacity=capacity)
