"""Exported networks on onnxruntime against the torch modules that serve the same checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builder.tiny_target import save_random_head, save_target
from trtllm_av.builder.draft_decoder import LayerSkipSource
from trtllm_av.builder.draft_head import HeadSource
from trtllm_av.builder.export import DRAFT_STEP, VERIFY, export_decoder
from trtllm_av.builder.export_operations import export_score, export_trim
from trtllm_av.builder.networks import DecoderNetwork
from trtllm_av.builder.verify import (
    TOLERANCE,
    ragged_batches,
    verify_decoder,
    verify_head_step,
)
from trtllm_av.builder.verify_operations import (
    trim_rounds,
    verify_end_to_end,
    verify_score,
    verify_trim,
)
from trtllm_av.runtime.errors import BuildError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles, load_checkpoint

onnx = pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

K, MAX_LEN = 3, 64


def export(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    files = CheckpointFiles.find(target)
    network = DecoderNetwork(files.config, files.lazy_tensors(), dtype)
    export_decoder(network, dtype, MAX_LEN, folder / VERIFY)
    return folder / VERIFY


@pytest.mark.parametrize("kind", ["llama_biases", "llama3_rope", "qwen2"])
def test_target_equals_the_torch_module(tmp_path: Path, kind: str) -> None:
    """Guards against: an engine without a bias, with another rotation, a wrong tied head, or rows that
    read a neighbour's cache; and a check that cannot fail."""
    target = save_target(tmp_path / "target", kind)
    path = export(tmp_path, target)
    assert verify_decoder(path, load_checkpoint(target).model, K)[0] < TOLERANCE / 10
    other = load_checkpoint(save_target(tmp_path / "other", kind, seed=1))
    with pytest.raises(BuildError, match=r"logits differ .* must not be used"):
        verify_decoder(path, other.model, K)


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


def test_draft_step_equals_the_head(tmp_path: Path) -> None:
    """Guards against: a drafter in the engine that chains another state or reads other output rows."""
    target = save_target(tmp_path / "target")
    path = save_random_head(tmp_path / "head", target)
    source = HeadSource.find(path, CheckpointFiles.find(target))
    source.export(torch.float32, MAX_LEN, tmp_path)
    network = source.network(torch.float32)
    assert verify_head_step(tmp_path / DRAFT_STEP, network, K)[0] < TOLERANCE / 10
    network.output.data = network.output.flip(0)
    with pytest.raises(BuildError, match="logits differ"):
        verify_head_step(tmp_path / DRAFT_STEP, network, K)


def test_layer_skip_shares_the_targets_weights(tmp_path: Path) -> None:
    """Guards against: a drafter of other layers than the runtime's, and weights that are stored twice."""
    target = save_target(tmp_path / "target")
    export(tmp_path, target)
    source = LayerSkipSource(CheckpointFiles.find(target))
    source.export(torch.float32, MAX_LEN, tmp_path)
    assert not (tmp_path / f"{DRAFT_STEP}.data").exists()
    model = load_checkpoint(target).model
    difference, pairs = source.check(tmp_path, model, K)
    assert difference < TOLERANCE / 10 and len(pairs) > 10
    names = [i.name for i in onnx.load(str(tmp_path / DRAFT_STEP)).graph.input]
    assert [name for name in names if "_cache_" in name] == ["k_cache_1", "v_cache_1"]
    with pytest.raises(BuildError, match="logits differ"):
        verify_decoder(tmp_path / DRAFT_STEP, model, K, [0])


def replace_constant(path: Path, name: str, value: float) -> None:
    """Change the constant ``name`` of the file's only local function."""
    model = onnx.load(str(path))
    node = next(n for n in model.functions[0].node if n.output[0] == name)
    del node.attribute[:]
    node.attribute.append(onnx.helper.make_attribute("value_float", value))
    onnx.save(model, str(path))


def test_score_is_checked_alone_and_end_to_end(tmp_path: Path) -> None:
    """Guards against: confidences of an engine that differ where nobody compares them, and a comparison
    of ``verify_lens`` that skips every round or fails where rounding decides."""
    score, trim, width = tmp_path / "score.onnx", tmp_path / "trim.onnx", 23
    export_score(width, K, torch.float32, score)
    export_trim(K, trim)
    assert verify_score(score, width, K) < TOLERANCE / 10
    logits = 3 * torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    noise = 1e-6 * torch.randn(64, width, generator=torch.Generator().manual_seed(1))
    assert verify_end_to_end(score, trim, [(logits, logits + noise)], K) > 30
    flat = torch.zeros(8, width)  # every cut is a tie
    assert 0 < verify_end_to_end(score, trim, [(flat, flat)], K) < 25
    with pytest.raises(BuildError, match="from the drafter's logits verify_lens is"):
        verify_end_to_end(score, trim, [(logits, logits.roll(1, 0))], K)
    replace_constant(score, "f_one", 1.1)  # the temperature that 0 scores as
    with pytest.raises(BuildError, match="features differ from the definition"):
        verify_score(score, width, K)


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
from trtllm_av.builder.export import DTYPES, export_decoder, import_onnx
from trtllm_av.builder.networks import DecoderNetwork
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
import torch._dynamo, torch.onnx
import_onnx()
files = CheckpointFiles.find("smollm2")
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dtype = DTYPES[sys.argv[1]]
network = DecoderNetwork(files.config, files.lazy_tensors(), dtype)
weights = sum(p.numel() * p.element_size() for p in network.parameters())
export_decoder(network, dtype, 256, Path(sys.argv[2]))
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
