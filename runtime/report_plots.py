"""Diagrams of recorded runs, as PNG files; needs the package matplotlib (extra ``report``).

Invariants: a diagram shows what the recording holds and nothing is drawn that it does not hold; no
window is opened and matplotlib's global state is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.errors import MissingDependencyError, UsageError
from trtllm_av.runtime.run_history import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Float64 = NDArray[np.float64]
Curves = Mapping[str, Sequence[tuple[float, float]]]


def draw_run(run: RecordedRun, folder: Path) -> list[Path]:
    """The diagrams of one run, as ``folder``/NAME-WHAT.png; those it has data for."""
    drawings: dict[str, Callable[[Axes], None]] = {}
    if run.report.get("calibration"):
        drawings["reliability"] = lambda axes: _reliability(axes, run)
    if len(run.refits) > 1:
        drawings["coefficients"] = lambda axes: _coefficients(axes, run)
    if run.rounds["round"].size:
        drawings["depth"] = lambda axes: _bars(
            axes, run.rounds["depth"], "drafted positions of a round", "rounds"
        )
        drawings["budget"] = lambda axes: _bars(
            axes, run.rounds["budget"], "draft budget of a round", "rounds"
        )
        drawings["verify_length"] = lambda axes: _verify_lens(axes, run)
    return [save(folder / f"{run.name}-{what}.png", draw) for what, draw in drawings.items()]


def throughput_by_load(run: RecordedRun) -> list[tuple[float, float]]:
    """(live requests, tokens per second of rounds with that many), in rising load."""
    live, emitted, ms = (run.rounds[name] for name in ("live", "emitted", "measured_ms"))
    points = []
    for load in np.unique(live[ms > 0]):
        here = (live == load) & (ms > 0)
        points.append((float(load), float(1e3 * emitted[here].sum() / ms[here].sum())))
    return points


def draw_throughput(curves: Curves, path: Path) -> Path:
    """Tokens per second against load, a line per curve of (load, tokens/s)."""

    def draw(axes: Axes) -> None:
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xlabel("requests decoded at once")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        axes.legend()

    return save(path, draw)


def save(path: Path, draw: Callable[[Axes], None]) -> Path:
    """Draw one diagram into ``path``. UsageError if it cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "diagrams need matplotlib; pip install 'trtllm-adaptive-verification[report]'"
        ) from None
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        path.unlink(missing_ok=True)  # half a picture
        raise UsageError(
            f"cannot write {str(path)!r} ({error.strerror}); name another folder with --output"
        ) from None
    return path


def _reliability(axes: Axes, run: RecordedRun) -> None:
    bins: list[dict[str, Any]] = run.report["calibration"]
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    axes.plot([one["confidence"] for one in bins], [one["acceptance"] for one in bins], marker="o")
    labels = sum(one["count"] for one in bins)
    error = run.report["calibration_error"]
    axes.set_title(f"calibration error {error:.4f}, {labels} drafts")
    axes.set_xlabel("confidence (bins of equal mass)")
    axes.set_ylabel("accepted share")


def _coefficients(axes: Axes, run: RecordedRun) -> None:
    last = int(run.rounds["round"].size)
    refits = [*run.refits, (max(last, run.refits[-1][0]), run.refits[-1][1])]  # held to the end
    at = [round_ for round_, _ in refits]
    for index in range(len(run.refits[0][1])):
        is_slope = index < run.num_features
        number = index + 1 if is_slope else index - run.num_features + 1
        axes.plot(
            at,
            [values[index] for _, values in refits],
            drawstyle="steps-post",
            linewidth=2.0 if is_slope else 1.0,
            label=f"slope {number}" if is_slope else f"intercept {number}",
        )
    axes.set_xlabel("round")
    axes.set_ylabel("coefficient")
    axes.legend(fontsize="small", ncols=2)


def _bars(axes: Axes, values: Float64, label: str, what: str) -> None:
    """A bar per whole number, or bins of equal width where there would be too many."""
    bins = np.arange(values.min(), values.max() + 2) - 0.5
    axes.hist(values, bins=bins.tolist() if bins.size <= 66 else 64)
    axes.set_xlabel(label)
    axes.set_ylabel(what)


def _verify_lens(axes: Axes, run: RecordedRun) -> None:
    rows = run.rounds["verify_lens"].sum(axis=0)
    axes.bar(np.arange(rows.size), rows)
    axes.set_xlabel("verified drafts of a row in a round")
    axes.set_ylabel("rows")
