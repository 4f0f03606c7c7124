"""The exported verify pass behind the scheduler's face: precision, refusals, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trtllm_av.builder.export import export_decoder
from trtllm_av.builder.networks import DecoderNetwork
from trtllm_av.runtime.engines.onnx_plan import OnnxPlan
from trtllm_av.runtime.engines.plan_executor import PlanExecutor
from trtllm_av.runtime.engines.torch_executor import TorchExecutor
from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import CheckpointFiles, LoadedModel, load_checkpoint

pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

K, NUM_SLOTS, MAX_SEQ_LEN = 3, 4, 96
MAX_LEN = MAX_SEQ_LEN + 2 * (K + 1)


def export(target: str | Path, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    files = CheckpointFiles.find(target)
    network = DecoderNetwork(files.config, files.lazy_tensors(), dtype)
    export_decoder(network, dtype, MAX_LEN, path)
    return path


@pytest.fixture
def target(tiny_target: Path) -> Path:
    return tiny_target


@pytest.fixture
def file(tiny_engine: Path) -> Path:
    return tiny_engine / "verify.onnx"


def open_file(file: Path, loaded: LoadedModel) -> PlanExecutor:
    plan = OnnxPlan(file, num_slots=NUM_SLOTS)
    return PlanExecutor(plan, vocab_size=loaded.config.vocab_size)


def test_half_precision_file_runs(target: Path, tmp_path: Path) -> None:
    """Guards against: a dtype that is a parameter in name only."""
    loaded = load_checkpoint(target)
    executor = open_file(export(target, tmp_path / "f16.onnx", torch.float16), loaded)
    batch = PackedBatch.from_lists([[5, 6, 7]], [2], [0])
    logits, hidden = executor.verify(batch)
    assert logits.dtype == hidden.dtype == torch.float16 and executor.identity.dtype == "float16"
    expected, _ = TorchExecutor(loaded, num_slots=NUM_SLOTS, max_len=MAX_LEN).verify(batch)
    assert (logits.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_files_that_cannot_run_are_refused_in_one_line(target: Path, tmp_path: Path) -> None:
    """Guards against: onnxruntime's error for a bfloat16 file, which names an operator and no remedy."""
    loaded = load_checkpoint(target)
    with pytest.raises(CheckpointError, match=r"exported with --dtype float32 or float16") as error:
        open_file(export(target, tmp_path / "bf16.onnx", torch.bfloat16), loaded)
    assert "\n" not in str(error.value)
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"onnxruntime refuses .*empty.onnx"):
        open_file(tmp_path / "empty.onnx", loaded)


def test_batches_that_would_leave_the_cache_are_refused(file: Path, target: Path) -> None:
    """Guards against: a write behind the cache, which an engine ignores silently, and two rows of one
    slot, of which one would be lost."""
    executor = open_file(file, load_checkpoint(target))
    with pytest.raises(ValueError, match=f"reaches {MAX_LEN + 1} tokens"):
        executor.verify(PackedBatch.from_lists([[1, 2]], [0], [MAX_LEN - 1]))
    for slots in ([1, 1], [0, NUM_SLOTS], [-1, 0]):
        with pytest.raises(ValueError, match="must be distinct and below"):
            executor.verify(PackedBatch.from_lists([[1], [2]], slots, [0, 0]))
