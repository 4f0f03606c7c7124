"""trtllm-av-build from the command line: engines that load, and one-line errors that leave nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.builder.tiny_target import save_random_head, save_target
from trtllm_av.builder import backend as backend_module
from trtllm_av.builder.cli import main
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.verify import TOLERANCE
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engines.engine_directory import EngineDirectory
from trtllm_av.runtime.engines.gpu import Gpu
from trtllm_av.runtime.errors import CheckpointError, UsageError
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
        if not any(argument.startswith("--backend") for argument in arguments):
            common.append("--backend=onnx")
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
    assert set(report["differences"]) == {"verify.onnx", "draft_step.onnx", "score.onnx"}
    assert max(report["differences"].values()) < 1e-4
    assert report["end_to_end_rounds"] > 20 and report["operations"] == "onnx_functions"
    assert report["num_bytes"] > 0 and report["peak_memory_bytes"] > 0
    assert report["export_memory_bytes"] >= 0 and set(report["seconds"]) == {"export", "verify"}
    digest = CheckpointFiles.find(target).digest()
    loaded = EngineDirectory.load(engine, model_digest=digest)
    assert loaded.build_config["kv_cache_len"] == 48 + 2 * 4
    drafter = loaded.adaptive_verification["drafter"]
    assert (drafter["method"], drafter["vocab_size"]) == ("eagle", 41)
    for name in ("score.onnx", "trim.onnx", "draft_to_target.npy", "tokenizer/tokenizer.json"):
        assert (engine / name).is_file()
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
    assert set(plans) == {"verify.plan", "draft_step.plan", "score.plan", "trim.plan"}
    assert plans["verify.plan"]["layers"]["KV_CACHE_UPDATE"] == 4
    assert plans["verify.plan"]["layers"]["ATTENTION_INPUT"] == 2
    assert plans["verify.plan"]["has_fused_attention"]
    assert plans["draft_step.plan"]["has_fused_attention"]
    assert not (engine / "float32").exists()
    loaded = EngineDirectory.load(engine)
    version = loaded.adaptive_verification["versions"]["tensorrt_rtx"]
    loaded.check_device(Gpu("RTX 4090", 89), version)
    with pytest.raises(
        CheckpointError, match=r"compute capability 89, this GPU has 120 \(RTX 5090\)"
    ):
        loaded.check_device(Gpu("RTX 5090", 120), version)
    with pytest.raises(CheckpointError, match=rf"by tensorrt_rtx {version}, 9.9 is installed"):
        loaded.check_device(Gpu("RTX 4090", 89), "9.9")
    with pytest.raises(CheckpointError, match="there is no GPU here"):
        LLM(engine)


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
        (["--compute_capability=89"], "--compute_capability 89: backend 'onnx' builds for no GPU"),
        (
            ["--backend=tensorrt", "--compute_capability=89"],
            "'tensorrt' builds for the GPU it runs on",
        ),
        (["--backend=tensorrt", "--dtype=float32"], "TensorRT has no attention kernel"),
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

    draft = shutil.copytree(wide, tmp_path / "draft")
    code, _, err = build("--max_seq_len=48", f"--speculative_model={draft}")
    assert code == 1 and "vocabulary of 262 tokens, the target of 261" in err

    save_file({"w": torch.zeros(1)}, tmp_path / "mtp", metadata={"mtp_head": "{}"})
    code, _, err = build("--max_seq_len=48", f"--speculative_model={tmp_path / 'mtp'}")
    assert code == 2 and "is an mtp head, which is not exported" in err

    code, _, err = build("--max_seq_len=48", "--speculative_model=absent.safetensors")
    assert code == 1 and "'absent.safetensors' not found" in err
    assert not engine.parent.exists()


@pytest.mark.parametrize(
    ("installed", "gpu", "capability", "expected"),
    [
        ((), None, None, ("onnx", None)),
        (("tensorrt",), None, None, ("onnx", None)),
        (("tensorrt", "tensorrt_rtx"), Gpu("H200", 90), None, ("tensorrt", None)),
        (("tensorrt", "tensorrt_rtx"), Gpu("H200", 90), 89, ("tensorrt_rtx", 89)),
        (("tensorrt_rtx",), None, None, ("onnx", None)),
        (("tensorrt_rtx",), None, 89, ("tensorrt_rtx", 89)),
        (("tensorrt_rtx",), Gpu("RTX 4090", 89), None, ("tensorrt_rtx", 89)),
        (("tensorrt_rtx",), Gpu("H200", 90), None, ("onnx", None)),
    ],
)
def test_default_backend_is_one_that_can_build(
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    gpu: Gpu | None,
    capability: int | None,
    expected: tuple[str, int | None],
) -> None:
    """Guards against: a default that fails on the machine it was chosen on."""
    monkeypatch.setattr(backend_module, "is_installed", lambda name: name in installed)
    monkeypatch.setattr(backend_module, "current_gpu", lambda: gpu)
    monkeypatch.setattr(backend_module, "import_backend", lambda name: None)
    monkeypatch.setattr(backend_module, "buildable_capabilities", lambda trt: [86, 89, 120])
    choice = backend_module.choose_backend(capability)
    assert (choice.backend, choice.compute_capability) == expected and choice.reason


def test_default_backend_is_printed(
    monkeypatch: pytest.MonkeyPatch, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against: an engine of a kind that the user did not expect."""
    monkeypatch.setattr(backend_module, "is_installed", lambda name: False)
    monkeypatch.setattr(backend_module, "current_gpu", lambda: None)
    arguments = ["trtllm-av-build", f"--output_dir={engine}", "--max_draft_len=0"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        main()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "backend onnx: neither TensorRT with a GPU nor TensorRT-RTX is here"
    assert second.startswith("error: --max_draft_len 0")


BUILD = """
import resource, sys
from pathlib import Path
from trtllm_av.builder.cli import main
limit = int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


def command(engine: Path, target: Path, *, max_file_bytes: int = 0) -> list[str]:
    arguments = [f"--model_dir={target}", f"--output_dir={engine}", "--backend=onnx", *SMALL]
    return [sys.executable, "-c", BUILD, str(max_file_bytes), *arguments]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(engine: Path, target: Path) -> None:
    """Guards against: half an engine after a write that failed in the middle of the weights."""
    result = subprocess.run(
        command(engine, target, max_file_bytes=100_000), capture_output=True, text=True
    )
    assert result.returncode == 1 and result.stdout == ""
    *stages, message = result.stderr.splitlines()
    assert message.startswith(f"error: cannot write the engine to '{engine}'")
    assert all(line.endswith("…") for line in stages)
    assert list(engine.parent.iterdir()) == []


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_loads(engine: Path, target: Path) -> None:
    """Guards against: a folder that looks like an engine after the process was killed outright."""
    with subprocess.Popen(command(engine, target), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("verify"):  # everything is exported, nothing is checked
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    left = list(engine.parent.iterdir())
    assert left and all(path.name.startswith(".engine.") for path in left)
    for path in (engine, *left):
        with pytest.raises(CheckpointError, match="is no engine directory"):
            EngineDirectory.load(path)


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
