"""The tables of docs/estimator.md, written from the study's results.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; everything else in the page is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_av.runtime.errors import UsageError

Result = dict[str, Any]
Results = Mapping[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, head))]
    lines += [["---"] * len(lines[0]), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(rows: Iterable[Result], **key: object) -> list[Result]:
    return [row for row in rows if all(row[name] == value for name, value in key.items())]


def _error(row: Result) -> str:
    return f"{row['ece']:.4f} ({row['ece_low']:.4f}–{row['ece_high']:.4f})"


def _rules(results: Results) -> str:
    rows = [*results["rows_by_drafter"], *results["rows"]]
    pooled = _of(rows, data_set="pooled", position="all")
    names = dict.fromkeys(row["rule"] for row in pooled)
    drafters = [*dict.fromkeys(row["drafter"] for row in pooled if row["drafter"] != "all"), "all"]
    lines = []
    for name in names:
        cells: list[object] = [f"`{name}`"]
        for drafter in drafters:
            found = _of(pooled, rule=name, drafter=drafter)
            if not found:
                cells += ["–", "–", "–"]
                continue
            cells += [f"{found[0]['auc']:.4f}", f"{found[0]['log_loss']:.4f}", _error(found[0])]
        lines.append(cells)
    head = [f"{d}: {what}" for d in drafters for what in ("AUC", "log-loss", "ECE (95 %)")]
    return table(["rule", *head], lines)


def _data_sets(results: Results) -> str:
    rows = [*results["rows_by_drafter"], *results["rows"]]
    chosen = [r for r in _of(rows, position="all") if r["rule"] in ("default", "reference", "tail")]
    keys = dict.fromkeys((row["drafter"], row["data_set"]) for row in chosen)
    lines = []
    for drafter, data_set in keys:
        one = {row["rule"]: row for row in _of(chosen, drafter=drafter, data_set=data_set)}
        lines.append([drafter, data_set, one["default"]["n"], *(_error(one[r]) for r in one)])
    return table(["drafter", "data set", "n", *(f"`{rule}`" for rule in one)], lines)


def _positions(results: Results) -> str:
    rows = _of(results["rows_by_drafter"], data_set="pooled")
    lines = []
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        mine = _of(rows, drafter=drafter)
        for position in dict.fromkeys(row["position"] for row in mine):
            one = {row["rule"]: row for row in _of(mine, position=position)}
            cells: list[object] = [drafter, position, one["default"]["n"]]
            for rule in ("default", "tail", "head", "head_recalibrated"):
                cells.append(
                    f"{one[rule]['auc']:.3f} / {one[rule]['ece']:.4f}" if rule in one else "–"
                )
            lines.append(cells)
    head = ("default", "tail", "head", "head_recalibrated")
    return table(["drafter", "position", "n", *(f"`{r}`: AUC / ECE" for r in head)], lines)


def _runs(results: Results) -> str:
    rows = results["rows_by_run"]
    lines = []
    for drafter, run in dict.fromkeys((row["drafter"], row["run"]) for row in rows):
        one = {row["rule"]: row for row in _of(rows, drafter=drafter, run=run)}
        cells: list[object] = [drafter, run, one["default"]["n"]]
        cells += [_error(one[r]) for r in ("default", "reference", "tail", "soft_labels")]
        lines.append(cells)
    head = ["drafter", "run", "n", "`default`", "`reference`", "`tail`", "`soft_labels`"]
    return table(head, lines)


def _coefficients(results: Results) -> str:
    lines = []
    for row in results["coefficients"]:
        intercepts = " ".join(f"{value:.2f}" for value in row["intercepts"])
        slope = f"{row['slope']:.2f} ± {row['slope_sd']:.2f}"
        lines.append([row["drafter"], row["run"], row["data_set"], slope, intercepts])
    return table(["drafter", "run", "data set", "slope", "intercepts 1 … K"], lines)


def _sweeps(results: Results) -> str:
    rows = results["sweeps"]
    lines = []
    for constant, value in dict.fromkeys((row["constant"], row["value"]) for row in rows):
        found = _of(rows, constant=constant, value=value)
        size = np.array([row["n"] for row in found], np.float64)
        means = [
            float(size @ [row[figure] for row in found] / size.sum())
            for figure in ("log_loss", "auc", "ece")
        ]
        worst = max(row["ece"] for row in found)
        mark = "**" if found[0]["is_default"] else ""
        shown = [f"{mark}{number:.4f}{mark}" for number in (*means, worst)]
        lines.append([constant.replace("_", " "), f"{mark}{value:g}{mark}", *shown])
    return table(["constant", "value", "log-loss", "AUC", "ECE", "worst run's ECE"], lines)


def _drift(results: Results) -> str:
    rows = results["drift"]
    lines = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        cells: list[object] = [f"{rule}"]
        for segment in sorted({row["segment"] for row in rows}):
            found = _of(rows, rule=rule, segment=segment)
            size = np.array([row["n"] for row in found], np.float64)
            first = np.mean([row["log_loss_first"] for row in found])
            rest, error = (size @ [r[f] for r in found] / size.sum() for f in ("log_loss", "ece"))
            cells.append(f"{first:.4f} / {rest:.4f} / {error:.4f}")
        lines.append(cells)
    names = dict.fromkeys(row["data_set"] for row in rows)
    return table(["rule", *(f"{name}: first 2,000 / rest / ECE" for name in names)], lines)


def _recordings(results: Results) -> str:
    lines = [
        [
            one["drafter"], one["run"], one["drafts"], one["temperature"], one["top_p"],
            "yes" if one["is_trimmed"] else "no", one["num_rows"], one["dtype"],
        ]
        for one in results["recordings"]
    ]  # fmt: skip
    head = ["drafter", "run", "drafts", "temperature", "top-p", "trimmed", "rows at once", "dtype"]
    return table(head, lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "recordings": _recordings,
    "rules": _rules,
    "data sets": _data_sets,
    "runs": _runs,
    "positions": _positions,
    "coefficients": _coefficients,
    "sweeps": _sweeps,
    "drift": _drift,
}


def fill(text: str, results: Results) -> str:
    """``text`` with its tables made anew; UsageError for one that it has no place for."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        match = pattern.search(text)
        if match is None:
            raise UsageError(f"the page has no place <!-- {name} --> … <!-- /{name} -->; add it")
        text = f"{text[: match.end(1)]}{make(results)}\n{text[match.start(2) :]}"
    return text


def fill_page(path: Path, results: Results) -> None:
    """Write the tables of ``path``."""
    path.write_text(fill(path.read_text(encoding="utf-8"), results), encoding="utf-8")
