"""The estimator study: nothing leaks from labels into predictions, and the default rule holds its bounds."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from benchmarks import estimator_study
from benchmarks.recording.rows import TRIMMED, DraftRows
from benchmarks.study.page import fill
from benchmarks.study.rules import (
    HEAD_RULES,
    RULES,
    fit_online,
    product_statistics,
    reference,
    stack,
)
from benchmarks.study.scores import Ranking, auc, calibration_error, score_predictions
from benchmarks.study.stream import LANES, Stream, join, serve
from benchmarks.study.sweeps import SKIPPED, drift, floored_statistics, scored
from trtllm_av.runtime.errors import UsageError

K = 3
RESULTS = "benchmarks/results/estimator_study.json"


def make_rows(num_requests: int = 40, rounds: int = 30, seed: int = 0) -> DraftRows:
    """Drafts whose acceptance is σ(.6·f − .3·position); every second request trims its third position."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[float]] = {name: [] for name in ("r", "t", "i", "f", "y", "o")}
    for request in range(num_requests):
        for round_ in range(rounds + request % 5):
            for position in range(K):
                f = rng.normal(1.0, 2.0)
                chance = 1 / (1 + np.exp(-(0.6 * f - 0.3 * position)))
                is_trimmed = position == 2 and request % 2 == 1
                accepted = rng.random() < chance
                label = TRIMMED if is_trimmed else int(accepted)
                for name, value in zip(
                    columns, (request, round_, position, f, label, chance), strict=True
                ):
                    columns[name].append(float(value))
                if label != 1:
                    break
    data = {name: np.array(values) for name, values in columns.items()}
    half = np.float16
    nothing = np.zeros(data["f"].size, half)
    return DraftRows(
        (data["r"] % 2).astype(np.uint8),
        data["r"].astype(np.int32),
        data["t"].astype(np.int32),
        data["i"].astype(np.int8),
        data["f"].astype(half),
        nothing,
        nothing,
        nothing - 1,
        data["o"].astype(half),
        data["y"].astype(np.uint8),
        data["f"].astype(half),
        np.zeros((data["f"].size, 0), half),
        {
            "num_positions": K, "data_sets": ["a", "b"], "temperature": 1.0, "scales": [],
            "drafter": "made", "run": "made",
        },
    )  # fmt: skip


def test_calibration_error_and_auc_are_the_definitions() -> None:
    """Guards against bins that split ties by label, and an AUC that counts ties as wins."""
    rng = np.random.default_rng(1)
    chance = rng.random(3000).round(2)
    label = (rng.random(3000) < chance**1.3).astype(np.float64)
    order = np.argsort(chance, kind="stable")
    where = np.zeros(3000, np.int64)
    for place, index in enumerate(order):
        first = int(np.searchsorted(chance[order], chance[index]))
        where[index] = first * 15 // 3000
        assert first <= place
    assert np.array_equal(Ranking.of(chance).bins(15), where)
    gaps = [abs((chance - label)[where == b].sum()) for b in range(15)]
    assert calibration_error(chance, label) == pytest.approx(sum(gaps) / 3000)
    positive, negative = chance[label == 1], chance[label == 0]
    wins = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    assert auc(chance, label) == pytest.approx(wins)


def test_intervals_cover_and_know_about_requests() -> None:
    """Guards against intervals as if the drafts of one answer were independent."""
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(100), 50)
    shift = rng.normal(0, 0.25, 100)[group]
    chance = np.full(5000, 0.6) + rng.normal(0, 0.05, 5000)
    label = (rng.random(5000) < np.clip(chance + shift, 0, 1)).astype(np.float64)
    together = score_predictions(chance, label, group)
    apart = score_predictions(chance, label, np.arange(5000))
    assert together.log_loss_low < together.log_loss < together.log_loss_high
    assert together.auc_low < together.auc < together.auc_high
    wide = together.log_loss_high - together.log_loss_low
    assert wide > 1.5 * (apart.log_loss_high - apart.log_loss_low)
    assert apart.ece_low <= apart.ece <= apart.ece_high
    assert together == score_predictions(chance, label, group)


def test_serving_keeps_the_order_of_each_request() -> None:
    """Guards against features of another request or round, and more requests at once than served."""
    rows = make_rows()
    stream = serve(rows)
    assert (np.diff(stream.round) >= 0).all()
    assert np.bincount(stream.round).max() <= LANES
    for request in (0, 7, 39):
        mine = rows.request == request
        place = stream.request == request
        assert (np.diff(stream.round[place]) == 1).all()  # a round each, without gaps
        judged = stream.is_judged[place]
        expected = rows.feature[mine & (rows.label != TRIMMED)].astype(np.float32)
        assert np.array_equal(stream.features["log_odds"][place][judged], expected)
        labels = rows.label[mine & (rows.label != TRIMMED)]
        assert np.array_equal(stream.labels[place][judged], labels)
    trimmed = np.isfinite(stream.labels) & ~stream.is_judged
    assert trimmed.sum() == (rows.label == TRIMMED).sum()
    assert np.allclose(stream.labels[trimmed], stream.overlaps[trimmed])
    assert not scored(stream)[: stream.round.searchsorted(5)].any()
    assert scored(stream).sum() == max(stream.is_judged.sum() - SKIPPED, 0)


def test_recent_acceptance_reads_earlier_rounds_only() -> None:
    """Guards against a feature that knows the round it predicts."""
    stream = serve(make_rows())
    place = np.flatnonzero(stream.request == 4)
    accepted = rejected = 0.0
    for row in place:
        expected = np.log((accepted + 1) / (rejected + 1))
        assert stream.features["recent_acceptance"][row] == pytest.approx(expected, abs=1e-5)
        accepted = 0.9 * accepted + (stream.labels[row] == 1).sum()
        rejected = 0.9 * rejected + (stream.labels[row] == 0).any()


@pytest.mark.parametrize("name", [*RULES, *HEAD_RULES])
def test_predictions_do_not_see_their_own_labels(name: str) -> None:
    """Guards against a rule that predicts with what the same round, or a later one, taught."""
    rule = (RULES | HEAD_RULES)[name]
    stream = serve(make_rows(num_requests=90))
    changed = serve(make_rows(num_requests=90))
    behind = stream.round >= 100  # the first refit stands before round 100
    changed.labels[behind] = 1 - changed.labels[behind]
    changed.overlaps[behind] = 1 - changed.overlaps[behind]
    changed.features["recent_acceptance"][:] = stream.features["recent_acceptance"]
    before, after = rule(stream).chance, rule(changed).chance
    known = stream.round < 200
    assert stream.round[-1] > 300
    assert np.array_equal(before[known], after[known])
    if name not in ("qmax_unfitted", "head"):
        assert not np.array_equal(before[~known], after[~known])
        assert not np.array_equal(before[:8], before[stream.round == 100][:8])


def test_reference_shows_the_published_runaway() -> None:
    """Guards against a reference that is kinder than the public update rule: certain drafts, all rejected."""
    for count, expected in ((1, -19.8), (100, -66_667.0)):
        shape = (count + 1, 1)
        features = {"raw_log_odds": np.full(shape, 40.0, np.float32)}
        labels = np.zeros(shape, np.float32)
        number = np.zeros(count + 1, np.int64)
        number[-1] = 100  # a round behind the refit
        judged = np.ones(shape, bool)
        stream = Stream(
            features,
            labels,
            labels,
            judged,
            number,
            number,
            number,
            np.zeros((*shape, 0), np.float32),
        )
        intercept = reference(stream).fits[-1][1][1]
        assert intercept == pytest.approx(expected, rel=0.01)


def test_swept_statistics_are_the_products() -> None:
    """Guards against a sweep of the curvature floor that varies something else as well."""
    stream = serve(make_rows())
    features = np.ascontiguousarray(stack(stream, ("log_odds",)))
    coefficients = np.array([0.7, 0.1, -0.2, 0.3], np.float32)
    mine = floored_statistics(0.125)(features, stream.labels, coefficients)
    theirs = product_statistics(features, stream.labels, coefficients)
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)


def test_fit_finds_the_law_of_the_data() -> None:
    """Guards against coefficients of other positions than their labels'."""
    stream = serve(make_rows(num_requests=200, rounds=40))
    last = fit_online(stream, stack(stream, ("log_odds",))).fits[-1][1]
    np.testing.assert_allclose(last, [0.6, 0.0, -0.3, -0.6], atol=0.25)


def test_drift_serves_data_sets_one_after_another() -> None:
    """Guards against segments whose labels are mixed."""
    rows = make_rows(num_requests=300, rounds=30)
    parts = [serve(rows.select(rows.data_set == one)) for one in (1, 0)]
    stream = join(parts)
    assert (np.diff(stream.data_set) <= 0).all() and (np.diff(stream.round) >= 0).all()
    results = drift("made", rows, (1, 0))
    assert [one["data_set"] for one in results[:2]] == ["b", "a"]
    counts = [int(part.is_judged.sum()) - SKIPPED for part in parts]
    assert [one["n"] for one in results[:2]] == counts


Found = dict[tuple[str, str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Rows of the committed recordings by (drafter, data set, rule, position)."""
    rows: list[dict[str, Any]] = []
    for drafter, runs in estimator_study.load_runs(estimator_study.RECORDINGS).items():
        rows += estimator_study.score_rules(drafter, estimator_study.predict(runs).items())
    return {(r["drafter"], r["data_set"], r["rule"], r["position"]): r for r in rows}


def test_default_rule_holds_its_bounds(found: Found) -> None:
    """Guards against a default that lost its calibration: a change of feature, labels, fit or constants.

    The committed recordings are small: chance alone makes errors of .01 to .02 of them.
    """
    checked = 0
    for (drafter, data_set, rule, position), ours in found.items():
        if rule != "default":
            continue
        theirs = found[drafter, data_set, "reference", position]
        assert ours["auc_high"] >= theirs["auc_low"]
        assert ours["log_loss_low"] <= theirs["log_loss_high"]
        if position == "all" and data_set == "pooled":
            assert ours["ece_low"] <= 0.02
            checked += 1
    assert checked == 2


def test_rules_rank_as_they_should(found: Found) -> None:
    """Guards against recordings whose features and labels do not belong together."""
    default = found["eagle", "pooled", "default", "all"]
    unfitted = found["eagle", "pooled", "qmax_unfitted", "all"]
    assert unfitted["ece_low"] > default["ece_high"]
    assert default["auc"] > 0.7
    assert default["log_loss"] < unfitted["log_loss"]
    head = found["dspark", "pooled", "head", "all"]
    recalibrated = found["dspark", "pooled", "head_recalibrated", "all"]
    assert head["auc"] > found["dspark", "pooled", "default", "all"]["auc"]
    assert recalibrated["log_loss"] < head["log_loss_high"]
    named = {rule for _, _, rule, _ in found}
    assert named == set(RULES) | set(HEAD_RULES)


@pytest.mark.slow
def test_whole_study_runs_and_joins_the_drafters() -> None:
    """Guards against results that lack a part, or rows of all drafters that count one of them twice."""
    study = estimator_study.run_study(estimator_study.RECORDINGS)
    size = {}
    for row in (*study["rows"], *study["rows_by_drafter"]):
        if (row["data_set"], row["rule"], row["position"]) == ("pooled", "default", "all"):
            size[row["drafter"]] = row["n"]
    assert size["all"] == size["eagle"] + size["dspark"]
    assert all(study[part] for part in ("rows_by_run", "coefficients", "sweeps", "drift"))


def test_folder_without_recordings_is_an_error(tmp_path: Any) -> None:
    """Guards against a study of nothing that reports success."""
    with pytest.raises(UsageError, match="no recordings"):
        estimator_study.run_study(tmp_path)


def test_page_takes_its_tables_and_keeps_its_text() -> None:
    """Guards against tables that land in another place, and a page without one."""
    results = json.loads((estimator_study.ROOT / RESULTS).read_text())
    page = (estimator_study.ROOT / "docs" / "estimator.md").read_text()
    assert fill(page, results) == page  # what stands there is what was measured
    emptied = re.sub(r"(<!-- rules -->\n).*?(<!-- /rules -->)", r"\1\2", page, flags=re.DOTALL)
    assert emptied != page and fill(emptied, results) == page
    with pytest.raises(UsageError, match="<!-- drift -->"):
        fill(page.replace("<!-- drift -->", ""), results)
