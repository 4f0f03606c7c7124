"""``trtllm-av-build --backend trtllm`` against a double of TensorRT-LLM made from the assumptions."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builder.trtllm_double import RAW, TrtllmDouble, write_checkpoint
from trtllm_av.builder import cli as builder_cli
from trtllm_av.builder.trtllm import cli
from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.builder.trtllm.build import record_settings
from trtllm_av.builder.trtllm.plugin_config import GROUP, PLUGIN_MODES
from trtllm_av.builder.trtllm.settings import CONFIG_VARIABLE, AvSettings, find_settings
from trtllm_av.runtime.engines import trtllm_library
from trtllm_av.runtime.engines.trtllm_engine import TrtllmEngine
from trtllm_av.runtime.errors import (
    BuildError,
    CheckpointError,
    MissingDependencyError,
    UsageError,
)

EAGLE = ["--speculative_decoding_mode", "eagle", "--max_batch_size", "8"]
FORMS = ["dataclass", "pydantic"]


@pytest.fixture(params=FORMS)
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TrtllmDouble:
    return install(monkeypatch, build_config_form=request.param)


def install(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TrtllmDouble:
    made = TrtllmDouble(**changes)
    made.install(monkeypatch)
    monkeypatch.setattr(trtllm_library, "load_plugin_library", lambda path=None: Path("library.so"))
    return made


def build(tmp_path: Path, *flags: str, **checkpoint: Any) -> dict[str, Any]:
    """Build into tmp_path/engine; returns its config.json."""
    folder = write_checkpoint(tmp_path / "checkpoint", **checkpoint)
    output = tmp_path / "engine"
    cli.main(["--checkpoint_dir", str(folder), "--output_dir", str(output), *flags])
    path = output / "config.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def test_flags_round_trip_into_the_engines_configuration(
    tmp_path: Path, double: TrtllmDouble
) -> None:
    """Guards against flags that are parsed and lost: a pydantic BuildConfig drops a subclass's fields."""
    flags = ["--av_min_draft_len", "2", "--av_trace", "disable", "--gemm_plugin", "float16"]
    config = build(tmp_path, *EAGLE, "--adaptive_verification_plugin", "enable", *flags)
    recorded = config["build_config"]["plugin_config"]
    assert recorded["adaptive_verification_plugin"] is True
    assert recorded["av_min_draft_len"] == 2
    assert recorded["av_trace"] is False
    assert recorded["gemm_plugin"] == "float16"  # theirs, untouched
    settings = {"plugin": True, "min_draft_len": 2, "trace": False}
    assert config["pretrained_config"]["adaptive_verification"] == settings
    (call,) = double.builds
    assert call["build_config"].plugin_config.av_settings == AvSettings(**settings)
    assert call["model_cls"].__name__ == "AdaptiveEagleForCausalLM"
    assert (
        call["strip_plan"] is False
        if "strip_plan" in call
        else call["kwargs"] == {"strip_plan": False}
    )


def test_disabled_plugin_changes_nothing(tmp_path: Path, double: TrtllmDouble) -> None:
    """Guards against a stock engine that is built with our class, configuration or record."""
    config = build(tmp_path, *EAGLE, "--adaptive_verification_plugin", "disable")
    (call,) = double.builds
    stock = double.modules["tensorrt_llm.plugin"].PluginConfig
    assert call["model_cls"] is None
    assert type(call["build_config"].plugin_config) is stock
    assert "adaptive_verification" not in config["pretrained_config"]
    assert not [name for name in config["build_config"]["plugin_config"] if name.startswith("av_")]


def test_settings_alone_do_not_make_an_engine_that_trims(
    tmp_path: Path, double: TrtllmDouble
) -> None:
    """Guards against a stock engine that is taken for one that trims, by a key of its checkpoint."""
    flags = [*EAGLE, "--adaptive_verification_plugin"]
    build(tmp_path, *flags, "disable", adaptive_verification=AvSettings().to_dict())
    with pytest.raises(CheckpointError, match="does not trim its drafts"):
        TrtllmEngine.load(tmp_path / "engine")
    build(tmp_path, *flags, "enable", "--av_min_draft_len", "2")
    engine = TrtllmEngine.load(tmp_path / "engine")
    assert (engine.min_draft_len, engine.has_trace, engine.num_levels) == (2, True, 4)


def test_auto_follows_the_checkpoint(
    tmp_path: Path, double: TrtllmDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against auto that trims nothing in silence, or refuses models that it has nothing to do for."""
    build(tmp_path, *EAGLE)
    assert "trimmed by the plugin" in capsys.readouterr().err
    build(tmp_path, architecture="LlamaForCausalLM")
    assert "the stock network" in capsys.readouterr().err
    assert [call["model_cls"] is None for call in double.builds] == [False, True]


def test_names_are_restored_after_the_build(tmp_path: Path, double: TrtllmDouble) -> None:
    """Guards against a process whose later builds are changed by an earlier one, failed or not."""
    command = double.modules["tensorrt_llm.commands.build"]
    before = dict(vars(command))
    build(tmp_path, *EAGLE)
    assert vars(command) == before
    with pytest.raises(UsageError):
        build(tmp_path, *EAGLE, "--max_batch_size", "513")
    assert vars(command) == before


def test_upstream_errors_are_one_line(
    tmp_path: Path, double: TrtllmDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback of TensorRT-LLM for a build that cannot be made."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Engine building failed")

    monkeypatch.setattr(double.modules["tensorrt_llm.commands.build"], "parallel_build", fail)
    with pytest.raises(BuildError, match="AssertionError: Engine building failed"):
        build(tmp_path, *EAGLE)


def test_workers_import_what_is_pickled(tmp_path: Path, double: TrtllmDouble) -> None:
    """Guards against --workers 2, which pickles class and configuration for fresh processes."""
    build(tmp_path, *EAGLE, "--workers", "2", "--max_batch_size", "16")
    (call,) = double.builds
    assert call["workers"] == 2
    for value in (call["model_cls"], type(call["build_config"].plugin_config)):
        assert value.__module__ == "trtllm_av.builder.trtllm.installed"
        assert pickle.loads(pickle.dumps(value)) is value
    restored = pickle.loads(pickle.dumps(call["build_config"].plugin_config))
    assert restored.av_settings == AvSettings()


def test_model_class_file_for_the_stock_command(double: TrtllmDouble) -> None:
    """Guards against a class that lives in the file, which trtllm-build loads under a made-up name."""
    installed = importlib.import_module("trtllm_av.builder.trtllm.installed")
    path = Path(cli.__file__).with_name("model_cls_file.py")
    spec = importlib.util.spec_from_file_location("models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.AdaptiveEagleForCausalLM is installed.AdaptiveEagleForCausalLM


def test_model_class_file_prints_its_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a documented command that needs TensorRT-LLM only to print a path."""
    import runpy

    runpy.run_module("trtllm_av.builder.trtllm.model_cls_file", run_name="__main__")
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "model_cls_file.py" and path.is_file()


def test_dry_run_and_other_ranks_record_nothing(tmp_path: Path, double: TrtllmDouble) -> None:
    """Guards against a record for an engine that is not there, and ranks that write over each other."""
    assert build(tmp_path, *EAGLE, "--dry_run") == {}
    double.rank = 1
    config = build(tmp_path, *EAGLE)
    assert "av_min_draft_len" not in config["build_config"]["plugin_config"] or (
        double.build_config_form == "dataclass"
    )
    assert "adaptive_verification" not in config["pretrained_config"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--av_min_draft_len", "0"], "av_min_draft_len=0"),
        (["--model_cls_file", "mine.py", "--adaptive_verification_plugin", "enable"], "mine.py"),
        (["--max_beam_width", "4"], "--max_beam_width 4"),
    ],
)
def test_wrong_usage_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], named: str
) -> None:
    """Guards against flags whose conflict shows only in the engine."""
    install(monkeypatch)
    with pytest.raises(UsageError, match=named):
        build(tmp_path, *EAGLE, *flags)


def test_enable_needs_the_eagle_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine without EAGLE's inputs because a flag was left out."""
    install(monkeypatch)
    with pytest.raises(UsageError, match="--speculative_decoding_mode None"):
        build(tmp_path, "--adaptive_verification_plugin", "enable")


def test_unreadable_checkpoint_is_a_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against auto that takes a mistyped folder for a model that is no EAGLE one."""
    install(monkeypatch)
    with pytest.raises(UsageError, match="nowhere"):
        cli.main(["--checkpoint_dir", str(tmp_path / "nowhere")])


def test_own_flags_are_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against changed or hidden flags of trtllm-build, whose scripts have to go on working."""
    double = install(monkeypatch)
    stock = {o for a in double._parse_arguments()._actions for o in a.option_strings}
    parser = cli.make_parser()
    ours = {option for action in parser._actions for option in action.option_strings} - stock
    assert ours == {"--adaptive_verification_plugin", "--av_min_draft_len", "--av_trace", "--json"}
    assert f"\n{GROUP}:\n" in parser.format_help()
    (mode,) = [a for a in parser._actions if a.dest == "adaptive_verification_plugin"]
    assert tuple(mode.choices or ()) == PLUGIN_MODES


def test_json_prints_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against output that a script cannot read because a log is mixed in."""
    double = install(monkeypatch)
    command = double.modules["tensorrt_llm.commands.build"]
    stock = command.parallel_build
    monkeypatch.setattr(
        command, "parallel_build", lambda *a, **k: (print("[TRT] [I] log"), stock(*a, **k))
    )
    build(tmp_path, *EAGLE, "--json")
    assert json.loads(capsys.readouterr().out) == {
        "output_dir": str(tmp_path / "engine"),
        **AvSettings().to_dict(),
    }


@pytest.mark.parametrize("version", ["0.21.0", "1.3.0rc1", "2.0"])
def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Guards against a build on an interface that nobody looked at."""
    install(monkeypatch, version=version)
    with pytest.raises(
        BuildError, match=rf"{version} is not supported; .*1\.0\.x, 1\.1\.x, 1\.2\.x"
    ):
        cli.main(["--checkpoint_dir", "x"])


def test_missing_package_names_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an ImportError's traceback on machines without TensorRT-LLM."""
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(MissingDependencyError) as error:
        cli.main(["--checkpoint_dir", "x"])
    for entry in assumptions().versions.values():
        assert entry.container in str(error.value)


@pytest.mark.parametrize(
    ("argv", "rest"),
    [
        (["--backend", "trtllm", "--workers", "2"], ["--workers", "2"]),
        (["--workers", "2", "--backend=trtllm"], ["--workers", "2"]),
        (["--backend", "onnx"], None),
        (["--model_dir", "trtllm"], None),
        (["--backend"], None),
    ],
)
def test_backend_chooses_the_command(argv: list[str], rest: list[str] | None) -> None:
    """Guards against flags of one backend that end up at another."""
    assert cli.trtllm_arguments(argv) == rest


def test_console_script_reaches_the_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a backend that the installed command does not know, and a wrong exit code."""
    install(monkeypatch, version="1.9")
    monkeypatch.setattr(sys, "argv", ["trtllm-av-build", "--backend", "trtllm"])
    with pytest.raises(SystemExit) as exit_code:
        builder_cli.main()
    assert exit_code.value.code == 1
    assert "TensorRT-LLM 1.9 is not supported" in capsys.readouterr().err


def test_record_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """Guards against an engine that trims and does not say it."""
    with pytest.raises(BuildError, match=r"config\.json"):
        record_settings(tmp_path, AvSettings())


def test_settings_come_from_the_first_that_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a checkpoint's key that wins over a flag, or a file that nobody reads."""

    class Config:
        pass

    model, plugin = Config(), Config()
    assert find_settings(model, plugin) == AvSettings()
    path = tmp_path / "settings.json"
    path.write_text('{"min_draft_len": 3}')
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    assert find_settings(model, plugin) == AvSettings(min_draft_len=3)
    model.adaptive_verification = {"min_draft_len": 2}  # type: ignore[attr-defined]
    assert find_settings(model, plugin) == AvSettings(min_draft_len=2)
    plugin.av_settings = AvSettings(plugin=False)  # type: ignore[attr-defined]
    assert find_settings(model, plugin) == AvSettings(plugin=False)
    path.write_text('{"mode": 1}')
    with pytest.raises(UsageError, match="unknown key 'mode'"):
        find_settings(Config(), Config())


def test_data_file_lists_what_the_documents_promise() -> None:
    """Guards against a version that is documented and unknown to the code."""
    assert list(assumptions().versions) == ["1.0", "1.1", "1.2"]
    assert RAW["plugin_config"]["extra"] == "ignore"
