"""The executor for TensorRT plans, on a stand-in for the module that runs them with onnxruntime."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

from tests import tensorrt_double as trt
from tests.runtime.engines.tiny_engine import MAX_TOKENS, NUM_SLOTS, K, tiny_config
from trtllm_av.builder.compile import PlanCompiler
from trtllm_av.builder.progress import BuildProgress
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engines import opening
from trtllm_av.runtime.engines.engine_directory import config_digest
from trtllm_av.runtime.engines.gpu import Gpu
from trtllm_av.runtime.engines.onnx_plan import OnnxPlan
from trtllm_av.runtime.engines.plan import PassSizes
from trtllm_av.runtime.engines.plan_pass import PlanPass
from trtllm_av.runtime.engines.tensorrt import TensorRTPlan
from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.params import SamplingParams

GPU = Gpu("NVIDIA Stand-in", 89)
TEXTS = ["The sea is", "Two plus two", "Once upon a time", "def add(a, b):", "A list of colours:"]
COSTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [4, 1.1], [8, 1.6], [16, 4.0]],
    "draft_ms_by_requests": [[1, 0.01], [NUM_SLOTS, 0.02]],
}


@pytest.fixture(scope="module")
def engine(tiny_engine: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine, compiled by the stand-in as ``trtllm-av-build`` compiles one."""
    folder = tmp_path_factory.mktemp("compiled") / "engine"
    config = tiny_config(tiny_target, shutil.copytree(tiny_engine, folder), None)
    quiet = BuildProgress(is_quiet=True)
    compiler = PlanCompiler(trt, "tensorrt", quiet, {"compute_capability": 89, "name": GPU.name})
    profiles = config.profiles()
    for stem, layers in (("verify", 2), ("draft_step", 1), ("score", 0), ("trim", 0)):
        sizes = list(profiles.values()) if layers else [profiles["decode"]]
        source = folder / f"{stem}.onnx"
        compiler.compile(source, source.with_suffix(".plan"), sizes, num_attention_layers=layers)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["build_config"] |= {"backend": "tensorrt", "device": compiler.device}
    content["adaptive_verification"]["versions"] |= compiler.version
    content["adaptive_verification"]["config_digest"] = config_digest(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with that GPU and TensorRT."""
    monkeypatch.setattr(opening, "import_backend", lambda name: trt)
    monkeypatch.setattr(opening, "current_gpu", lambda: GPU)
    monkeypatch.setattr(opening, "CudaDevice", trt.HostDevice)
    trt.calls.clear()
    yield monkeypatch


def open_plan(engine: Path, stem: str = "verify", **options: Any) -> TensorRTPlan:
    device = trt.HostDevice()
    return TensorRTPlan(trt, engine / f"{stem}.plan", device, num_slots=NUM_SLOTS, **options)


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(TEXTS, params)]


def test_greedy_tokens_are_the_torch_executors(
    engine: Path, tiny_target: Path, machine: pytest.MonkeyPatch
) -> None:
    """Guards against: inputs of the wrong shape, type or order, caches that are not updated in place, rows
    of padding that reach a request, and graphs that replay another size."""
    expected = generate(LLM(str(tiny_target), max_batch_size=NUM_SLOTS, max_seq_len=96))
    llm = LLM(engine, {}, cost_table=COSTS)
    assert llm.engine.executor.identity.executor == "tests.tensorrt_double"
    assert generate(llm) == expected
    report = llm.report()
    assert 0 < report.verified < report.drafted
    counts = trt.count_calls()
    assert counts["replay"] > 3 * counts["execute"]


def test_decode_passes_become_graphs_by_bucket_and_prefill_does_not(engine: Path) -> None:
    """Guards against: one graph per mix of rows, which would capture for ever, and a graph of a prompt
    chunk, which comes once."""
    run = PlanPass(open_plan(engine))
    trt.calls.clear()
    for tokens in ([[1], [2]], [[1, 2, 3, 4], [5]], [[9]], [[1, 2, 3], [4, 5, 6], [7]]):
        run(PackedBatch.from_lists(tokens, range(len(tokens)), [0] * len(tokens)))
    assert [call[0] for call in trt.calls] == ["execute", "replay", "replay", "replay"]
    assert trt.calls[0] == ("execute", 0, (8,))  # T in the bucket, under the decode profile
    trt.calls.clear()
    for _ in range(2):
        run(PackedBatch.from_lists([[1] * 6], [3], [0]), torch.tensor([5]))
    assert [call[:2] for call in trt.calls] == [("execute", 1), ("execute", 1)]


def test_nothing_is_allocated_after_the_start(engine: Path) -> None:
    """Guards against: addresses that move under a captured graph."""
    plan = open_plan(engine)
    before = [dict(profile._context.addresses) for profile in plan._profiles]
    run = PlanPass(plan)
    for length in (1, 4, 6, 20):
        run(PackedBatch.from_lists([[1] * length], [0], [0]), torch.tensor([length - 1]))
    assert [profile._context.addresses for profile in plan._profiles] == before
    first, second = before
    for name, address in first.items():
        assert (address == second[name]) == ("_cache_" in name or "_out_" in name)


def test_sizes_outside_every_profile_are_refused(engine: Path) -> None:
    """Guards against: a pass that TensorRT drops with a message on its own log only."""
    plan = open_plan(engine)
    assert plan.sizes(PassSizes(3, 2, 3)) == PassSizes(8, K + 1, 8)
    assert plan.sizes(PassSizes(16, 4, 16)) == PassSizes(16, K + 1, 16)
    assert plan.sizes(PassSizes(20, 20, 1)) == PassSizes(20, 20, 1)
    with pytest.raises(ValueError, match="exceeds what the plan was built for"):
        plan.sizes(PassSizes(MAX_TOKENS + 1, 5, 1))
    with pytest.raises(ValueError, match="no profile of the plan allows"):
        open_plan(engine, "trim").run(
            {
                "confidence": torch.zeros(5, K),
                "draft_lens": torch.zeros(5).int(),
                "base_lens": torch.zeros(5).int(),
                "min_verify_lens": torch.zeros(5).int(),
                "draft_budget": torch.zeros(1).int(),
            },
            ["verify_lens"],
        )


def test_long_rows_run_in_pieces(engine: Path) -> None:
    """Guards against: a drafter that cannot catch up with a prompt longer than the largest pass."""
    tokens = torch.randint(261, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    batch, last = PackedBatch.from_lists([tokens], [1], [0]), torch.tensor([3, 89])
    logits, hidden = PlanPass(open_plan(engine))(batch, last)
    whole = PlanPass(OnnxPlan(engine / "verify.onnx", num_slots=NUM_SLOTS))
    expected_logits, expected_hidden = whole(batch, last)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-4, rtol=0)


def test_caches_are_shared_with_a_second_plan(engine: Path) -> None:
    """Guards against: a drafter of some layers that reads a cache of its own, always empty."""
    first = open_plan(engine)
    second = open_plan(engine, shared_caches=first.caches)
    for name, cache in first.caches.items():
        assert second.caches[name].data_ptr() == cache.data_ptr()


@pytest.mark.parametrize(
    ("gpu", "version", "message"),
    [
        (None, trt.__version__, "there is no GPU here"),
        (Gpu("NVIDIA Other", 90), trt.__version__, r"this GPU has 90 \(NVIDIA Other\)"),
        (GPU, "11.2.0", r"built by tensorrt 11.1.0.42, 11.2.0 is installed"),
    ],
)
def test_plans_of_another_machine_are_refused(
    engine: Path,
    machine: pytest.MonkeyPatch,
    gpu: Gpu | None,
    version: str,
    message: str,
) -> None:
    """Guards against: a plan that crashes, or computes nonsense, on another GPU or version."""
    machine.setattr(opening, "current_gpu", lambda: gpu)
    machine.setattr(trt, "__version__", version)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(engine, {}, cost_table=COSTS)
    assert "NVIDIA Stand-in" in str(error.value) or version != "11.1.0.42"


def test_plans_that_cannot_be_read_are_one_line(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: a None that fails later as an attribute error, and a cache bound to another's output."""
    (tmp_path / "verify.plan").write_bytes(b"no plan")
    with pytest.raises(CheckpointError, match=r"tensorrt_double 11.1.0.42 refuses '.*verify.plan'"):
        open_plan(tmp_path)
    monkeypatch.setattr(trt.CudaEngine, "get_aliased_input_tensor", lambda self, name: "k_cache_0")
    with pytest.raises(CheckpointError, match="'v_out_0' shares the memory of 'k_cache_0'"):
        open_plan(engine)
