"""Tables of the serving benchmark: means, intervals, the comparison; prompts; a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serve, serve_report
from benchmarks.serve_setup import read_prompts


def run(mode: str, rate: float, *, concurrency: int = 4) -> dict[str, Any]:
    figures = dict.fromkeys(serve_report._AVERAGED, 1.0)
    figures |= {"tokens_per_second": rate, "tokens_per_second_per_user": rate / concurrency}
    return {"concurrency": concurrency, "mode": mode, "accepted": 3, "verified": 4, **figures}


def test_table_averages_runs_and_states_their_interval() -> None:
    """Guards against: runs of another mode or concurrency in a mean, and an interval of the wrong size."""
    runs = [run("none", rate) for rate in (90.0, 100.0, 110.0)]
    runs += [run("none", 7.0, concurrency=8), run("7", 50.0)]
    table = serve_report.summarise(runs)
    first = table[0]
    assert (first["concurrency"], first["mode"], first["runs"]) == (4, "none", 3)
    assert first["tokens_per_second"] == 100.0
    assert first["half_width"] == pytest.approx(4.303 * 10 / 3**0.5, abs=0.1)
    assert first["acceptance"] == 0.75
    assert [row["half_width"] for row in table[1:]] == [None, None]


@pytest.mark.parametrize(
    ("adaptive", "is_behind"),
    [((98.0, 99.0, 100.0), False), ((95.0, 95.2, 95.1), True), ((99.9, 100.0, 100.1), False)],
)
def test_adaptive_is_compared_with_the_best_other_mode(
    adaptive: tuple[float, ...], is_behind: bool
) -> None:
    """Guards against: a deficit beyond 3 % that a wide interval excuses, and noise that counts as one."""
    runs = [run("3", rate) for rate in (96.0, 100.0, 104.0)]
    runs += [run("7", 60.0), *(run("adaptive", rate) for rate in adaptive)]
    (found,) = serve_report.compare(serve_report.summarise(runs))
    assert found["best_other"] == "3"
    assert found["is_behind"] is is_behind
    assert found["ratio_to_k7"] == pytest.approx(sum(adaptive) / 180.0, abs=1e-3)


def test_prompts_are_token_ids_or_refused(tmp_path: Path) -> None:
    """Guards against: long prompts that change the load, and an empty folder that measures nothing."""
    with pytest.raises(SystemExit, match="holds no"):
        read_prompts(tmp_path, 10)
    (tmp_path / "p.jsonl").write_text('{"text": "x"}')
    with pytest.raises(SystemExit, match="a prompt in each line"):
        read_prompts(tmp_path, 10)
    lines = [{"prompt_token_ids": [1] * length} for length in (3, 11, 10)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert [len(prompt) for prompt in read_prompts(tmp_path, 10)] == [3, 10]
    with pytest.raises(SystemExit, match="allow longer ones"):
        read_prompts(tmp_path, 2)


def test_another_settings_report_is_not_continued(tmp_path: Path) -> None:
    """Guards against: one table out of two experiments."""
    path = tmp_path / "serve.json"
    settings = {"rounds": 96}
    assert serve._resume(path, settings) == {"settings": settings, "runs": []}
    measured = run("none", 1.0) | {"repetition": 0, "passes": 1}
    path.write_text(json.dumps({"settings": settings, "runs": [measured]}))
    assert len(serve._resume(path, settings)["runs"]) == 1
    with pytest.raises(SystemExit, match="other settings"):
        serve._resume(path, {"rounds": 48})


def test_only_what_is_missing_is_measured() -> None:
    """Guards against: measured runs thrown away by a call with other loads or fewer prompts."""
    runs = [run("none", 1.0, concurrency=c) | {"repetition": 0, "passes": 4} for c in (1, 4)]
    assert serve._missing(runs, 1, (1, 4), ("none",), 4) == []
    assert serve._missing(runs, 1, (1, 4, 64), ("none",), 1) == [(0, 64, "none")]
    assert serve._missing(runs, 1, (1, 4), ("none",), 16) == [(0, 1, "none")]
    assert serve._missing(runs, 2, (512,), ("7", "none"), 1)[-1] == (1, 512, "7")  # slow ones last


@pytest.mark.parametrize("text", ["", "[]", '{"settings": {"rounds": 96}, "runs": [{}]}'])
def test_a_damaged_report_is_not_continued(tmp_path: Path, text: str) -> None:
    """Guards against: a traceback, or a report that loses what it held."""
    path = tmp_path / "serve.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="no report to go on with"):
        serve._resume(path, {"rounds": 96})
    assert path.read_text() == text


def test_a_resumed_report_keeps_the_profile_of_other_loads() -> None:
    """Guards against: a report whose costs are those of the last call alone."""
    old = {"unit": "ms", "buckets": [{"requests": 1, "x": 0}, {"requests": 64, "x": 0}]}
    new = {"unit": "ms", "buckets": [{"requests": 64, "x": 1}, {"requests": 4, "x": 1}]}
    joined = serve._joined(old, new)["buckets"]
    assert [(bucket["requests"], bucket["x"]) for bucket in joined] == [(1, 0), (4, 1), (64, 1)]
    assert serve._joined(None, new)["buckets"][0]["requests"] == 4


def test_plot_is_written(tmp_path: Path) -> None:
    """Guards against: a benchmark that fails after the last run."""
    runs = [
        run(mode, 10.0 * c, concurrency=c) for c in (1, 4) for mode in ("none", "7", "adaptive")
    ]
    report = {"settings": {"target_load": "llama-8b"}, "table": serve_report.summarise(runs)}
    serve_report.print_tables(report)
    serve_report.save_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
