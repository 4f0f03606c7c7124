"""What ``trtllm-av-run`` prints for people: texts, short tables and the progress bar.

Invariants: results go to standard output, everything about the work itself to standard error; the
progress bar appears only on a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trtllm_av.runtime.api import RequestOutput
from trtllm_av.runtime.compare import Comparison
from trtllm_av.runtime.metrics import RoundReport


@contextmanager
def show_progress(
    description: str, total_tokens: int, *, is_quiet: bool
) -> Iterator[Callable[[int], None]]:
    """A bar over tokens on a terminal's standard error; yields the function that moves it."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=is_quiet or not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=total_tokens)
        yield lambda count: progress.advance(task, count)


@contextmanager
def show_status(text: str, *, is_quiet: bool) -> Iterator[None]:
    """A spinner on a terminal's standard error while something of unknown length runs."""
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def print_outputs(titles: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    """Each text, under its prompt if there are several."""
    for title, output in zip(titles, outputs, strict=True):
        if len(outputs) > 1:
            print(f"── {title}")
        print(output.outputs[0].text.strip("\n"), end="\n\n" if len(outputs) > 1 else "\n")
    print(end="", flush=True)  # a full disk is an error now, not at the interpreter's end


def print_report(report: RoundReport, num_tokens: int, seconds: float) -> None:
    """One table on standard error with what one run did."""
    table = Table(show_header=False)
    for name, value in _figures(report, num_tokens, seconds):
        table.add_row(name, value)
    acceptance = " ".join(_rate(rate) for rate in report.acceptance_by_position)
    table.add_row("acceptance by position", acceptance)
    Console(stderr=True).print(table)


def print_comparison(comparison: Comparison) -> None:
    """The modes side by side, then whether their tokens agree."""
    console = Console(file=sys.stdout)
    table = Table()
    table.add_column("")
    for mode in comparison.modes:
        table.add_column(mode, justify="right")
    results = list(comparison.modes.values())
    figures = [_figures(result.report, result.num_tokens, result.seconds) for result in results]
    for rows in zip(*figures, strict=True):
        table.add_row(rows[0][0], *(value for _, value in rows))
    acceptance = [
        result.report.acceptance_by_position for result in results
    ]  # none has no position
    for position, rates in enumerate(zip_longest(*acceptance), 1):
        table.add_row(f"acceptance, position {position}", *(_rate(rate) for rate in rates))
    console.print(table)
    if comparison.differing is None:
        console.print("sampled tokens differ by mode; --temperature 0 compares them")
        return
    for pair, prompts in comparison.differing.items():
        left, _, right = pair.partition("_vs_")
        verdict = f"tokens differ in prompts {prompts}" if prompts else "identical tokens"
        console.print(escape(f"{left} and {right}: {verdict}"))


def _figures(report: RoundReport, num_tokens: int, seconds: float) -> list[tuple[str, str]]:
    depths = _span(report.depth_min, report.depth_max)
    return [
        ("tokens/s", f"{num_tokens / seconds:.1f}"),
        ("tokens", str(num_tokens)),
        ("rounds", str(report.rounds)),
        ("drafted", str(report.drafted)),
        ("verified", str(report.verified)),
        ("accepted", str(report.accepted)),
        ("mean verify length", f"{report.mean_verify_len:.2f}"),
        ("mean depth (range)", f"{report.mean_depth:.2f} ({depths})"),
        ("budget range", _span(report.budget_min, report.budget_max)),
        ("probe rounds", str(report.probes)),
        ("fallbacks", " ".join(f"{k}={n}" for k, n in sorted(report.fallbacks.items())) or "0"),
    ]


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.2f}"


def _span(low: int | None, high: int | None) -> str:
    return "–" if low is None else f"{low}–{high}"
