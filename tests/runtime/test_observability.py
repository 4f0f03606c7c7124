"""An engine's counters, refits and forecasts, and their faces: report, Prometheus, recording, diagrams."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.runtime import bench_cli, cli
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.errors import RecordingError, UsageError
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig
from trtllm_av.runtime.prometheus import EngineCollector, start_exporter
from trtllm_av.runtime.round_log import RoundLog
from trtllm_av.runtime.run_history import RecordedRun, RunRecorder

K = 3
HEAD = '{"kind": "run", "format": 1, "mode": "off", "num_positions": 4, "num_features": 1}\n'
CONFIG = SpeculativeConfig(method="layer_skip", num_speculative_tokens=K, skip_layers=[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=2)


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path]:
    """An engine that ran, and the recording of its second call."""
    llm = LLM(str(folder), CONFIG, max_batch_size=4, cost_table=cheap_draft_costs())
    prompts = [[5, 6, 7 + n] for n in range(6)]
    llm.generate(prompts, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    llm.reset_report()
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    with RunRecorder(llm.engine, path):
        params = [
            SamplingParams(max_tokens=130 + 20 * n, seed=n, ignore_eos=True) for n in range(6)
        ]
        llm.generate(prompts, params)
    return llm, path


def add(log: RoundLog, draft: list[int], verify: list[int], accept: list[int], **more: int) -> None:
    lens = (torch.tensor(values, dtype=torch.int32) for values in (draft, verify, accept))
    numbers = {"budget": 4, "decided_budget": 5, "emitted": 6, "explored": 1, "version": 2} | more
    log.add(*lens, seconds=0.5, is_probe=True, **numbers)


def test_log_adds_up_what_it_was_given() -> None:
    """Guards against rows of an earlier round that are still in the buffer, and rounds counted twice."""
    cost_model = CostModel.from_table(cheap_draft_costs(), num_positions=K)
    log = RoundLog(K, 4, cost_model, capacity=2)
    add(log, [3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3])
    log.take()
    add(log, [3, 2], [2, 0], [1, 0])
    add(log, [0], [0], [0], budget=0)
    assert log.is_full
    report = RoundReport(K)
    report.add_rounds(log.take())
    report.add_rounds(log.take())  # empty by now
    assert (report.rounds, report.row_rounds, report.probes) == (2, 3, 2)
    assert (report.drafted, report.verified, report.accepted) == (5, 2, 1)
    assert (report.trimmed, report.emitted, report.explored_rows) == (3, 12, 2)
    assert report.drafted_by_position == [2, 2, 1]
    assert report.verified_by_position == [1, 1, 0]
    assert report.judged_by_position == [1, 1, 0]
    assert report.accepted_by_position == [1, 0, 0]
    assert report.rounds_by_depth == [1, 0, 0, 1]
    assert report.rows_by_verify_len == [2, 0, 1, 0]
    assert (report.budget_min, report.budget_max, report.budget_sum) == (0, 4, 4)
    assert (report.depth_min, report.depth_max, report.decided_budget) == (0, 3, 10)
    tokens = cost_model.verify_ms(np.array([2 + 2, 1]))
    expected = float(tokens.sum()) + cost_model.draft_ms(2, 3) + cost_model.draft_ms(1, 0)
    assert report.predicted_ms == pytest.approx(expected)
    assert report.measured_ms == pytest.approx(1000.0)
    assert report.cost_error == pytest.approx((1000.0 - expected) / 1000.0)


def test_report_agrees_with_itself(recorded: tuple[LLM, Path]) -> None:
    """Guards against figures of one report that count different rounds."""
    report = recorded[0].report()
    assert report.emitted == report.accepted + report.row_rounds + 6  # the first token of each
    assert sum(report.rounds_by_depth) == report.rounds
    assert sum(report.rows_by_verify_len) == report.row_rounds
    verified = sum(length * rows for length, rows in enumerate(report.rows_by_verify_len))
    assert verified == report.verified
    assert report.refits >= 2
    assert report.coefficient_version >= report.refits
    assert report.calibration_error is not None and 0 <= report.calibration_error < 0.3
    assert report.cost_error is not None and report.predicted_ms > 0
    labels = sum(one.count for one in report.calibration)
    assert 0.8 * sum(report.judged_by_position) < labels  # and soft ones of trimmed positions
    assert json.loads(json.dumps(report.to_dict()))["cost_error"] == report.cost_error


def test_modes_that_do_not_adapt_promise_nothing(folder: Path) -> None:
    """Guards against forecasts and errors of a model of costs that is not there."""
    config = CONFIG.model_copy(update={"enable_adaptive_verification": False, "av_mode": "fixed"})
    llm = LLM(str(folder), config, max_batch_size=2)
    llm.generate([[5, 6]], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    report = llm.report()
    assert report.verified == report.drafted > 0
    assert (report.predicted_ms, report.measured_ms, report.cost_error) == (0.0, 0.0, None)
    assert (report.calibration, report.calibration_error, report.refits) == ([], None, 0)


def test_prometheus_shows_the_report(recorded: tuple[LLM, Path]) -> None:
    """Guards against metrics that were renamed, lost their label, or histograms that do not add up."""
    prometheus_client = pytest.importorskip("prometheus_client")
    report = recorded[0].report()
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector({"one": recorded[0].report}))

    def value(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"trtllm_av_{metric}", {"engine": "one", **labels})

    assert value("rounds_total") == report.rounds
    for stage in ("drafted", "verified", "trimmed", "accepted"):
        assert value("drafts_total", stage=stage) == getattr(report, stage)
    assert (
        value("position_drafts_total", stage="accepted", position="2")
        == (report.accepted_by_position[1])
    )
    assert value("calibration_error") == report.calibration_error
    assert value("coefficient", name="slope_1") == report.coefficients[0]
    assert value("coefficient", name=f"intercept_{K}") == report.coefficients[-1]
    assert value("verify_length_count") == report.row_rounds
    assert value("verify_length_sum") == report.verified
    assert value("verify_length_bucket", le="0") == report.rows_by_verify_len[0]
    assert value("depth_sum") == report.depth_sum
    assert value("expected_accepted_total") == report.expected_accepted


def test_exporter_serves_and_ends(recorded: tuple[LLM, Path]) -> None:
    """Guards against a port that stays open, and a taken port that ends in a traceback."""
    pytest.importorskip("prometheus_client")
    stop = start_exporter({"one": recorded[0].report}, 0)
    stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*another port"):
            start_exporter({"one": recorded[0].report}, port)
    stop = start_exporter({"one": recorded[0].report}, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b'trtllm_av_rounds_total{engine="one"}' in page.read()
    finally:
        stop()


def test_recording_holds_every_round_once(recorded: tuple[LLM, Path]) -> None:
    """Guards against rounds of an earlier call in a recording, lost tails, and refits at the wrong round."""
    llm, path = recorded
    run, report = RecordedRun.load(path), llm.report()
    rounds = run.rounds
    assert rounds["round"].tolist() == list(range(1, report.rounds + 1))
    for name in ("drafted", "verified", "accepted"):
        assert rounds[name].sum() == getattr(report, name)
    assert rounds["verify_lens"].sum(axis=0).tolist() == report.rows_by_verify_len
    assert rounds["budget"].sum() == report.budget_sum
    assert run.report["rounds"] == report.rounds
    assert run.refits[0][0] == 0
    versions = rounds["version"].tolist()
    changes = [n for n, (a, b) in enumerate(pairwise(versions), 1) if a != b]
    assert changes == [at for at, _ in run.refits[1:] if at < report.rounds]
    assert run.refits[-1][1] == pytest.approx(report.coefficients)


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trtllm-av-bench", *args])
        with pytest.raises(SystemExit) as exit_info:
            bench_cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


def test_report_draws_every_diagram(
    recorded: tuple[LLM, Path], bench: Bench, tmp_path: Path
) -> None:
    """Guards against a diagram that is left out, or a picture that is empty."""
    pytest.importorskip("matplotlib")
    load = tmp_path / "load.json"
    rows = [
        {"mode": mode, "concurrency": n, "tokens_per_second": 10.0 * n}
        for mode in ("fixed", "adaptive")
        for n in (4, 1)
    ]
    load.write_text(json.dumps({"rows": rows}))
    code, out, _ = bench(
        "report", str(recorded[1]), str(load), "--output", str(tmp_path / "new"), "--json"
    )
    assert code == 0
    shown = json.loads(out)
    names = {Path(path).name for path in shown["pictures"]}
    kinds = ("reliability", "coefficients", "depth", "budget", "verify_length")
    assert names == {f"run-{kind}.png" for kind in kinds} | {"throughput.png"}
    for path in shown["pictures"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG") and Path(path).stat().st_size > 5000
    assert shown["load"]["fixed"] == [[1.0, 10.0], [4.0, 40.0]]
    assert shown["load"]["run"][0][1] > 0
    assert shown["runs"]["run"]["rounds"] == recorded[0].report().rounds
    code, out, _ = bench("report", str(recorded[1]), "--output", str(tmp_path / "new"))
    assert code == 0 and "calibration error" in out


def test_nothing_of_one_name_is_left_out(
    recorded: tuple[LLM, Path], bench: Bench, tmp_path: Path
) -> None:
    """Guards against a file whose curve or diagrams replace those of another without a word."""
    paths = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "run.jsonl"]
    for path, mode in zip(paths, ("fixed", "fixed", ""), strict=True):
        row = {"mode": mode, "load": 4, "tokens_per_second": 1.0}
        path.write_text(json.dumps([row]) if mode else recorded[1].read_text())
    for pair, name in ((paths[:2], "fixed"), ((recorded[1], paths[2]), "run")):
        code, _, err = bench("report", *map(str, pair), "--output", str(tmp_path / "out"))
        assert code == 2 and f"both hold {name!r}" in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", None, "cannot read the recording"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "{}\n", "line 1"),
        ("a.jsonl", '{"kind": "run", "format": 9}\n', "line 1"),
        ("a.jsonl", '{"kind": "run", "format": 1}\n', "line 1"),
        ("a.jsonl", HEAD.replace("4", '"z"'), "num_positions='z' is no whole number"),
        ("a.jsonl", HEAD + '{"kind": "round"}\n', "line 2"),
        ("a.jsonl", HEAD + "[1]\n", "line 2"),
        ("a.jsonl", HEAD + "[" * 100_000 + "\n{}", "line 2"),
        ("a.jsonl", HEAD + '{"kind": "refit", "round": 1, "coefficients": ["z"]}\n', "line 2"),
        ("a.jsonl", HEAD + '{"kind": "report", "calibration": "z"}\n', "calibration='z'"),
        ("a.json", None, "cannot read"),
        ("a.json", "[1, 2]", "no load benchmark"),
        ("a.json", "[" * 100_000, "no load benchmark"),
        ("a.json", '[{"load": 4, "tokens_per_second": NaN}]', "no load benchmark"),
        ("a.json", '{"rows": [{"concurrency": 4}]}', "no load benchmark"),
    ],
)
def test_bad_files_are_one_line(
    name: str, text: str | None, message: str, bench: Bench, tmp_path: Path
) -> None:
    """Guards against tracebacks, and errors that do not say which file or line."""
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    code, out, err = bench("report", str(path), "--output", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err and name in err


@pytest.mark.parametrize(
    ("name", "value"),
    [("depth", None), ("budget", 1e400), ("live", -1), ("verify_lens", 3), ("measured_ms", "z")],
)
def test_a_damaged_round_is_named(
    recorded: tuple[LLM, Path], bench: Bench, tmp_path: Path, name: str, value: object
) -> None:
    """Guards against a traceback in a diagram, and diagrams of what was not measured."""
    lines = recorded[1].read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines) if '"round", "round": 5,' in line]
    lines[number] = json.dumps(json.loads(lines[number]) | {name: value})
    path = tmp_path / "damaged.jsonl"
    path.write_text("\n".join(lines))
    code, _, err = bench("report", str(path), "--output", str(tmp_path / "out"))
    assert code == 2 and f"line {number + 1} " in err and name in err


def test_a_full_disk_is_named_as_the_recording(folder: Path) -> None:
    """Guards against a traceback, or a standard output that is blamed, minutes into a run."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    llm = LLM(str(folder))
    with (
        pytest.raises(RecordingError, match=r"'/dev/full' \(No space left .*name another file"),
        RunRecorder(llm.engine, Path("/dev/full")),
    ):
        llm.generate(["abc"], SamplingParams(max_tokens=4))
    assert llm.generate(["abc"], SamplingParams(max_tokens=4))  # the engine goes on


def test_recording_of_an_ended_writer_is_read(recorded: tuple[LLM, Path], tmp_path: Path) -> None:
    """Guards against a recording that is lost because its last line is half written."""
    path = tmp_path / "half.jsonl"
    text = recorded[1].read_text()
    path.write_text(text[: text.index('"round", "round": 40') + 30])
    run = RecordedRun.load(path)
    assert run.rounds["round"].size == 39 and run.report == {}


def test_command_records_a_run_and_serves_its_metrics(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against options of trtllm-av-run that are taken and have no effect."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("TRTLLM_AV_CACHE", str(tmp_path / "cache"))
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(cheap_draft_costs()))

    def run(*args: str) -> int:
        common = ["trtllm-av-run", "--model", str(folder), "--cost-table", str(costs)]
        monkeypatch.setattr(sys, "argv", [*common, "--prompt", "abc", *args])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return int(exit_info.value.code or 0)

    path = tmp_path / "run.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert run("--record", str(path), "--metrics-port", port, "--json") == 0
    shown = json.loads(capsys.readouterr().out)["report"]
    recorded = RecordedRun.load(path)
    assert recorded.rounds["emitted"].sum() + 1 == shown["emitted"]  # and the prompt's first token
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run("--metrics-port", str(taken.getsockname()[1])) == 2
    assert "choose another port" in capsys.readouterr().err
    assert run("--record", str(tmp_path / "no" / "run.jsonl")) == 2
    assert "name another file" in capsys.readouterr().err
    assert run("--compare", "--record", str(path)) == 2
    assert "leave --compare out" in capsys.readouterr().err
