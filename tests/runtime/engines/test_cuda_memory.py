"""What a device engine needs and what happens when it does not get it; copies that do not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.engines.cuda_support import device_engine, random_head, tiny_model
from trtllm_av.plugins import cuda_launch
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engines.cuda import create, graphs, transfer
from trtllm_av.runtime.engines.cuda.create import DraftHead, create_engine, create_executor
from trtllm_av.runtime.engines.cuda.memory import Need, check_memory
from trtllm_av.runtime.engines.cuda.target import SlotCache
from trtllm_av.runtime.engines.cuda.transfer import PinnedRing, carve, carved_bytes
from trtllm_av.runtime.engines.cuda.weights import DecoderWeights
from trtllm_av.runtime.errors import DeviceError, UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def test_listed_sizes_are_those_of_the_tensors(loaded: LoadedModel) -> None:
    """Guards against: a list that promises room which the buffers then do not find."""
    weights = DecoderWeights.copy_of(loaded.model, CPU, torch.bfloat16)
    tensors = [weights.embedding, weights.final_norm, weights.head.weight]
    for layer in weights.layers:
        tensors += [layer.attention_norm, layer.mlp_norm]
        matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
        tensors += [matrix.weight for matrix in matrices]  # biases are too small to list
    held = sum(tensor.nbytes for tensor in tensors)
    assert DecoderWeights.num_bytes(loaded.config, torch.bfloat16) == held
    cache = SlotCache(loaded.config, 3, 50, CPU, torch.float32)
    held = sum(tensor.nbytes for tensor in cache.keys + cache.values)
    assert SlotCache.num_bytes(loaded.config, 3, 50, torch.float32) == held


def test_random_weights_have_the_listed_size(loaded: LoadedModel) -> None:
    """Guards against: a load model of another shape than its configuration says."""
    weights = DecoderWeights.random(loaded.config, CPU, torch.float32)
    copy = DecoderWeights.copy_of(loaded.model, CPU, torch.float32)
    for one, other in zip(weights.layers, copy.layers, strict=True):
        assert one.qkv.weight.shape == other.qkv.weight.shape
        assert one.gate_up.weight.shape == other.gate_up.weight.shape
    assert weights.head.weight.shape == copy.head.weight.shape


def test_too_little_memory_names_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: an out-of-memory error in the middle of the start that names one allocation."""
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    needs = [Need("weights of the target", 1 << 30), Need("KV cache of the target", 5 << 30)]
    with pytest.raises(DeviceError) as raised:
        check_memory(needs, torch.device("cuda:0"))
    text = str(raised.value)
    assert "3.0 GiB free" in text and "needs 6.0 GiB" in text and "\n" not in text
    assert text.index("KV cache of the target 5.00") < text.index("weights of the target 1.00")
    check_memory(needs[:1], torch.device("cuda:0"))


def test_out_of_memory_at_start_is_converted(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: torch's own error where fragmentation or another process took the room."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(create, "DeviceTarget", fail)
    with pytest.raises(DeviceError, match="ran out of memory at start; the engine needs") as raised:
        create_executor(
            loaded,
            DraftHead(*random_head(loaded)),
            device=CPU,
            num_slots=2,
            max_len=32,
            num_positions=3,
        )
    assert "KV cache of the target (2 × 32 positions)" in str(raised.value)


def test_failures_of_a_round_name_the_engine(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: a launch error without a name, or one that also ends another engine."""
    broken, whole = (device_engine(loaded, "off") for _ in range(2))

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nhint")

    for engine in (broken, whole):
        engine.submit([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0))
        engine.step()
    monkeypatch.setattr(broken.device.graphs, "run", fail)
    with pytest.raises(DeviceError, match=r"engine 'cuda'.*illegal memory access") as raised:
        for _ in range(3):
            broken.step()
    assert "\n" not in str(raised.value)
    while whole.has_work:
        whole.step()


def test_other_errors_stay_what_they_are() -> None:
    """Guards against: a bug that is reported as the device's fault."""
    error = RuntimeError("shapes do not match")
    assert graphs.device_error("a round", error) is error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_one_line(loaded: LoadedModel) -> None:
    """Guards against: a model that is loaded first, and torch's assertion."""
    with pytest.raises(DeviceError, match="device 'cpu'"):
        LLM(loaded, device="cuda")
    with pytest.raises(UsageError, match="'tpu' is unknown"):
        LLM(loaded, device="tpu")


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: kernels that fail one by one on a card without their instructions."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(DeviceError, match=r"Old GPU has compute capability 7\.5"):
        create.resolve_device("cuda:0")
    assert cuda_launch.architecture is create.cuda_launch.architecture


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"method": "layer_skip"}, "method='layer_skip'"),
        ({}, "a target without a packaged head"),
        ({"method": "eagle", "soft_labels": True}, "soft_labels"),
        ({"method": "eagle", "early_stop": True}, "early_stop"),
        ({"method": "eagle", "extra_features": ["entropy"]}, "extra_features"),
        ({"method": "eagle", "confidence_source": "head"}, "confidence_source='head'"),
    ],
)
def test_settings_of_the_host_are_refused(
    loaded: LoadedModel, config: dict[str, Any], name: str
) -> None:
    """Guards against: an option that the device path silently ignores."""
    with pytest.raises(UsageError, match=f"{name}.*device 'cpu'"):
        create_engine(
            loaded,
            SpeculativeConfig(**config),
            device="cpu",
            max_batch_size=2,
            max_seq_len=32,
            prefill_chunk=16,
        )


def test_ring_slots_are_not_reused_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: inputs of the next round written over those that a copy still reads."""
    waited: list[int] = []

    class CountedFence(transfer.Fence):
        def wait(self) -> None:
            waited.append(id(self))

    monkeypatch.setattr(transfer, "Fence", CountedFence)
    ring = PinnedRing(3, 64, CPU)
    taken = [ring.take() for _ in range(5)]
    assert len({slot.data.data_ptr() for slot in taken[:3]}) == 3
    assert taken[3] is taken[0] and taken[4] is taken[1]
    assert waited == [id(slot.fence) for slot in taken]


def test_carved_parts_do_not_overlap() -> None:
    """Guards against: two parts of one transfer in the same bytes, or a view that no kernel can read."""
    parts = {
        "a": (torch.int32, (1,)),
        "b": (torch.float64, (3, 2)),
        "c": (torch.int64, (0,)),
        "d": (torch.float32, (5,)),
    }
    data = torch.zeros(carved_bytes(parts), dtype=torch.uint8)
    views = carve(data, parts)
    for number, view in enumerate(views.values(), 1):
        view.fill_(number)
        assert view.numel() == 0 or view.data_ptr() % 16 == data.data_ptr() % 16
    assert [view.unique().tolist() for view in views.values()] == [[1], [2], [], [4]]


def test_cpu_runs_the_whole_start(
    loaded: LoadedModel, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: a profile that measures nothing, or that leaves requests behind in the state."""
    monkeypatch.setattr(create, "find_head", lambda *args: DraftHead(*random_head(loaded)))
    sizes = {"max_batch_size": 2, "max_seq_len": 40, "prefill_chunk": 16}
    config = SpeculativeConfig(num_speculative_tokens=2)
    engine = create_engine(loaded, config, device="cpu", **sizes)
    assert not engine.device.round.state.integers.any()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0))
    tokens = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    assert len(tokens) == 9
    assert engine.report().drafted > 0
    assert len(list(cache_dir.glob("costs-*.json"))) == 1
