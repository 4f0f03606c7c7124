"""Engine directories: written whole or not at all, and refused where they do not fit."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_av.builder.engine_dir import check_target, staged, write_config
from trtllm_av.runtime.engines.engine_directory import CONFIG, FORMAT, EngineDirectory, is_engine
from trtllm_av.runtime.errors import BuildError, CheckpointError, UsageError

DIGEST = "a" * 64


def write_engine(folder: Path, content: str = "weights") -> Path:
    with staged(folder) as building:
        (building / "verify.onnx").write_text(content)
        (building / "tokenizer").mkdir()
        (building / "tokenizer" / "tokenizer.json").write_text("{}")
        write_config(building, {"vocab_size": 9}, {"max_draft_len": 4}, {"model_digest": DIGEST})
    return folder


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["adaptive_verification"].update(changes)
    (folder / CONFIG).write_text(json.dumps(config))


def test_written_engine_loads(tmp_path: Path) -> None:
    """Guards against: digests that do not cover the files in sub-folders."""
    engine = EngineDirectory.load(write_engine(tmp_path / "engine"), model_digest=DIGEST)
    assert engine.num_positions == 4 and engine.pretrained_config == {"vocab_size": 9}
    files = engine.adaptive_verification["files"]
    assert sorted(files) == ["tokenizer/tokenizer.json", "verify.onnx"]
    engine.check_draft_len(4)
    with pytest.raises(UsageError, match=r"num_speculative_tokens=5 exceeds max_draft_len=4"):
        engine.check_draft_len(5)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_failed_build_leaves_the_old_engine(tmp_path: Path, error: BaseException) -> None:
    """Guards against: half an engine that loads, or an old one destroyed by a failed build."""
    folder = write_engine(tmp_path / "engine", "old")
    expected = BuildError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), staged(folder) as building:
        (building / "verify.onnx").write_text("new")
        raise error
    assert EngineDirectory.load(folder) and (folder / "verify.onnx").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_an_old_engine_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: the moment in which the old engine is gone and the new one not yet there."""
    folder = write_engine(tmp_path / "engine", "old")
    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if target == folder and (path / "verify.onnx").read_text() == "new":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(BuildError, match="Permission denied"):
        write_engine(folder, "new")
    assert EngineDirectory.load(folder) and (folder / "verify.onnx").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_killed_build_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """Guards against: a folder that is complete enough to load before its build has ended."""
    with staged(tmp_path / "engine") as building:
        (building / "verify.onnx").write_text("weights")
        with pytest.raises(CheckpointError, match="no engine directory"):
            EngineDirectory.load(building)
        assert not (tmp_path / "engine").exists()


def test_a_build_replaces_an_engine_and_nothing_else(tmp_path: Path) -> None:
    """Guards against: a mistyped --output_dir that deletes somebody's files."""
    folder = write_engine(tmp_path / "engine", "old")
    check_target(folder)
    write_engine(folder, "new")
    assert (folder / "verify.onnx").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(tmp_path / "absent")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / CONFIG).write_text('{"model_type": "llama"}')
    for path in (tmp_path / "notes", tmp_path / "notes" / CONFIG):
        with pytest.raises(UsageError, match="exists and is no engine directory"):
            check_target(path)


def test_engines_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Guards against: an engine of another version, checkpoint or build that computes nonsense."""
    folder = write_engine(tmp_path / "engine")
    with pytest.raises(CheckpointError, match=r"checkpoint aaaaaaaaaaaa, not from bbbbbbbbbbbb"):
        EngineDirectory.load(folder, model_digest="b" * 64)
    edit(folder, format=1)
    with pytest.raises(CheckpointError, match=r"has format 1, this package reads format 3"):
        EngineDirectory.load(folder)
    edit(folder, format=FORMAT)
    (folder / "verify.onnx").write_text("damaged")
    with pytest.raises(CheckpointError, match=r"verify.onnx.* is not the file .*SHA-256 \w{12}"):
        EngineDirectory.load(folder)
    (folder / "verify.onnx").unlink()
    with pytest.raises(CheckpointError, match="SHA-256 missing"):
        EngineDirectory.load(folder)


@pytest.mark.parametrize(
    "section, change",
    [
        ("pretrained_config", {"vocab_size": 8}),
        ("build_config", {"max_draft_len": 9}),
        ("adaptive_verification", {"files": {}}),
    ],
)
def test_an_edited_configuration_is_refused(
    tmp_path: Path, section: str, change: dict[str, Any]
) -> None:
    """Guards against: sizes nobody compiled, or a traceback deep in the runtime, after an edit."""
    folder = write_engine(tmp_path / "engine")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config))  # another layout says the same
    assert EngineDirectory.load(folder)
    config[section] |= change
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"was changed after the build .*; build the engine"):
        EngineDirectory.load(folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"adaptive_verification": {"format": 3}}', "[" * 100_000],
    ids=["empty", "list", "object", "no sections", "deep"],
)
def test_a_damaged_configuration_is_one_line(tmp_path: Path, text: str) -> None:
    """Guards against: a traceback for a folder that is something else."""
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match="is not the configuration of an engine"):
        EngineDirectory.load(tmp_path)
    assert is_engine(tmp_path) == ("format" in text)  # and what looks for an engine does not raise
