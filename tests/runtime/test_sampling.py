"""From logits to the law that is drawn from and judged by."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtllm_av.runtime.random_source import KeyedSource, Purpose, RandomKeys
from trtllm_av.runtime.sampling import Distribution, distribution, map_draft_logits

INF, NAN = float("inf"), float("nan")


def law_of(
    rows: list[list[float]] | Tensor,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    *,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Distribution:
    logits = torch.as_tensor(rows)
    n = logits.shape[0]
    return distribution(
        logits,
        torch.as_tensor(temperature, dtype=torch.float32).expand(n),
        torch.as_tensor(top_k).expand(n),
        torch.as_tensor(top_p, dtype=torch.float32).expand(n),
        vocab_size=vocab_size or logits.shape[1],
        dtype=dtype,
    )


def keys_of(n: int) -> RandomKeys:
    zeros = torch.zeros(n, dtype=torch.int64)
    return RandomKeys(zeros, torch.arange(n), zeros, zeros, Purpose.DRAFT)


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The same law by the definition: sort everything, in float64."""
    mass = np.exp((logits - logits.max()) / temperature)
    order = np.sort(mass)[::-1]
    if 0 < top_k < mass.size:
        mass[mass < order[top_k - 1]] = 0.0
    mass /= mass.sum()
    if top_p < 1.0:
        order = np.sort(mass)[::-1]
        size = np.flatnonzero(np.cumsum(order) >= top_p)
        mass[mass < order[size[0] if size.size else -1]] = 0.0
    return mass / mass.sum()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(2, 300),
    scale=st.sampled_from([0.0, 0.5, 4.0, 20.0]),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.953125, 0.5, 0.015625]),
)
def test_law_equals_its_definition(
    seed: int, width: int, scale: float, temperature: float, top_k: int, top_p: float
) -> None:
    """Guards against a wrong cut: a nucleus one token short, k off by one, a cut before temperature."""
    logits = np.random.default_rng(seed).normal(size=(3, width)) * scale
    got = law_of(torch.from_numpy(logits), temperature, top_k, top_p, dtype=torch.float64).full()
    for row, result in zip(logits, got.numpy(), strict=True):
        np.testing.assert_allclose(result, reference(row, temperature, top_k, top_p), atol=1e-13)


def test_nucleus_keeps_the_token_that_crosses() -> None:
    """Guards against dropping the crossing token: the nucleus of .5/.25/.25 at .6 is never one token."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert law_of(logits, top_p=0.6).full()[0].tolist() == pytest.approx([0.625, 0.375, 0.0])
    assert law_of(logits, top_p=0.4).full()[0].tolist() == [1.0, 0.0, 0.0]
    halves = torch.tensor([[1.0, 0.5, 0.5]]).log()  # the first alone is exactly half
    assert law_of(halves, top_p=0.5).full()[0].tolist() == [1.0, 0.0, 0.0]


def test_ties_at_a_cut_are_all_kept() -> None:
    """Guards against a cut that depends on the order of a sort: draft and target would disagree on ties."""
    logits = [[2.0, 1.0, 1.0, 0.0]]
    assert (law_of(logits, top_k=2).full()[0] > 0).tolist() == [True, True, True, False]
    assert (law_of(logits, top_p=0.7).full()[0] > 0).tolist() == [True, True, True, False]


def test_rows_have_their_own_parameters() -> None:
    """Guards against parameters of one request that leak into another's row, in a mixed batch."""
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    temperature, top_k, top_p = (
        [1.0, 0.0, 0.7, 2.0, 0.0],
        [0, 5, 4, 0, 0],
        [1.0, 0.5, 1.0, 0.8, 1.0],
    )
    together = law_of(logits, temperature, top_k, top_p)
    assert together.dense.shape[0] == 3
    for i in range(5):
        alone = law_of(logits[i : i + 1], temperature[i], top_k[i], top_p[i])
        torch.testing.assert_close(together.full()[i], alone.full()[0], rtol=1e-6, atol=0)


def test_greedy_batch_builds_no_table() -> None:
    """Guards the fast path: greedy decoding must cost an argmax, not R softmaxes over the vocabulary."""
    law = law_of(torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 0.0, 0.0]]), temperature=0.0)
    assert law.dense.shape == (0, 4)
    assert law.point.tolist() == [1, 0]  # the first of equal maxima
    assert law.draw(KeyedSource(), keys_of(2)).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_columns_never_count(dtype: torch.dtype, temperature: float) -> None:
    """Guards against padding (151936 real of 152064) that is drawn because its logits are the largest."""
    logits = torch.tensor([[1.0, 2.0, 9.0], [2.0, 1.0, NAN]], dtype=dtype)
    law = law_of(logits, temperature, vocab_size=2)
    assert law.vocab_size == 2 and law.dtype is torch.float32
    assert law.full().argmax(-1).tolist() == [1, 0]
    torch.testing.assert_close(law.full().sum(-1), torch.ones(2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_odd_rows_stay_harmless(temperature: float) -> None:
    """Guards against NaN and infinities that spread, or yield id V; only the empty row is marked."""
    rows = [
        [NAN, 1.0, -INF],
        [-INF, -INF, -INF],
        [NAN, NAN, -INF],
        [0.0, INF, INF],
        [-INF, 0.5, -INF],
    ]
    law = law_of(rows, temperature)
    assert law.full().argmax(-1).tolist() == [1, 0, 0, 1, 1]
    assert law.full().amax(-1).tolist() == [1.0] * 5
    assert law.is_empty is not None and law.is_empty.tolist() == [False, True, True, False, False]
    assert law.rows(torch.tensor([0, 1])).is_empty is not None
    assert law_of([[0.0, 1.0]], temperature).is_empty is None


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-42, 1e-60])
def test_tiny_temperature_is_greedy_in_effect(temperature: float) -> None:
    """Guards against logits / T that overflow into NaN: the row would yield garbage."""
    full = law_of([[30.0, 29.0, -40.0], [-80.0, -90.0, -INF]], temperature).full()
    assert full.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_double_precision_stays_double() -> None:
    """Guards against a float32 step inside: exact enumeration would stop at 1e-7."""
    logits = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    law = law_of(logits, 1.0, dtype=torch.float64)
    expected = torch.softmax(logits, -1)
    assert law.dense.dtype is torch.float64
    torch.testing.assert_close(law.full(), expected, rtol=1e-15, atol=0)


def test_probability_and_rows_agree_with_the_table() -> None:
    """Guards against a wrong row: a draft judged by another request's law."""
    torch.manual_seed(1)
    law = law_of(
        torch.randn(6, 10), [1.0, 0.0, 1.0, 0.0, 0.5, 1.0], 0, [1.0, 1.0, 0.6, 1.0, 1.0, 1.0]
    )
    table = law.full()
    for index in (torch.tensor([5, 1, 1, 4, 0]), torch.tensor([3, 1]), torch.tensor([True] * 6)):
        part = law.rows(index)
        assert torch.equal(part.full(), table[index])
        for token in range(10):
            tokens = torch.full((len(part),), token)
            assert torch.equal(part.probability(tokens), table[index][:, token])


def test_draw_of_a_part_follows_its_own_rows() -> None:
    """Guards against drawing from the whole table when only some of its rows were asked for."""
    law = Distribution.from_probabilities(torch.eye(5))
    for index in (torch.tensor([4, 2]), torch.tensor([1, 0, 2, 4, 3]), torch.arange(5)):
        drawn = law.rows(index).draw(KeyedSource(), keys_of(index.numel()))
        assert drawn.tolist() == index.tolist()


def test_draw_leaves_the_law_unchanged() -> None:
    """Guards against a draw that overwrites ``point``: the draft would be judged by another law."""
    law = law_of([[0.0, 1.0], [0.0, 1.0]], [0.0, 1.0])
    point, table = law.point.clone(), law.full()
    law.draw(KeyedSource(), keys_of(2))
    assert torch.equal(law.point, point) and torch.equal(law.full(), table)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reduced_vocabulary_keeps_its_law(temperature: float) -> None:
    """Guards against q in the draft's own numbering: the wrong token would be judged."""
    draft_to_target = torch.tensor([7, 2, 5])
    logits = torch.tensor([[-0.5, 2.0, -1.0, 99.0], [3.0, 0.0, 1.0, 99.0]])
    small = law_of(logits, temperature, top_k=2, vocab_size=3)
    mapped = small.remap(draft_to_target, 9)
    assert torch.equal(mapped.full()[:, draft_to_target], small.full())
    assert torch.equal(mapped.full().sum(-1), small.full().sum(-1))
    wide = law_of(map_draft_logits(logits, draft_to_target, 9), temperature, top_k=2)
    assert torch.equal(wide.full(), mapped.full())
