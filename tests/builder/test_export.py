"""Exported networks on onnxruntime against the torch modules that serve the same checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builder.tiny_target import save_random_head, save_target
from trtllm_av.builder.draft_head import find_head
from trtllm_av.builder.export import export_draft_step, export_target, export_trim
from trtllm_av.builder.networks import TargetNetwork
from trtllm_av.builder.verify import (
    TOLERANCE,
    ragged_batches,
    trim_rounds,
    verify_draft_step,
    verify_target,
    verify_trim,
)
from trtllm_av.runtime.errors import BuildError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles, load_checkpoint

onnx = pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

K, MAX_LEN = 3, 64


def export(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    files = CheckpointFiles.find(target)
    network = TargetNetwork(files.config, files.lazy_tensors(), dtype)
    export_target(network, dtype, MAX_LEN, folder / "verify.onnx")
    return folder / "verify.onnx"


@pytest.mark.parametrize("kind", ["llama_biases", "llama3_rope", "qwen2"])
def test_target_equals_the_torch_module(tmp_path: Path, kind: str) -> None:
    """Guards against: an engine without a bias, with another rotation, a wrong tied head, or rows that
    read a neighbour's cache; and a check that cannot fail."""
    target = save_target(tmp_path / "target", kind)
    path = export(tmp_path, target)
    assert verify_target(path, load_checkpoint(target).model, K) < TOLERANCE / 10
    other = load_checkpoint(save_target(tmp_path / "other", kind, seed=1))
    with pytest.raises(BuildError, match=r"logits differ .* must not be used"):
        verify_target(path, other.model, K)


def test_file_holds_native_nodes_their_functions_and_the_weights_once(tmp_path: Path) -> None:
    """Guards against: a file that only one engine can read, or that stores a tied embedding twice."""
    target = save_target(tmp_path / "target", "qwen2")
    path = export(tmp_path, target, torch.bfloat16)
    model = onnx.load(str(path), load_external_data=False)
    native = [node.op_type for node in model.graph.node if node.domain == "trt"]
    assert native.count("TRT_KVCacheUpdate") == 4 and native.count("TRT_Attention") == 2
    assert {f.name for f in model.functions} == {"TRT_KVCacheUpdate", "TRT_Attention"}
    num_weights = sum(tensor.numel() for tensor in CheckpointFiles.find(target).tensors().values())
    num_bytes = path.with_suffix(".onnx.data").stat().st_size
    # Vectors of a few bytes stay in the file itself.
    assert 1.9 * num_weights < num_bytes < 2.1 * num_weights
    logits = next(value for value in model.graph.output if value.name == "logits")
    assert logits.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16


def test_draft_step_equals_the_head_and_the_score(tmp_path: Path) -> None:
    """Guards against: a drafter in the engine that chains another state, or scores other logits."""
    target = save_target(tmp_path / "target")
    files = CheckpointFiles.find(target)
    tensors = files.lazy_tensors()
    head = find_head(str(save_random_head(tmp_path / "head", target)), files.config, tensors)
    assert head is not None
    network = head.network(files.config, tensors, torch.float32)
    path = tmp_path / "draft_step.onnx"
    export_draft_step(network, torch.float32, MAX_LEN, K, path)
    arguments = (network.head, network.embedding, network.output)
    assert verify_draft_step(path, *arguments, K) < TOLERANCE / 10
    with pytest.raises(BuildError, match="draft_logits differ"):
        verify_draft_step(path, network.head, network.embedding, network.output.flip(0), K)


def test_trim_check_finds_a_changed_tie_rule(tmp_path: Path) -> None:
    """Guards against: a check of ``verify_lens`` that never meets a tie."""
    path = tmp_path / "trim.onnx"
    export_trim(K, path)
    verify_trim(path, K)
    model = onnx.load(str(path))
    ranks = next(n for n in model.functions[0].node if n.output[0] == "is_earlier")
    ranks.op_type = "Greater"  # later requests first
    onnx.save(model, str(path))
    with pytest.raises(BuildError, match="verify_lens"):
        verify_trim(path, K)


def test_check_meets_every_kind_of_row() -> None:
    """Guards against: a build that is called checked, on batches without the cases that break."""
    batches = list(ragged_batches(97, MAX_LEN, K))
    lengths = [batch.lengths.tolist() for batch in batches]
    assert [1] in lengths and [K + 1] in lengths and [K + 1] * 4 in lengths
    assert any(max(n) > K + 1 for n in lengths)  # a prompt chunk
    assert any(len(n) < 4 for n in lengths)  # idle slots
    assert any(batch.slots.tolist() != sorted(batch.slots.tolist()) for batch in batches)
    assert any(
        (batch.kv_lens > 0).any() and len(set(batch.lengths.tolist())) > 1 for batch in batches
    )
    cases = list(trim_rounds(K))
    assert any(case["draft_budget"] == 0 for case in cases)
    assert any(case["min_verify_lens"].any() for case in cases)
    assert any((case["base_lens"] == 0).any() for case in cases)
    assert any(np.isnan(case["confidence"]).any() for case in cases)


MEASURE = """
import resource, sys
from pathlib import Path
from trtllm_av.builder.export import DTYPES, export_target, import_onnx
from trtllm_av.builder.networks import TargetNetwork
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
import torch._dynamo, torch.onnx
import_onnx()
files = CheckpointFiles.find("smollm2")
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dtype = DTYPES[sys.argv[1]]
network = TargetNetwork(files.config, files.lazy_tensors(), dtype)
weights = sum(p.numel() * p.element_size() for p in network.parameters())
export_target(network, dtype, 256, Path(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - base) * 1024 / weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_needs_little_more_memory_than_the_weights(tmp_path: Path, dtype: str) -> None:
    """Guards against: an export that copies the weights several times and dies on a large model."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, dtype, str(tmp_path / "verify.onnx")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout.split()[-1]) <= 2.5
