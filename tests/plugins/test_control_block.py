"""The control block: what is read is one write, never of the reader's own round."""

from __future__ import annotations

import multiprocessing
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_av.plugins import control_block
from trtllm_av.plugins.control_block import (
    MAX_COEFFICIENTS,
    MAX_LEVELS,
    PROGRESS,
    SIZE,
    SLOT_WORDS,
    SLOTS,
    ControlBlock,
    Progress,
)
from trtllm_av.runtime.errors import BuildError, UsageError

KERNEL = Path(control_block.__file__).with_name("kernels") / "tree_trim.cu"


@pytest.fixture
def block() -> ControlBlock:
    return ControlBlock(bytearray(SIZE))


def test_everything_is_verified_until_the_first_write(block: ControlBlock) -> None:
    """Guards against: trimming to budget 0 with coefficients 0, before the runtime knows anything."""
    assert block.read(1) is None
    assert block.progress() == Progress(0, 0)


def test_a_write_counts_from_the_next_round_on(block: ControlBlock) -> None:
    """Guards against: a round that is trimmed with numbers it went into itself."""
    version = block.write(budget=9, coefficients=[0.5, 1, 2], floor=2, round=7)
    assert block.read(7) is None
    assert block.read(6) is None
    found = block.read(8)
    assert found is not None
    assert (found.version, found.budget, found.floor, found.round) == (version, 9, 2, 7)
    assert found.coefficients[:3] == (0.5, 1, 2) and set(found.coefficients[3:]) == {0.0}


def test_the_older_version_serves_until_the_newer_one_may(block: ControlBlock) -> None:
    """Guards against: rounds without a budget between a write and the round it is for."""
    block.write(budget=1, coefficients=[1, 0], round=0)
    block.write(budget=2, coefficients=[1, 0], round=5)
    for round_, budget in ((1, 1), (5, 1), (6, 2), (60, 2)):
        found = block.read(round_)
        assert found is not None and found.budget == budget
    block.verify_all(round=8)
    assert block.read(9) is None
    found = block.read(8)
    assert found is not None and found.budget == 2


def test_versions_and_rounds_pass_the_end_of_their_range(block: ControlBlock) -> None:
    """Guards against: a server that stops adapting after 2³² writes or rounds."""
    block._version = 2**32 - 2
    assert block.write(budget=1, coefficients=[1, 0], round=2**32 - 3) == 2**32 - 1
    assert block.write(budget=2, coefficients=[1, 0], round=2**32 - 1) == 2
    for round_, budget in ((2**32 - 2, 1), (0, 2), (3, 2)):
        found = block.read(round_)
        assert found is not None and found.budget == budget


def test_a_torn_slot_is_not_used(block: ControlBlock) -> None:
    """Guards against: half of one write with half of another, wherever the seam is."""
    block.write(budget=1, coefficients=[1, 0], round=0)
    block.write(budget=2, coefficients=[2, 0], round=0)
    after = ControlBlock(bytearray(SIZE))
    after.write(budget=1, coefficients=[1, 0], round=0)
    after.write(budget=2, coefficients=[2, 0], round=0)
    after.write(budget=3, coefficients=[3, 0], round=0)
    first = SLOTS + SLOT_WORDS  # version 3 replaces version 1 there
    for word in range(SLOT_WORDS):
        block._words[first + word] = after._words[first + word]
        found = block.read(1)
        assert found is not None
        assert found.budget == (2 if word < SLOT_WORDS - 1 else 3)


def test_a_block_goes_on_where_it_was(block: ControlBlock) -> None:
    """Guards against: a restarted runtime whose first versions count as older than the last ones."""
    for budget in range(5):
        block.write(budget=budget, coefficients=[1, 0], round=budget)
    again = ControlBlock(block._words.data)
    assert again.write(budget=99, coefficients=[1, 0], round=9) == 6
    found = again.read(10)
    assert found is not None and found.budget == 99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": [1.0]}, r"coefficients have shape \(1,\); pass a slope and 1 … 32"),
        ({"coefficients": [0.0] * (MAX_LEVELS + 2)}, "coefficients have shape"),
        ({"coefficients": [[1.0, 2.0]]}, "coefficients have shape"),
        ({"coefficients": [1.0, float("nan")]}, "are not finite; keep the last good ones"),
        ({"budget": -1}, "budget=-1 must be in 0"),
        ({"budget": 2**31}, "budget=2147483648 must be in 0"),
        ({"floor": -1}, "floor=-1 must be in 0"),
    ],
)
def test_refused_numbers_change_nothing(
    block: ControlBlock, change: dict[str, Any], message: str
) -> None:
    """Guards against: a diverged fit that reaches the engine, or a refusal after half a write."""
    before = block._words.copy()
    with pytest.raises(UsageError, match=message) as raised:
        block.write(**{"budget": 1, "coefficients": [1.0, 0.0], "round": 0, **change})
    assert "\n" not in str(raised.value)
    np.testing.assert_array_equal(block._words, before)


def test_memory_of_another_layout() -> None:
    """Guards against: a plugin of another version whose words mean something else."""
    buffer = bytearray(SIZE)
    buffer[:8] = (2 << 32 | 0x42435641).to_bytes(8, "little")
    with pytest.raises(UsageError, match="another version wrote it"):
        ControlBlock(buffer)
    with pytest.raises(UsageError, match="read-only"):
        ControlBlock(bytes(SIZE))


def test_progress_is_one_word(block: ControlBlock) -> None:
    """Guards against: a round of one execution with the version of another."""
    block._words[PROGRESS] = np.uint64((2**32 - 1) << 32 | 41)
    assert block.progress() == Progress(41, -1)
    block._words[PROGRESS] = np.uint64(17 << 32 | 42)
    assert block.progress() == Progress(42, 17)


def test_layout_is_the_kernels() -> None:
    """Guards against: a number changed on one side, which would read budgets as coefficients."""
    text = KERNEL.read_text("utf-8")
    assert f"MAX_COEFFICIENTS = {MAX_COEFFICIENTS};" in text
    assert f"PROGRESS = {PROGRESS}, SLOTS = {SLOTS}, HEADER_WORDS = 4;" in text
    assert "NUM_SLOTS = 2, MODE = 0, ROUND = 1, BUDGET = 2, FLOOR = 3, TRIM = 1;" in text
    assert f"MAX_ATTEMPTS = {control_block.MAX_ATTEMPTS};" in text
    assert SLOTS * 8 + 2 * SLOT_WORDS * 8 <= SIZE


def _write(name: str, stop: Any) -> None:
    block = ControlBlock.shared(name, create=False)
    count = 0
    while not stop.is_set():
        block.write(budget=count, coefficients=[count] * MAX_COEFFICIENTS, round=count)
        count = (count + 1) % 2**20


def test_reads_while_another_process_writes() -> None:
    """Guards against: torn reads of shared memory, and a reader that never gets anything."""
    name = f"av_test_{uuid.uuid4().hex}"
    block = ControlBlock.shared(name, create=True)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_write, args=(name, stop))
    writer.start()
    try:
        budgets = set()
        ends = threading.Event()
        timer = threading.Timer(20, ends.set)
        timer.start()
        while len(budgets) < 500 and not ends.is_set():
            found = block.read(2**21)
            if found is not None:
                assert set(found.coefficients) == {float(found.budget)}
                assert found.round == found.budget
                budgets.add(found.budget)
        timer.cancel()
        assert len(budgets) >= 50  # as far as a busy machine gets
    finally:
        stop.set()
        writer.join(10)
        block.unlink()


def test_the_process_finds_its_block_by_name_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: a worker that trims with another rank's block, or with one nobody writes."""
    name = f"av_test_{uuid.uuid4().hex}"
    monkeypatch.setenv("TRTLLM_AV_CONTROL_BLOCK", name)
    control_block.process_block.cache_clear()
    with pytest.raises(UsageError, match="start the process that creates it first"):
        control_block.process_block()
    blocks = [ControlBlock.shared(name, create=True), ControlBlock.shared(f"{name}.3", create=True)]
    try:
        for budget, block in enumerate(blocks):
            block.write(budget=budget, coefficients=[1, 0], round=0)
        for budget in range(2):
            found = control_block.process_block().read(1)
            assert found is not None and found.budget == budget
            monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
            control_block.process_block.cache_clear()
    finally:
        control_block.process_block.cache_clear()
        for block in blocks:
            block.unlink()


def test_shared_memory_that_is_not_there() -> None:
    """Guards against: a traceback where the runtime starts before the engine, or twice."""
    with pytest.raises(UsageError, match="start the process that creates it first"):
        ControlBlock.shared(f"av_test_{uuid.uuid4().hex}", create=False)
    name = f"av_test_{uuid.uuid4().hex}"
    block = ControlBlock.shared(name, create=True)
    try:
        with pytest.raises(UsageError, match=rf"'{name}'.*choose another name"):
            ControlBlock.shared(name, create=True)
    finally:
        block.unlink()


def test_a_library_that_is_no_plugin(tmp_path: Path) -> None:
    """Guards against: an AttributeError of ctypes in place of the command that builds the plugin."""
    (tmp_path / "libother.so").write_text("")
    for path in (tmp_path / "libother.so", tmp_path / "absent.so"):
        with pytest.raises(BuildError, match="trtllm-av-doctor --build-plugin"):
            ControlBlock.of_library(path)
