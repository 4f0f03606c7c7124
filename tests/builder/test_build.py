"""trtllm-av-build from the command line: engines that load, and one-line errors that leave nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builder.tiny_target import save_random_head, save_target
from trtllm_av.builder.cli import main
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.verify import TOLERANCE
from trtllm_av.runtime.engines.engine_directory import EngineDirectory
from trtllm_av.runtime.engines.onnx_executor import OnnxExecutor
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles

pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

Build = Callable[..., tuple[int, str, str]]
SMALL = ("--max_batch_size=2", "--max_seq_len=48", "--max_draft_len=3")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return tmp_path / "out" / "engine"


@pytest.fixture
def build(
    target: Path,
    engine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Build:
    """Exit code, standard output and standard error of one command on the tiny target."""

    def call(*arguments: str, model: Path = target) -> tuple[int, str, str]:
        common = [f"--model_dir={model}", f"--output_dir={engine}"]
        monkeypatch.setattr(sys, "argv", ["trtllm-av-build", *common, *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


def test_onnx_engine_loads(build: Build, engine: Path, target: Path, tmp_path: Path) -> None:
    """Guards against: a directory without what a runtime needs, or differences nobody is told of."""
    head = save_random_head(tmp_path / "head", target)
    code, out, _ = build(*SMALL, "--dtype=float32", f"--speculative_model={head}", "--json")
    assert code == 0
    report = json.loads(out)
    assert set(report["differences"]) == {"verify.onnx", "draft_step.onnx"}
    assert max(report["differences"].values()) < 1e-4
    assert report["num_bytes"] > 0 and report["peak_memory_bytes"] > 0
    digest = CheckpointFiles.find(target).digest()
    loaded = EngineDirectory.load(engine, model_digest=digest)
    assert loaded.build_config["kv_cache_len"] == 48 + 2 * 4
    assert loaded.adaptive_verification["drafter"] == "head"
    executor = OnnxExecutor.from_engine(loaded)
    assert (executor.num_slots, executor.max_len, executor.vocab_size) == (2, 56, 261)
    assert (engine / "trim.onnx").is_file() and (engine / "tokenizer" / "tokenizer.json").is_file()
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


def test_plans_are_built_without_a_gpu(
    build: Build, engine: Path, target: Path, tmp_path: Path
) -> None:
    """Guards against: attention or cache updates that fell back to copies, or a file that onnxruntime
    runs and TensorRT refuses."""
    pytest.importorskip("tensorrt_rtx", reason="needs the `tensorrt-rtx` extra")
    head = save_random_head(tmp_path / "head", target)
    code, out, _ = build(
        *SMALL,
        "--backend=tensorrt_rtx",
        "--compute_capability=89",
        f"--speculative_model={head}",
        "--json",
    )
    assert code == 0
    plans: dict[str, Any] = json.loads(out)["plans"]
    assert set(plans) == {"verify.plan", "draft_step.plan", "trim.plan"}
    assert plans["verify.plan"]["layers"]["KV_CACHE_UPDATE"] == 4
    assert plans["verify.plan"]["layers"]["ATTENTION_INPUT"] == 2
    assert plans["verify.plan"]["has_fused_attention"]
    assert plans["draft_step.plan"]["has_fused_attention"]
    EngineDirectory.load(engine)
    assert not (engine / "float32").exists()


@pytest.mark.slow
def test_the_whole_of_smollm2_builds(build: Build, engine: Path) -> None:
    """Guards against: sizes of a real model that TensorRT-RTX has no kernel for, and rounding over thirty
    layers that the small target does not have."""
    pytest.importorskip("tensorrt_rtx", reason="needs the `tensorrt-rtx` extra")
    code, out, _ = build(
        "--backend=tensorrt_rtx",
        "--compute_capability=89",
        "--max_seq_len=512",
        "--json",
        model=Path("smollm2"),
    )
    assert code == 0
    report = json.loads(out)
    assert report["drafter"] == "smollm2-135m-instruct-eagle.safetensors"
    assert max(report["differences"].values()) < TOLERANCE
    layers = report["plans"]["verify.plan"]["layers"]
    assert layers["ATTENTION_INPUT"] == 30 and layers["KV_CACHE_UPDATE"] == 60
    assert report["plans"]["verify.plan"]["has_fused_attention"]
    assert report["plans"]["draft_step.plan"]["has_fused_attention"]
    EngineDirectory.load(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_draft_len=0"], "--max_draft_len 0 must be from 1 to 16"),
        (["--max_draft_len=17"], "--max_draft_len 17"),
        (["--max_batch_size=0"], "--max_batch_size 0"),
        (["--max_batch_size=586"], "--max_batch_size 586 must be from 1 to 585"),
        (["--max_seq_len=1"], "--max_seq_len 1"),
        (["--max_seq_len=257"], "--max_seq_len 257 exceeds the model's 256 positions"),
        (["--max_seq_len=48", "--max_num_tokens=7"], "--max_num_tokens 7"),
        (["--dtype=int8"], "--dtype 'int8' is unknown; choose one of"),
        (["--backend=tensorrt_llm"], "--backend 'tensorrt_llm' is unknown"),
        (["--backend=tensorrt_rtx"], "needs --compute_capability"),
        (["--compute_capability=89"], "--compute_capability 89 has no use with --backend onnx"),
        (
            ["--backend=tensorrt_rtx", "--compute_capability=89", "--dtype=float32"],
            "--dtype float32: TensorRT-RTX has no attention kernel",
        ),
        (["--adaptive_verification_plugin=enable"], "'onnx' holds no plugins"),
        (
            [
                "--backend=tensorrt_rtx",
                "--compute_capability=89",
                "--adaptive_verification_plugin=enable",
            ],
            "'tensorrt_rtx' holds no plugins",
        ),
        (["--adaptive_verification_plugin=maybe"], "'maybe' is unknown"),
        (["--max_seq_len=48", "--speculative_model=layer_skip"], "only heads are exported"),
        (["--max_seq_len=48", "--speculative_model=smollm2-head"], "not for this model"),
    ],
)
def test_wrong_usage_is_one_line(
    build: Build, engine: Path, arguments: list[str], message: str
) -> None:
    """Guards against: a value that is corrected silently, a traceback, or a folder left behind."""
    code, out, err = build(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not engine.parent.exists()


def test_compute_capability_that_cannot_be_built_for(build: Build) -> None:
    """Guards against: an AttributeError for a GPU that TensorRT-RTX does not know, such as the H200."""
    pytest.importorskip("tensorrt_rtx", reason="needs the `tensorrt-rtx` extra")
    code, _, err = build("--backend=tensorrt_rtx", "--compute_capability=90")
    assert code == 2 and "--compute_capability 90: TensorRT-RTX" in err


def test_checkpoints_that_cannot_be_built(
    build: Build, engine: Path, target: Path, tmp_path: Path
) -> None:
    """Guards against: an engine that cannot read or write text, or drafts for another vocabulary."""
    mute = shutil.copytree(target, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, err = build("--max_seq_len=48", model=mute)
    assert code == 1 and "has no tokenizer" in err and err.count("\n") == 1

    foreign = shutil.copytree(target, tmp_path / "foreign")
    (foreign / "config.json").write_text(json.dumps({"architectures": ["GemmaForCausalLM"]}))
    code, _, err = build(model=foreign)
    assert code == 1 and "architecture GemmaForCausalLM is not supported" in err

    other = save_target(tmp_path / "other", seed=3)
    head = save_random_head(tmp_path / "head", other)
    code, _, err = build("--max_seq_len=48", f"--speculative_model={head}")
    assert code == 1 and "was trained for the target" in err

    config = json.loads((target / "config.json").read_text()) | {"vocab_size": 262}
    wide = shutil.copytree(target, tmp_path / "wide")
    (wide / "config.json").write_text(json.dumps(config))
    code, _, err = build("--max_seq_len=48", model=wide)
    assert code == 1 and "has shape [261, 32], config.json says [262, 32]" in err

    code, _, err = build("--max_seq_len=48", "--speculative_model=absent.safetensors")
    assert code == 1 and "'absent.safetensors' not found" in err
    assert not engine.parent.exists()


def test_profiles_cover_every_pass_of_the_runtime() -> None:
    """Guards against: a round or a prompt chunk that the compiled sizes exclude."""
    config = BuildConfig("x", Path("y"), max_batch_size=5, max_draft_len=3, max_num_tokens=100)
    decode, prefill = config.profiles()["decode"], config.profiles()["prefill"]
    assert decode["T"][0] == 1 and decode["T"][2] == 20 and decode["M"][2] == 4
    assert prefill["T"][2] == prefill["M"][2] == 100
    assert decode["B_plus_1"] == (2, 6, 6)
    for profile in (decode, prefill):
        assert all(low <= usual <= high for low, usual, high in profile.values())
    with pytest.raises(UsageError, match="max_num_tokens"):
        BuildConfig("x", Path("y"), max_num_tokens=0)
