"""What else the study varies: the estimator's constants, and the order in which data sets come.

A sweep changes one constant and leaves the others at the product's defaults. In a drift run one engine
serves the data sets one after another, without being told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recording.rows import DraftRows
from trtllm_av.plugins.reference import CURVATURE_FLOOR
from trtllm_av.runtime.adaptive_options import FEATURE_BOUND, TEMPERATURE_FLOOR

from .rules import (
    DISCOUNT,
    OPTIONS,
    REFIT_INTERVAL,
    Predictions,
    Rule,
    Statistics,
    default_features,
    estimator,
    fit_online,
    reference,
    stack,
)
from .scores import log_losses, score_predictions
from .stream import LANES, Floats, Stream, clamp, join, serve

BOUNDS = (4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 40.0)
FLOORS = (0.0, 0.05, 0.1, 0.125, 0.25)
DISCOUNTS = (0.0, 0.25, 0.5, 0.75, 0.9)
INTERVALS = (10, 25, 50, 100, 200, 400)
BATCHES = (1, 4, 8, 32, 64)
SKIPPED = 2000  # labels at the start of an engine, which are not scored
MIN_LABELS = 500  # fewer say nothing about 15 bins

Bools = NDArray[np.bool_]
Result = dict[str, Any]


def scored(stream: Stream) -> Bools:
    """[M, K]: judged drafts behind the first 2,000."""
    number = np.cumsum(stream.is_judged.ravel()).reshape(stream.is_judged.shape)
    return np.asarray(stream.is_judged & (number > SKIPPED))


def floored_statistics(floor: float) -> Statistics:
    """The product's sums for one feature with another floor of the curvature weight."""

    def statistics(features: Floats, labels: Floats, coefficients: Floats) -> NDArray[np.float64]:
        f, y = features[:, :, 0].astype(np.float64), labels.astype(np.float64)
        known = np.isfinite(y)
        p = 1 / (1 + np.exp(-(coefficients[0] * f + coefficients[1:])))
        w = np.maximum(p * (1 - p), floor) * known
        residual = np.where(known, y - p, 0)
        sums = (w * f * f, w * f, w, residual * f, residual, known)
        return np.stack([one.sum(axis=0, dtype=np.float64) for one in sums], 1)

    return statistics


def _variants(stream: Stream) -> Iterable[tuple[str, float, float, Rule | Predictions]]:
    """(constant, value, default, rule or finished predictions) of one stream."""
    for bound in BOUNDS:
        yield (
            "feature_bound",
            bound,
            FEATURE_BOUND,
            fit_online(stream, default_features(stream, bound)),
        )
    for floor in FLOORS:
        features = stack(stream, ("log_odds",))
        found = fit_online(stream, features, statistics=floored_statistics(floor))
        yield "curvature_floor", floor, CURVATURE_FLOOR, found
    for discount in DISCOUNTS:
        yield "discount", discount, OPTIONS.discount, estimator(discount=discount)
    for interval in INTERVALS:
        found = fit_online(stream, default_features(stream), interval=interval)
        yield "refit_interval", interval, REFIT_INTERVAL, found


def sweep(run: str, rows: DraftRows) -> list[Result]:
    """Scores of one run with one constant changed at a time."""
    results: list[Result] = []
    stream = serve(rows)
    if scored(stream).sum() < MIN_LABELS:
        return results
    for name, value, default, rule in _variants(stream):
        found = rule if isinstance(rule, Predictions) else rule(stream)
        results.append(_score(run, name, value, default, stream, found.chance))
    for lanes in BATCHES:
        other = serve(rows, lanes=lanes)
        results.append(_score(run, "batch_size", lanes, LANES, other, estimator()(other).chance))
    for index, scale in enumerate(rows.meta["scales"]):
        features = clamp(stream.by_scale[:, :, index])[:, :, None]
        found = fit_online(stream, features)
        results.append(
            _score(run, "temperature_floor", scale, TEMPERATURE_FLOOR, stream, found.chance)
        )
    return results


def _score(
    run: str, name: str, value: float, default: float, stream: Stream, chance: NDArray[np.float64]
) -> Result:
    mask = scored(stream)
    request = np.broadcast_to(stream.request[:, None], mask.shape)[mask]
    score = score_predictions(chance[mask], stream.labels[mask].astype(np.float64), request)
    figures = score.to_dict()
    kept = ("n", "auc", "log_loss", "ece", "ece_low", "ece_high")
    row = {"run": run, "constant": name, "value": value, "is_default": value == default}
    return row | {key: figures[key] for key in kept}


def drift(run: str, rows: DraftRows, order: Sequence[int]) -> list[Result]:
    """One engine, the data sets in ``order``: scores of each segment, its first 2,000 labels apart."""
    names = rows.meta["data_sets"]
    parts = [serve(rows.select(rows.data_set == index)) for index in order]
    stream = join(parts)
    segment = np.repeat(np.arange(len(parts)), [len(part.round) for part in parts])
    rules: dict[str, Rule] = {
        "default": estimator(),
        "reference": reference,
        "discounted": estimator(discount=DISCOUNT),
        "refit every 25": lambda s: fit_online(s, default_features(s), interval=25),
        "reference every 25": partial(reference, interval=25),
    }
    results = []
    for rule, predict in rules.items():
        chance = predict(stream).chance
        for index, data_set in enumerate(order):
            judged = stream.is_judged & (segment == index)[:, None]
            number = np.cumsum(judged.ravel()).reshape(judged.shape)
            early, late = judged & (number <= SKIPPED), judged & (number > SKIPPED)
            if late.sum() < MIN_LABELS:
                continue
            request = np.broadcast_to(stream.request[:, None], late.shape)[late]
            score = score_predictions(
                chance[late], stream.labels[late].astype(np.float64), request
            ).to_dict()
            first = log_losses(chance[early], stream.labels[early].astype(np.float64)).mean()
            results.append(
                {"run": run, "rule": rule, "segment": index + 1, "data_set": names[data_set]}
                | {"n": score["n"], "log_loss_first": round(float(first), 5)}
                | {key: score[key] for key in ("log_loss", "ece", "ece_low", "ece_high")}
            )
    return results
