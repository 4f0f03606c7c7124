"""Decoding through the exported verify pass: the same scheduler, the same greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.builder.tiny_target import save_random_head, save_target
from trtllm_av.builder.export import export_target
from trtllm_av.builder.networks import TargetNetwork
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.engines.base import Executor
from trtllm_av.runtime.engines.onnx_executor import OnnxExecutor
from trtllm_av.runtime.engines.torch_executor import TorchExecutor
from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import CheckpointFiles, LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import eagle
from trtllm_av.runtime.models.drafters.eagle import PACKAGED_HEADS, EagleDrafter
from trtllm_av.runtime.models.drafters.eagle_head import load_head
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.scheduler import Engine

pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

K, NUM_SLOTS, MAX_SEQ_LEN = 3, 4, 96
MAX_LEN = MAX_SEQ_LEN + 2 * (K + 1)
NUM_TOKENS = 32


def export(target: str | Path, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    files = CheckpointFiles.find(target)
    network = TargetNetwork(files.config, files.lazy_tensors(), dtype)
    export_target(network, dtype, MAX_LEN, path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def file(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(target, tmp_path_factory.mktemp("export") / "verify.onnx")


def open_file(file: Path, loaded: LoadedModel) -> OnnxExecutor:
    return OnnxExecutor(file, num_slots=NUM_SLOTS, vocab_size=loaded.config.vocab_size)


def greedy(
    executor: Executor,
    prompts: list[list[int]],
    drafter: EagleDrafter | None = None,
) -> list[list[int]]:
    """Tokens of each prompt, decoded together; with a drafter, every draft is verified in full."""
    controller = AdaptiveController(
        "fixed" if drafter else "off", K if drafter else 0, NUM_SLOTS, None
    )
    engine = Engine(
        executor, drafter, controller, KeyedSource(), max_seq_len=MAX_SEQ_LEN, prefill_chunk=8
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    order = [engine.submit(prompt, params) for prompt in prompts]
    tokens: dict[int, list[int]] = {request: [] for request in order}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return [tokens[request] for request in order]


def assert_same_tokens(
    file: Path, loaded: LoadedModel, prompts: list[list[int]], head_file: Path
) -> None:
    expected = greedy(TorchExecutor(loaded, num_slots=NUM_SLOTS, max_len=MAX_LEN), prompts)
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(prompts)
    assert greedy(open_file(file, loaded), prompts) == expected
    head, draft_to_target = load_head(head_file)
    drafter = EagleDrafter(
        head, draft_to_target, loaded, num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=K
    )
    assert greedy(open_file(file, loaded), prompts, drafter) == expected


def test_greedy_tokens_are_the_torch_executors(file: Path, target: Path, tmp_path: Path) -> None:
    """Guards against: a cache that is not updated in place, chunks of a prompt that overwrite each
    other, and a slot that is taken over with its last owner's tokens (five prompts, four slots)."""
    generator = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(1, 250, (length,), generator=generator).tolist()
        for length in (1, 5, 9, 20, 33)
    ]
    assert_same_tokens(
        file, load_checkpoint(target), prompts, save_random_head(tmp_path / "head", target)
    )


@pytest.mark.slow
def test_greedy_tokens_of_smollm2(tmp_path: Path) -> None:
    """Guards against: differences that a random model of two layers is too small to show."""
    loaded = load_checkpoint(smollm2.NAME)
    assert loaded.tokenizer is not None
    texts = [
        "The sea is",
        "Two plus two",
        "Once upon a time",
        "def add(a, b):",
        "A list of colours:",
    ]
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    weights = Path(eagle.__file__).with_name("weights") / next(iter(PACKAGED_HEADS.values()))
    file = export(smollm2.NAME, tmp_path / "verify.onnx")
    assert_same_tokens(file, loaded, prompts, weights)


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
