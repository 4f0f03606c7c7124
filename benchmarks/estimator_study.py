"""How well confidences are calibrated: recorded drafts predicted, then learnt from, rule by rule.

Recordings (``benchmarks.record_drafts``) are served again in the product's usual batch. Every draft is
predicted from coefficients that were fitted to earlier rounds, by the product's own estimator for the
rules that are the product's. The first 2,000 labels of an engine are not scored. ``rows`` join all drafters
and runs (greedy and sampled, whole and trimmed drafts), each served by an engine of its own;
``rows_by_drafter`` and ``rows_by_run`` keep them apart. A run at a low temperature, if there is one, serves
the sweep of the temperature floor only.

``python -m benchmarks.estimator_study [--recordings DIR] [--output JSON] [--page MD]``
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.recording.rows import DraftRows
from benchmarks.study.page import fill_page
from benchmarks.study.rules import HEAD_RULES, RULES, Rule
from benchmarks.study.scores import Score, score_predictions
from benchmarks.study.stream import Stream, serve
from benchmarks.study.sweeps import MIN_LABELS, drift, scored, sweep
from trtllm_av.runtime.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
RECORDINGS = ROOT / "tests" / "data" / "drafts"
ALL, POOLED = "all", "pooled"
ECE_BAR, DATA_SET_BAR = 0.010, 0.015
Runs = Mapping[str, DraftRows]
Result = dict[str, Any]


@dataclass(slots=True)
class Scored:
    """Predictions [N], labels (1 accepted), positions and requests of the scored drafts of several streams."""

    chance: NDArray[np.float32]
    label: NDArray[np.bool_]
    position: NDArray[np.int8]
    request: NDArray[np.int32]

    @classmethod
    def of(cls, rule: Rule, streams: list[Stream]) -> tuple[Scored, list[Any]]:
        """``rule`` over each stream from the start; also the coefficients it ended with."""
        parts, fits, offset = [], [], 0
        for stream in streams:
            found = rule(stream)
            mask = scored(stream)
            where = np.nonzero(mask)[1].astype(np.int8)
            request = np.broadcast_to(stream.request[:, None], mask.shape)[mask] + offset
            offset += int(stream.request.max()) + 1
            chance = found.chance[mask].astype(np.float32)
            parts.append((chance, stream.labels[mask] == 1, where, request.astype(np.int32)))
            fits.append(found.fits)
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True))), fits

    @classmethod
    def join(cls, parts: list[Scored]) -> Scored:
        """Drafts of several drafters, none of whose requests are the same."""
        offsets = np.cumsum([0, *(int(part.request.max(initial=0)) + 1 for part in parts)])
        return cls(
            np.concatenate([part.chance for part in parts]),
            np.concatenate([part.label for part in parts]),
            np.concatenate([part.position for part in parts]),
            np.concatenate([p.request + at for p, at in zip(parts, offsets[:-1], strict=True)]),
        )

    def at(self, position: str) -> Score | None:
        """Score of ``all`` positions, ``not1`` or one (from 1 on); None with too few labels."""
        if position == "all":
            mask = np.ones(self.label.size, bool)
        elif position == "not1":
            mask = self.position > 0
        else:
            mask = self.position == int(position) - 1
        if mask.sum() < MIN_LABELS:
            return None
        chance, label = (part[mask].astype(np.float64) for part in (self.chance, self.label))
        return score_predictions(chance, label, self.request[mask].astype(np.int64))


#: Scored drafts by (data set, rule).
Predicted = dict[tuple[str, str], Scored]


def load_runs(folder: Path) -> dict[str, dict[str, DraftRows]]:
    """Recordings in ``folder`` by drafter and run; UsageError if there are none."""
    runs: dict[str, dict[str, DraftRows]] = {}
    for path in sorted(folder.glob("*.npz")):
        rows = DraftRows.load(path)
        runs.setdefault(rows.meta["drafter"], {})[rows.meta["run"]] = rows
    if not runs:
        raise UsageError(
            f"{str(folder)!r} holds no recordings; make some with benchmarks.record_drafts"
        )
    return runs


def rules_for(rows: DraftRows) -> dict[str, Rule]:
    """Those that the recording's drafter has."""
    has_head = bool(np.isfinite(rows.head_logit).all())
    return RULES | HEAD_RULES if has_head else dict(RULES)


def streams_of(runs: Runs, data_set: str) -> list[Stream]:
    """Each run served by itself: one data set, or all of them mixed."""
    streams = []
    for rows in runs.values():
        if data_set != POOLED:
            rows = rows.select(rows.data_set == rows.meta["data_sets"].index(data_set))
        streams.append(serve(rows))
    return streams


def predict(runs: Runs) -> Predicted:
    """Scored drafts by (data set, rule) over all ``runs`` of one drafter."""
    first = next(iter(runs.values()))
    found = {}
    for data_set in (*first.meta["data_sets"], POOLED):
        streams = streams_of(runs, data_set)
        for name, rule in rules_for(first).items():
            found[data_set, name], _ = Scored.of(rule, streams)
    return found


def _join(predictions: Mapping[str, Predicted]) -> Iterator[tuple[tuple[str, str], Scored]]:
    """The same over all drafters that have the rule."""
    for key in dict.fromkeys(key for found in predictions.values() for key in found):
        yield key, Scored.join([found[key] for found in predictions.values() if key in found])


def score_rules(drafter: str, found: Iterable[tuple[tuple[str, str], Scored]]) -> Iterator[Result]:
    """Rows by data set, rule and position."""
    for (data_set, name), one in found:
        deepest = int(one.position.max(initial=0)) + 1
        for position in ("all", "not1", *map(str, range(1, deepest + 1))):
            if (score := one.at(position)) is not None:
                key = {"drafter": drafter, "data_set": data_set, "rule": name}
                yield key | {"position": position} | score.to_dict()


def score_runs(drafter: str, runs: Runs) -> Iterator[Result]:
    """Rows by run and rule, all positions and data sets together."""
    for run, rows in runs.items():
        for name, rule in rules_for(rows).items():
            score = Scored.of(rule, [serve(rows)])[0].at("all")
            if score is not None:
                yield {"drafter": drafter, "run": run, "rule": name} | score.to_dict()


def coefficients(drafter: str, runs: Runs) -> Iterator[Result]:
    """Slope and intercepts of the default rule by run and data set: mean and spread of later refits."""
    for run, rows in runs.items():
        for data_set in (*rows.meta["data_sets"], POOLED):
            _, (fits,) = Scored.of(RULES["default"], streams_of({run: rows}, data_set))
            later = np.stack([values for _, values in fits[len(fits) // 2 :]]).astype(np.float64)
            yield {
                "drafter": drafter,
                "run": run,
                "data_set": data_set,
                "refits": len(fits) - 1,
                "slope": round(float(later[:, 0].mean()), 4),
                "slope_sd": round(float(later[:, 0].std()), 4),
                "intercepts": later[:, 1:].mean(axis=0).round(4).tolist(),
                "intercept_sd": later[:, 1:].std(axis=0).round(4).tolist(),
            }


def check(rows: list[Result]) -> dict[str, bool]:
    """What must hold of the default rule, by drafter: see the names."""
    by_key = {(r["drafter"], r["data_set"], r["rule"], r["position"]): r for r in rows}
    checks: dict[str, bool] = {}
    for (drafter, data_set, rule, position), row in by_key.items():
        if rule != "default":
            continue
        if position == "all":
            bar = ECE_BAR if data_set == POOLED else DATA_SET_BAR
            includes = row["ece_low"] <= ECE_BAR and data_set != POOLED
            checks[f"{drafter}: calibration error on {data_set}"] = row["ece"] <= bar or includes
        other = by_key[drafter, data_set, "reference", position]
        for figure, sign in (("auc", 1), ("log_loss", -1)):
            ours, theirs = (
                row[f"{figure}_high" if sign > 0 else f"{figure}_low"],
                other[f"{figure}_low" if sign > 0 else f"{figure}_high"],
            )
            key = f"{drafter}: {figure} no worse than reference"
            checks[key] = checks.get(key, True) and sign * ours >= sign * theirs
    return checks


def run_study(folder: Path) -> Result:
    """Everything, as JSON values."""
    torch.set_num_threads(1)
    predictions: dict[str, Predicted] = {}
    by_run: list[Result] = []
    fits: list[Result] = []
    sweeps: list[Result] = []
    drifts: list[Result] = []
    recordings = []
    for drafter, all_runs in load_runs(folder).items():
        runs = {run: found for run, found in all_runs.items() if not found.meta["scales"]}
        predictions[drafter] = predict(runs)
        by_run += score_runs(drafter, runs)
        fits += coefficients(drafter, runs)
        for run, recorded in all_runs.items():
            recordings.append(recorded.meta | {"drafts": len(recorded)})
            sweeps += [{"drafter": drafter} | one for one in sweep(run, recorded)]
            order = range(len(recorded.meta["data_sets"]))
            if run not in runs:
                continue
            drifts += [{"drafter": drafter} | one for one in drift(run, recorded, order)]
    rows = list(score_rules(ALL, _join(predictions)))
    by_drafter = [
        row for name, found in predictions.items() for row in score_rules(name, found.items())
    ]
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "labels": sum(one["n"] for one in by_run if one["rule"] == "default"),
        "recordings": recordings,
        "checks": check(rows) | check(by_drafter),
        "rows": rows,
        "rows_by_drafter": by_drafter,
        "rows_by_run": by_run,
        "coefficients": fits,
        "sweeps": sweeps,
        "drift": drifts,
    }


def to_json(results: Result) -> str:
    """JSON with one row a line."""
    parts = []
    for name, value in results.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(row) for row in value)
            parts.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--output", type=Path, help="write all results here as JSON")
    parser.add_argument("--page", type=Path, help="renew the tables of this page")
    args = parser.parse_args()
    try:
        results = run_study(args.recordings)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.output is not None:
        args.output.write_text(to_json(results))
    if args.page is not None:
        fill_page(args.page, results)
    print(
        f"{'drafter':8} {'data set':10} {'rule':24} {'n':>7} {'AUC':>6} {'loss':>6} {'ECE':>6}  interval"
    )
    for row in (*results["rows"], *results["rows_by_drafter"]):
        if row["position"] == "all":
            print(
                f"{row['drafter']:8} {row['data_set']:10} {row['rule']:24} {row['n']:7} "
                f"{row['auc']:6.4f} {row['log_loss']:6.4f} {row['ece']:6.4f}  "
                f"{row['ece_low']:.4f}-{row['ece_high']:.4f}"
            )
    for name, holds in results["checks"].items():
        print(f"{'holds' if holds else 'FAILS'}  {name}")
    return 0 if all(results["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
