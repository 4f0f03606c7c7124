"""trtllm-av-doctor: it looks without failing, tells why not, and tests each path in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_av.builder import doctor, doctor_cli, selftest
from trtllm_av.builder.doctor import Check, Section
from trtllm_av.builder.selftest import PathResult, run_isolated, run_path
from trtllm_av.plugins import plugin_build
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engines.cuda.create import create_engine
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code, standard output and standard error of one command."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trtllm-av-doctor", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            doctor_cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


def test_sections_name_every_path_and_why_not(command: Any) -> None:
    """Guards against: a list that fails where something is missing, or says no without a remedy."""
    code, out, _ = command("--json")
    assert code == 0
    sections = {one["title"]: one["checks"] for one in json.loads(out)["sections"]}
    assert list(sections) == ["packages", "machine", "paths", "TensorRT-LLM interface"]
    usable = {check["name"]: check["is_usable"] for check in sections["paths"]}
    assert usable["torch on the CPU"] is True
    assert {"torch on CUDA", "TensorRT-RTX: run", "TensorRT: build and run"} <= usable.keys()
    assert all(check["detail"] for checks in sections.values() for check in checks)
    code, out, _ = command()
    assert code == 0 and "torch on the CPU" in out


def test_a_check_that_raises_becomes_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: a broken library that hides all other lines."""

    def broken(name: str) -> Any:
        raise ValueError("the libraries\ndo not load")

    monkeypatch.setattr(doctor, "import_backend", broken)
    checks = {check.name: check for check in doctor.paths().checks}
    assert checks["TensorRT: build and run"] == Check(
        "TensorRT: build and run", False, "the libraries do not load"
    )


def test_report_holds_sections_and_results(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: an issue without the versions, and a failed path behind exit code 0."""
    results = {
        "one": PathResult("one", "passed", "72 of 72", 1.0, {"tokens": 72}),
        "two": PathResult("two", "skipped", "no GPU", 1.0),
    }
    monkeypatch.setattr(doctor, "SECTIONS", [lambda: Section("s", [Check("c", True, "1.0")])])
    monkeypatch.setattr(selftest, "PATHS", results)
    monkeypatch.setattr(selftest, "run_isolated", results.__getitem__)
    report = tmp_path / "report.json"
    code, out, err = command("--selftest", f"--report={report}")
    assert code == 0 and "passed: 72 of 72" in out and "self-test two …" in err
    content = json.loads(report.read_text())
    assert content["sections"][0]["checks"][0]["detail"] == "1.0"
    assert [one["status"] for one in content["selftest"]] == ["passed", "skipped"]
    results["two"] = PathResult("two", "failed", "wrong trims", 1.0)
    assert command("--selftest", "--json", f"--report={report}")[0] == 1
    code, out, err = command("--selftest", f"--report={tmp_path / 'absent' / 'report.json'}")
    assert code == 2 and "cannot be written (No such file or directory)" in err
    code, out, err = command("--selftest", f"--report={tmp_path}")
    assert code == 2 and "cannot be written (Is a directory)" in err and "self-test" not in err


def test_an_interrupted_self_test_leaves_no_report(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: an empty file that somebody attaches to an issue."""

    def interrupt(name: str) -> PathResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "SECTIONS", [])
    monkeypatch.setattr(selftest, "run_isolated", interrupt)
    assert command("--selftest", f"--report={tmp_path / 'report.json'}")[0] == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.abort()", "its process ended with -6"),
        ("import sys; sys.exit('no kernel image')", "ended with 1: no kernel image"),
        ("print('hello')", "printed no result"),
        ("", "its process ended with 0: no message"),
    ],
)
def test_a_path_that_ends_its_process_is_a_result(program: str, message: str) -> None:
    """Guards against: one crash that hides what the other paths do."""
    result = run_isolated("tensorrt", [sys.executable, "-c", program])
    assert (result.path, result.status) == ("tensorrt", "failed") and message in result.detail


def test_what_a_path_raises_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: a traceback instead of a line, or a missing package that counts as a failure."""

    def broken(model: Path, folder: Path) -> Any:
        assert (model / "tokenizer.json").is_file()
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setitem(selftest.PATHS, "broken", broken)
    result = run_path("broken")
    assert (result.status, result.detail) == ("failed", "ZeroDivisionError: one two")
    assert run_path("tensorrt").status == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch-cpu", "onnxruntime", "tensorrt-rtx"])
def test_paths_of_this_machine_pass(name: str) -> None:
    """Guards against: a self-test that cannot pass, or passes without a token compared."""
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")
    if name == "tensorrt-rtx":
        pytest.importorskip("tensorrt_rtx", reason="needs the `tensorrt-rtx` extra")
    result = run_isolated(name)
    assert result.status in ("passed", "built, not run"), result.detail
    if result.status == "passed":
        assert result.figures["equal_with_drafts"] == result.figures["tokens"] > 0


@pytest.mark.cuda
def test_the_path_of_a_gpu_passes() -> None:
    """Guards against: a self-test that a GPU cannot pass."""
    result = run_isolated("torch-cuda")
    assert result.status == "passed", result.detail
    assert result.figures["equal_with_drafts"] == result.figures["tokens"] > 0


def test_the_head_of_the_self_test_drafts_and_changes_no_token(tmp_path: Path) -> None:
    """Guards against: a self-test on a GPU whose drafter is refused there, or is never used."""
    model = selftest.write_model(tmp_path / "model")
    head = selftest.write_head(tmp_path / "head.safetensors", model)
    engine = create_engine(
        load_checkpoint(model),
        SpeculativeConfig(method="eagle", model=str(head), num_speculative_tokens=3),
        device="cpu",  # the code of a GPU, without its graphs
        max_batch_size=4,
        max_seq_len=192,
        prefill_chunk=256,
        cost_table=selftest._COSTS,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.submit(list(range(20, 40)), params)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    (expected,) = LLM(str(model), max_seq_len=192).generate([list(range(20, 40))], params)
    assert tokens == expected.outputs[0].token_ids
    assert engine.report().drafted > 0


def test_a_wrong_engine_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against: a comparison that passes whatever the path computes."""
    model = selftest.write_model(tmp_path / "model")
    honest = selftest.generate(str(model), None)
    wrong = [[(tokens[0] + 1) % 257, *tokens[1:]] for tokens in honest]
    monkeypatch.setattr(selftest, "generate", lambda model, speculative, **options: honest)
    status, detail, _ = selftest._compare_tokens(str(model), wrong, {})
    assert status == "failed" and detail.startswith("69 of 72 greedy tokens")


def test_plugin_is_built_into_its_default_place(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: a library that the runtime does not find, and a refusal with a traceback."""
    library = tmp_path / "plugin.so"
    monkeypatch.setenv("TRTLLM_AV_PLUGIN", str(library))
    asked: list[tuple[Path, Path]] = []

    def build(include_dir: Path, output: Path) -> Path:
        asked.append((include_dir, output))
        return output

    with monkeypatch.context() as patch:
        patch.setattr(plugin_build, "build_plugin", build)
        code, out, _ = command("--build-plugin=/usr/include", "--json")
    assert code == 0 and json.loads(out) == {"library": str(library)}
    assert asked == [(Path("/usr/include"), library)]
    code, _, err = command(f"--build-plugin={tmp_path}")
    assert code == 1 and err.count("\n") == 1 and "NvInferRuntime.h" in err
    assert command("--build-plugin=/usr/include", "--selftest")[0] == 2
