"""Tables and the plot of a serving run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

#: Two-sided 95 % quantiles of Student's t by the number of runs.
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
NOISE = 0.03  # relative difference that never counts
#: Of the requirement at high load: adaptive against K = 7, from this concurrency on.
_HIGH_LOAD, _DEEPEST = 256, "7"
_AVERAGED = (
    "tokens_per_second",
    "tokens_per_second_per_user",
    "round_ms",
    "device_ms",
    "draft_ms",
    "host_ms",
    "host_share",
    "av_share",
    "mean_depth",
    "mean_verify_len",
)


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per concurrency and mode: means over runs and the 95 % half-width of the throughput."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["concurrency"], run["mode"]].append(run)
    table = []
    for (concurrency, mode), group in sorted(groups.items(), key=lambda item: item[0][0]):
        row: dict[str, Any] = {"concurrency": concurrency, "mode": mode, "runs": len(group)}
        for name in _AVERAGED:
            row[name] = round(mean(run[name] for run in group), 4)
        rates = [run["tokens_per_second"] for run in group]
        quantile = _STUDENT.get(len(rates))
        row["half_width"] = (
            None if quantile is None else round(quantile * stdev(rates) / len(rates) ** 0.5, 1)
        )
        verified = sum(run["verified"] for run in group)
        row["acceptance"] = (
            round(sum(run["accepted"] for run in group) / verified, 4) if verified else None
        )
        table.append(row)
    return table


def compare(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adaptive against the best other mode at each concurrency; ``is_behind`` is beyond the noise."""
    found = []
    for concurrency in sorted({row["concurrency"] for row in table}):
        rows = {row["mode"]: row for row in table if row["concurrency"] == concurrency}
        adaptive = rows.pop("adaptive", None)
        if adaptive is None or not rows:
            continue
        best = max(rows.values(), key=lambda row: float(row["tokens_per_second"]))
        ratio = adaptive["tokens_per_second"] / best["tokens_per_second"]
        widths = [row["half_width"] or 0.0 for row in (adaptive, best)]
        noise = max(sum(widths) / best["tokens_per_second"], 0.0)
        deepest = rows.get(_DEEPEST)
        found.append(
            {
                "concurrency": concurrency,
                "best_other": best["mode"],
                "ratio_to_best": round(ratio, 4),
                "noise": round(noise, 4),
                "is_behind": ratio < 1.0 - min(max(noise, 0.0), NOISE),
                "ratio_to_k7": (
                    None
                    if deepest is None
                    else round(adaptive["tokens_per_second"] / deepest["tokens_per_second"], 4)
                ),
            }
        )
    return found


def print_tables(report: dict[str, Any]) -> None:
    load = report["settings"]["target_load"]
    if load:
        print(f"every verify pass also runs a random-weight {load} shaped target")
    print(
        f"{'R':>4} {'mode':>9} {'tokens/s':>10} {'±':>7} {'per user':>9} {'accept':>7} {'depth':>6} "
        f"{'verify':>7} {'round ms':>9} {'device':>7} {'host ms':>8} {'AV':>6} {'idle':>6}"
    )
    for row in report["table"]:
        acceptance = "-" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        width = "-" if row["half_width"] is None else f"{row['half_width']:.0f}"
        print(
            f"{row['concurrency']:>4} {row['mode']:>9} {row['tokens_per_second']:>10.0f} {width:>7} "
            f"{row['tokens_per_second_per_user']:>9.1f} {acceptance:>7} {row['mean_depth']:>6.2f} "
            f"{row['mean_verify_len']:>7.2f} {row['round_ms']:>9.3f} {row['device_ms']:>7.3f} "
            f"{row['host_ms']:>8.3f} {row['av_share']:>6.1%} {row['host_share']:>6.1%}"
        )
    for row in compare(report["table"]):
        verdict = "BEHIND" if row["is_behind"] else "ok"
        k7 = "" if row["ratio_to_k7"] is None else f", {row['ratio_to_k7']:.3f} of K = 7"
        print(
            f"R = {row['concurrency']}: adaptive is {row['ratio_to_best']:.3f} of the best other "
            f"({row['best_other']}, noise {row['noise']:.1%}){k7}: {verdict}"
        )


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Throughput against tokens per second per user, a line per mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 5.0))
    for mode in dict.fromkeys(row["mode"] for row in report["table"]):
        rows = [row for row in report["table"] if row["mode"] == mode]
        label = f"fixed K = {mode}" if mode.isdigit() else mode
        is_main = mode == "adaptive"
        axes.plot(
            [row["tokens_per_second_per_user"] for row in rows],
            [row["tokens_per_second"] for row in rows],
            marker="o",
            linewidth=2.5 if is_main else 1.2,
            label=label,
            zorder=3 if is_main else 2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens per second per user")
    axes.set_ylabel("tokens per second")
    load = report["settings"]["target_load"]
    beside = f" beside a random-weight {load} shaped target" if load else ""
    axes.set_title(f"SmolLM2-135M with its EAGLE head{beside}", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
