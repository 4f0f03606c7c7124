"""Compiling with TensorRT's interface, on a stand-in for the module: plugins, timing cache, progress, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

from tests import tensorrt_double as trt
from tests.builder.tiny_target import save_target
from trtllm_av.builder import plan_compiler
from trtllm_av.builder.cli import main
from trtllm_av.builder.compile import PlanCompiler
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.export_operations import export_score, export_trim
from trtllm_av.builder.progress import BuildProgress
from trtllm_av.runtime.engines import tensorrt_module
from trtllm_av.runtime.engines.engine_directory import EngineDirectory
from trtllm_av.runtime.engines.gpu import Gpu
from trtllm_av.runtime.errors import BuildError, DeviceError, MissingDependencyError, UsageError

PLUGINS = {(name, "1", "trtllm_av") for name in ("ScoreDrafts", "TrimDrafts")}
DEVICE = {"name": "NVIDIA Stand-in", "compute_capability": 89}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """A machine with TensorRT and a GPU, nothing registered yet."""
    monkeypatch.setattr(plan_compiler, "import_backend", lambda name: trt)
    monkeypatch.setattr(plan_compiler, "current_gpu", lambda: Gpu("NVIDIA Stand-in", 89))
    monkeypatch.setattr(
        plan_compiler.tensorrt_plugin, "register", lambda module: module.plugins.update(PLUGINS)
    )
    monkeypatch.setattr(trt, "plugins", set())
    trt.calls.clear()


@pytest.fixture
def trim(tmp_path: Path) -> Path:
    export_trim(3, tmp_path / "trim.onnx")
    return tmp_path / "trim.onnx"


class Phases(BuildProgress):
    """Notes what TensorRT reports."""

    def __init__(self) -> None:
        super().__init__(is_quiet=True)
        self.seen: list[tuple[Any, ...]] = []

    def start(self, phase: str, parent: str | None, num_steps: int) -> None:
        self.seen.append(("start", phase, parent, num_steps))

    def advance(self, phase: str, step: int) -> None:
        self.seen.append(("advance", phase, step))

    def finish(self, phase: str) -> None:
        self.seen.append(("finish", phase))


def compiler(progress: BuildProgress | None = None, **options: Any) -> PlanCompiler:
    quiet = progress or BuildProgress(is_quiet=True)
    return PlanCompiler(trt, "tensorrt", quiet, DEVICE, **options)


SIZES = [{"R": (1, 4, 4)}]


def test_phases_reach_the_progress_bar(trim: Path) -> None:
    """Guards against: a build of minutes that looks dead, and one that a monitor's None stops."""
    progress = Phases()
    compiler(progress).compile(trim, trim.with_suffix(".plan"), SIZES)
    assert progress.seen == [
        ("start", "Building", None, 2),
        ("start", "Timing", "Building", 5),
        ("advance", "Timing", 0),
        ("finish", "Timing"),
        ("finish", "Building"),
    ]
    bar = BuildProgress(is_quiet=True)
    with bar, bar.stage("compile"):
        bar.start("Building", None, 2)
        bar.advance("Building", 0)
        bar.advance("never started", 3)
    assert not bar._tasks  # a phase that an error cut off leaves no bar


def test_timing_cache_is_read_written_and_never_fatal(trim: Path, tmp_path: Path) -> None:
    """Guards against: every build timing every kernel again, or a foreign cache that ends a build."""
    cache, plan = tmp_path / "folder" / "timing.cache", trim.with_suffix(".plan")
    one = compiler(timing_cache=cache)
    one.compile(trim, plan, SIZES)
    assert trt.calls[1] == ("create_timing_cache", b"") and cache.read_bytes() == b"timings"
    trt.calls.clear()
    one.compile(trim, plan, SIZES)
    assert trt.calls[1] == ("create_timing_cache", b"timings")
    cache.write_bytes(b"foreign")
    trt.calls.clear()
    one.compile(trim, plan, SIZES)
    assert trt.calls[1:3] == [("create_timing_cache", b"foreign"), ("create_timing_cache", b"")]
    assert [path.name for path in cache.parent.iterdir()] == ["timing.cache"]
    blocked = tmp_path / "a file" / "timing.cache"
    blocked.parent.write_text("")
    assert compiler(timing_cache=blocked).compile(trim, plan, SIZES).num_bytes > 0


def test_plugins_are_taken_where_they_are_registered(trim: Path, tmp_path: Path) -> None:
    """Guards against: an engine said to hold plugins whose nodes were inlined, and the other way round."""
    export_score(23, 3, torch.float16, tmp_path / "score.onnx")
    with pytest.raises(BuildError, match="made 0 layers of type PLUGIN_V3, expected 1"):
        compiler(has_plugins=True).compile(trim, tmp_path / "t.plan", SIZES, num_plugins=1)
    assert compiler().compile(trim, tmp_path / "t.plan", SIZES).layers.get("PLUGIN_V3") is None
    trt.plugins.update(PLUGINS)
    for source in (trim, tmp_path / "score.onnx"):
        plan = compiler(has_plugins=True).compile(source, tmp_path / "t.plan", SIZES, num_plugins=1)
        assert plan.layers == {"PLUGIN_V3": 1}
    with pytest.raises(BuildError, match="made 1 layers of type PLUGIN_V3, expected 0"):
        compiler().compile(trim, tmp_path / "t.plan", SIZES, num_plugins=1)


def test_plugin_modes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against: `auto` that fails, `enable` that falls back silently, `disable` that registers."""

    def create(mode: str) -> PlanCompiler:
        config = BuildConfig("x", Path("y"), backend="tensorrt", adaptive_verification_plugin=mode)
        return plan_compiler.create_compiler(config, BuildProgress())

    assert create("disable").has_plugins is False and not trt.plugins
    assert create("auto").has_plugins is True and trt.plugins == PLUGINS
    assert create("enable").has_plugins is True

    def refuse(module: Any) -> None:
        raise UsageError("this module cannot hold plugins; use another")

    monkeypatch.setattr(plan_compiler.tensorrt_plugin, "register", refuse)
    assert create("auto").has_plugins is False
    assert "without plugins: this module cannot hold plugins" in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot hold plugins"):
        create("enable")


def test_tensorrt_needs_a_gpu_and_a_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: a build for no device, and an old TensorRT that drops the ragged nodes."""
    monkeypatch.setattr(plan_compiler, "current_gpu", lambda: None)
    config = BuildConfig("x", Path("y"), backend="tensorrt")
    with pytest.raises(DeviceError, match="--backend tensorrt compiles on the GPU it builds for"):
        plan_compiler.create_compiler(config, BuildProgress())
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    assert tensorrt_module.import_backend("tensorrt") is trt
    monkeypatch.setattr(trt, "__version__", "11.0.9")
    with pytest.raises(MissingDependencyError, match=r"TensorRT 11.1 or newer, 11.0.9 is"):
        tensorrt_module.import_backend("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match=r"backend 'tensorrt' needs TensorRT 11.1"):
        tensorrt_module.import_backend("tensorrt")


def test_command_builds_an_engine_with_plugins(
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against: parts that work alone and were never called together, and a directory that does not
    say what its plans need."""
    engine = tmp_path / "engine"
    arguments = [
        f"--model_dir={save_target(tmp_path / 'target')}",
        f"--output_dir={engine}",
        "--backend=tensorrt",
        "--speculative_model=layer_skip",
        "--max_batch_size=2",
        "--max_seq_len=48",
        "--max_draft_len=3",
        "--no_verify",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["trtllm-av-build", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code in (0, None)
    report = json.loads(capsys.readouterr().out)
    assert report["operations"] == "plugin" and report["backend"] == "tensorrt"
    assert report["plans"]["trim.plan"]["layers"] == {"PLUGIN_V3": 1}
    loaded = EngineDirectory.load(engine)
    assert loaded.build_config["device"] == DEVICE
    assert loaded.adaptive_verification["operations"] == "plugin"
    assert loaded.adaptive_verification["versions"]["tensorrt"] == trt.__version__
    assert loaded.pretrained_config["dtype"] == "bfloat16"
    loaded.check_device(Gpu("NVIDIA Stand-in", 89), trt.__version__)
    built = [Path(call[1]).name for call in trt.calls if call[0] == "build"]
    assert built == ["verify.onnx", "draft_step.onnx", "score.onnx", "trim.onnx"]
    assert (cache_dir / f"timing-{trt.__version__}-89.cache").read_bytes() == b"timings"
