"""The start-up profile and its cache."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_av.runtime import cost_profile
from trtllm_av.runtime.cost_profile import ProfileSizes, load_or_measure, measure_costs
from trtllm_av.runtime.cost_table import ProfileKey
from trtllm_av.runtime.errors import CostTableError

KEY = ProfileKey("digest", "torch", "cpu", "float32", 2)
SIZES = ProfileSizes(
    max_requests=4,
    verify_tokens=(1, 8, 16),
    draft_requests=(1, 4),
    draft_depths=(1, 3),
    graph_limit_tokens=8,
)


class Engine:
    """Takes a made-up time for each call and remembers it; every third call of a size hits a hiccup."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.verified: list[tuple[int, int]] = []
        self.drafted: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.seconds

    def verify(self, tokens: int, requests: int) -> None:
        self.verified.append((tokens, requests))
        self.seconds += 0.001 * tokens
        if self.verified.count((tokens, requests)) % 3 == 0:
            self.seconds += 1.0

    def draft(self, requests: int, depth: int) -> None:
        self.drafted.append((requests, depth))
        self.seconds += 0.0001 * requests * depth

    def load(self, folder: Path, key: ProfileKey = KEY, sizes: ProfileSizes = SIZES) -> Any:
        return load_or_measure(folder, self.verify, self.draft, sizes, key, clock=self.clock)


def test_profile_takes_the_fastest_run_after_a_warm_up() -> None:
    """Guards against one slow call (a first one, a hiccup) that becomes the cost of a size."""
    engine = Engine()
    table = measure_costs(engine.verify, engine.draft, SIZES, KEY, clock=engine.clock)
    assert dict(table.verify) == pytest.approx({1: 1.0, 8: 8.0, 16: 16.0})
    assert [ms for *_, ms in table.draft] == pytest.approx([0.1, 0.3, 0.4, 1.2])
    assert engine.verified.count((8, 4)) == 6
    assert table.key == KEY
    assert table.graph_limit_tokens == 8


def test_a_slow_phase_falls_on_all_sizes() -> None:
    """Guards against a busy moment at the start that makes the smallest size the dearest, and all flat."""
    engine = Engine()

    def verify(tokens: int, requests: int) -> None:
        engine.verify(tokens, requests)
        engine.seconds += 5.0 if engine.seconds < 20.0 else 0.0

    table = measure_costs(verify, engine.draft, SIZES, KEY, clock=engine.clock)
    assert dict(table.verify) == pytest.approx({1: 1.0, 8: 8.0, 16: 16.0})


def test_one_undisturbed_run_of_a_size_is_enough() -> None:
    """Guards against a shared machine that stretches most runs and so makes small steps look dear."""
    engine = Engine()

    def verify(tokens: int, requests: int) -> None:
        engine.verify(tokens, requests)
        engine.seconds += 1.0 if engine.verified.count((tokens, requests)) != 4 else 0.0

    table = measure_costs(verify, engine.draft, SIZES, KEY, clock=engine.clock)
    assert dict(table.verify) == pytest.approx({1: 1.0, 8: 8.0, 16: 16.0})


def test_profile_runs_only_shapes_that_occur() -> None:
    """Guards against a profile of shapes the scheduler cannot produce, such as 8 tokens in 8 requests."""
    engine = Engine()
    measure_costs(engine.verify, engine.draft, SIZES, KEY, clock=engine.clock)
    assert set(engine.verified) == {(1, 1), (8, 4), (16, 4)}
    assert set(engine.drafted) == {(1, 1), (1, 3), (4, 1), (4, 3)}


def test_a_flat_engine_is_an_error() -> None:
    """Guards against a broken clock or a stubbed step that would verify everything for ever."""
    ticks = itertools.count()
    with pytest.raises(CostTableError, match=r"flat at 1000\.0 ms"):
        measure_costs(lambda *_: None, lambda *_: None, SIZES, KEY, clock=lambda: next(ticks))


def test_the_cache_spares_the_measurement(tmp_path: Path) -> None:
    """Guards against a start that measures again although nothing changed."""
    first = Engine().load(tmp_path)
    engine = Engine()
    assert engine.load(tmp_path) == first
    assert not engine.verified


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "other"},
        {"executor": "onnx"},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"num_threads": 1},
    ],
)
def test_each_part_of_the_key_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    """Guards against costs of another engine that steer this one."""
    Engine().load(tmp_path)
    engine = Engine()
    engine.load(tmp_path, key=replace(KEY, **change))
    assert engine.verified
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"verify_tokens": (1, 8, 16, 64)},
        {"draft_requests": (1, 8)},
        {"draft_depths": (1, 7)},
        {"graph_limit_tokens": 16},
    ],
)
def test_missing_sizes_are_measured(tmp_path: Path, change: dict[str, Any]) -> None:
    """Guards against a profile of 4 requests that is extrapolated to 64."""
    Engine().load(tmp_path)
    engine = Engine()
    engine.load(tmp_path, sizes=replace(SIZES, **change))
    assert engine.verified


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"unit": "ms"}', "foreign", "keyless"])
def test_a_damaged_cache_is_rebuilt(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a start that fails, or believes, a file cut short or copied from elsewhere."""
    expected = Engine().load(tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    if damage == "foreign":
        data["key"]["device"] = "cuda"
    if damage == "keyless":
        del data["key"]
    path.write_text(json.dumps(data) if damage in ("foreign", "keyless") else damage)
    with caplog.at_level(logging.INFO):
        engine = Engine()
        assert engine.load(tmp_path) == expected
    assert engine.verified
    assert "measuring step costs again" in caplog.text
    engine = Engine()
    engine.load(tmp_path)
    assert not engine.verified


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a cut-off cache file, and against a start that fails for want of a cache."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost_profile.os, "replace", full)
    table = Engine().load(tmp_path)
    assert table.key == KEY
    assert not list(tmp_path.iterdir())
    assert "No space left" in caplog.text


def test_a_folder_that_may_not_be_looked_into_costs_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an engine that does not start because of a cache it can do without."""
    stat = os.stat

    def denied(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "costs-" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    def deny(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr("trtllm_av.runtime.cost_profile.write_whole", deny)
    assert Engine().load(tmp_path).key == KEY
    assert "step costs are not cached" in caplog.text


@pytest.mark.parametrize(("requests", "positions"), [(1, 1), (1, 7), (8, 7), (64, 3)])
def test_sizes_without_graphs_reach_the_largest_batch(requests: int, positions: int) -> None:
    """Guards against extrapolation in ordinary use, or a size that cannot occur."""
    sizes = ProfileSizes.without_graphs(requests, positions, is_block=False)
    assert sizes.verify_tokens[0] == 1
    assert sizes.verify_tokens[-1] == requests * (positions + 1)
    assert sizes.draft_requests[-1] == requests
    assert sizes.draft_depths in ((1,), (1, positions))
    block = ProfileSizes.without_graphs(requests, positions, is_block=True)
    assert block.draft_depths == (positions,)
