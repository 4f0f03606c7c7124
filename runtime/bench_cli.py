"""``trtllm-av-bench report``: diagrams and figures of recorded runs and of load benchmarks.

Exit codes: 0 success, 1 a failed job (a package is missing), 2 wrong usage (a file that cannot be read). A
user's mistake is one line on standard error, never a traceback; with ``--json`` standard output holds
one object.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_av.runtime.console import run_console
from trtllm_av.runtime.errors import UsageError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Looks at what engines did.",
)

_LOADS = ("concurrency", "load")
_FIGURES = (
    "rounds", "emitted", "mean_depth", "mean_budget", "mean_verify_len", "trimmed", "explored_rows",
    "expected_accepted", "checked_accepted", "calibration_error", "cost_error", "refits",
    "untrained_rows", "fallbacks", "coefficients",
)  # fmt: skip


@app.callback()
def _commands() -> None:
    # With a callback "report" stays a word of the command line although it is the only command.
    """Looks at what engines did."""


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Recordings of trtllm-av-run --record (.jsonl), load benchmarks (.json)."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the PNG files.")] = Path("av-report"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Draw reliability, coefficients, histograms and throughput against load."""
    # Heavy imports wait until the command line is known to be right.
    from trtllm_av.runtime.report_plots import draw_run, draw_throughput, throughput_by_load
    from trtllm_av.runtime.run_history import RecordedRun

    runs: list[RecordedRun] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for path in files:
        if path.suffix == ".json":
            found = read_load_benchmark(path)
        else:
            run = RecordedRun.load(path)
            runs.append(run)
            found = {run.name: throughput_by_load(run)}
        if same := curves.keys() & found.keys():
            raise UsageError(
                f"{str(path)!r} and a file before it both hold {min(same)!r}; rename a recording, report "
                "on load benchmarks one by one"
            )
        curves |= found
    curves = {name: points for name, points in curves.items() if points}
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output {output}: {error.strerror}; name a folder that can be written"
        ) from None
    pictures = [picture for run in runs for picture in draw_run(run, output)]
    if curves:
        pictures.append(draw_throughput(curves, output / "throughput.png"))
    figures = {run.name: _figures(run) for run in runs}
    if as_json:
        shown = {"pictures": [str(path) for path in pictures], "runs": figures, "load": curves}
        print(json.dumps(shown), flush=True)
        return
    for name, values in figures.items():
        print(name)
        for key, value in values.items():
            print(f"  {key.replace('_', ' '):22} {_show(value)}")
    print("\n".join(str(path) for path in pictures), flush=True)


def read_load_benchmark(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Curves (load, tokens/s) by mode from a benchmark's JSON: its ``rows`` or ``table``, or the list that it is.

    A row has ``tokens_per_second``, ``concurrency`` (or ``load``) and mostly ``mode``. UsageError for
    anything else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data
        if isinstance(data, dict):
            rows = data["rows"] if "rows" in data else data["table"]
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            load = next(float(row[name]) for name in _LOADS if name in row)
            name = str(row.get("mode", path.stem))
            speed = float(row["tokens_per_second"])
            if not (math.isfinite(load) and math.isfinite(speed)):
                raise ValueError
            curves.setdefault(name, []).append((load, speed))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r} ({error.strerror}); name a file") from None
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        raise UsageError(
            f"{str(path)!r} is no load benchmark: its rows need 'concurrency' (or 'load') and "
            "'tokens_per_second'"
        ) from None
    return {name: sorted(points) for name, points in curves.items()}


def _figures(run: Any) -> dict[str, Any]:
    """The report's figures, or those that the rounds give if the recording has no end."""
    if run.report:
        return {name: run.report.get(name) for name in _FIGURES}
    rounds = run.rounds
    sums = {name: int(rounds[name].sum()) for name in ("emitted", "drafted", "verified")}
    return {"rounds": int(rounds["round"].size), **sums, "complete": False}


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(_show(one) for one in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={count}" for key, count in value.items()) or "none"
    return "–" if value is None else str(value)


def main() -> None:
    """The console script."""
    run_console(app)


if __name__ == "__main__":
    main()
