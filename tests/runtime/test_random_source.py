"""Random numbers: the generator itself, the keys, and the draw by inverse CDF."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.runtime.random_sources import RecordingSource
from trtllm_av.runtime import random_source
from trtllm_av.runtime.random_source import (
    KeyedSource,
    Purpose,
    RandomKeys,
    inverse_cdf,
    philox_4x32,
    uniforms,
)

LARGEST = 1.0 - 2.0**-53  # of all numbers that ``uniforms`` can give


def keys_of(
    seed: int = 3, request: int = 5, round_: int = 7, position: int = 2, *, n: int = 1
) -> RandomKeys:
    columns = (torch.full((n,), value) for value in (seed, request, round_, position))
    return RandomKeys(*columns, Purpose.DRAFT)


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_generator_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    """Guards against a generator that looks random but is not the analysed one (Random123's vectors)."""
    assert (philox_4x32(words(counter), words(key)) == words(expected)).all()


@pytest.mark.parametrize("purpose", list(Purpose))
def test_each_part_of_the_key_changes_the_number(purpose: Purpose) -> None:
    """Guards against a key part that is dropped: its numbers repeat, and a trimmed draft is redrawn as it was."""
    base = replace(keys_of(), purpose=purpose)
    variants = [base] + [replace(base, purpose=other) for other in Purpose if other is not purpose]
    for field, bits in (("seeds", 63), ("requests", 63), ("rounds", 32), ("positions", 30)):
        variants += [
            replace(base, **{field: getattr(base, field) ^ (1 << bit)}) for bit in range(bits)
        ]
    numbers = [uniforms(keys).item() for keys in variants]
    assert len(set(numbers)) == len(numbers)


def test_numbers_do_not_depend_on_the_batch() -> None:
    """Guards against numbers that move when other requests join: a seed must reproduce its tokens."""
    rng = np.random.default_rng(0)
    columns = [torch.from_numpy(rng.integers(0, 1 << 29, 200)) for _ in range(4)]
    together = RandomKeys(*columns, Purpose.ACCEPT)
    alone = [uniforms(together.select(torch.tensor([i]))).item() for i in range(200)]
    assert uniforms(together).tolist() == alone


def test_numbers_are_uniform_with_53_bits() -> None:
    """Guards against a truncated or shifted word: 24-bit numbers can equal p/q and bias rare tokens."""
    columns = (torch.zeros(4096, dtype=torch.int64) for _ in range(3))
    numbers = uniforms(RandomKeys(*columns, torch.arange(4096), Purpose.BONUS))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    low_bits = (numbers * 2.0**53).astype(np.uint64) & np.uint64(0xFFFF)
    for values, top in ((numbers, 1.0), (low_bits.astype(float), 65536.0)):
        counts = np.histogram(values, bins=64, range=(0.0, top))[0]
        assert ((counts - 64.0) ** 2 / 64.0).sum() < 63 + 5 * np.sqrt(2 * 63)


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 512, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inverse_cdf_inverts_the_cdf(width: int, dtype: type) -> None:
    """Guards against a search that is off by one at a block's edge: a token would get its neighbour's mass."""
    rng = np.random.default_rng(width)
    row = rng.random(width).astype(dtype) * (rng.random(width) < 0.7)
    row[rng.integers(width)] = 1.0
    bounds = [Fraction(0)]
    for value in row:
        bounds.append(bounds[-1] + Fraction(float(value)))
    for token in np.flatnonzero(row):
        low, high = bounds[token] / bounds[-1], bounds[token + 1] / bounds[-1]
        inside = [low + (high - low) * share / 1000 for share in (1, 500, 999)]
        drawn = inverse_cdf(np.stack([row] * 3), np.array([float(u) for u in inside]))
        assert drawn.tolist() == [token] * 3


@pytest.mark.parametrize("width", [3, 256, 700])
def test_no_token_of_probability_zero_is_drawn(width: int) -> None:
    """Guards against u = 0 or u ≈ 1 running into leading or trailing zeros: a forbidden token, or id V."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        row = np.zeros(width, dtype=np.float32)
        support = rng.choice(width, size=rng.integers(1, 3), replace=False)
        row[support] = rng.random(support.size).astype(np.float32) + 1e-30
        drawn = inverse_cdf(np.stack([row] * 3), np.array([0.0, rng.random(), LARGEST]))
        assert set(drawn) <= set(support)
        assert drawn[0] == support.min() and drawn[2] == support.max()


@pytest.mark.parametrize("width", [255, 256, 700])
def test_rounding_at_the_end_of_a_block_stays_inside(width: int) -> None:
    """Guards against a block's sum above its running sum: the search would fall back to a forbidden token."""
    rows = np.random.default_rng(3).random((500, width))
    rows[:, ::256] = 0.0
    drawn = inverse_cdf(rows, np.full(500, LARGEST))
    assert drawn.tolist() == [width - 1] * 500


@pytest.mark.parametrize("row", [[0.0, 0.0], [float("nan"), 0.5]])
def test_row_without_mass_is_refused(row: list[float]) -> None:
    """Guards against an all-zero or NaN row that yields an arbitrary token."""
    with pytest.raises(ValueError, match="row 1 sums to"):
        inverse_cdf(np.array([[0.5, 0.5], row]), np.array([0.5, 0.5]))


def test_draw_frequencies_follow_the_law() -> None:
    """Guards against a biased draw over several blocks of tokens."""
    rng = np.random.default_rng(2)
    law = torch.from_numpy(rng.dirichlet(np.full(600, 0.3)).astype(np.float32))
    n = 60_000
    zeros = torch.zeros(n, dtype=torch.int64)
    keys = RandomKeys(zeros, zeros, torch.arange(n), zeros, Purpose.DRAFT)
    counts = np.zeros(600)
    for part in torch.arange(n).split(4000):
        tokens = KeyedSource().categorical(law.expand(part.numel(), -1), keys.select(part))
        counts += np.bincount(tokens.numpy(), minlength=600)
    expected = n * law.double().numpy() / law.double().sum().item()
    likely = expected > 20
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert abs(statistic - likely.sum()) < 5 * np.sqrt(2 * likely.sum())


def test_acceptance_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "≤": a forbidden draft would be accepted when u is 0; and against u in float32."""
    p, q = torch.tensor([0.0, 0.25, 0.25, 1.0]), torch.tensor([0.5, 0.5, 0.5, 1.0])
    numbers = np.array([0.0, 0.5, np.nextafter(0.5, 0.0), LARGEST])
    monkeypatch.setattr(random_source, "uniforms", lambda keys: numbers)
    assert KeyedSource().accept(p, q, keys_of(n=4)).tolist() == [False, False, True, True]


def test_recording_source_notices_a_key_that_comes_twice() -> None:
    """Guards the guard: a recorder that misses a repeated key proves nothing elsewhere."""
    source = RecordingSource(KeyedSource())
    law = torch.tensor([[0.5, 0.5]])
    source.categorical(law, keys_of())
    source.categorical(law, keys_of(round_=8))
    source.accept(law[:, 0], law[:, 1], replace(keys_of(), purpose=Purpose.ACCEPT))
    with pytest.raises(AssertionError, match="key used twice"):
        source.categorical(law, keys_of())
