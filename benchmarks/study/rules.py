"""The rules under study: what each predicts of a stream, learning from it as it goes.

Predictions of a round come from coefficients that were fitted to earlier rounds only. The rules that are
the product's run the product's estimator, statistics and scoring; the others are written here from
their published description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_av.plugins import torch_ops
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.estimator import AcceptanceEstimator, cold_coefficients
from trtllm_av.runtime.params import SpeculativeConfig

from .stream import Floats, Stream, clamp

#: The product's defaults.
OPTIONS = AdaptiveOptions.resolve(SpeculativeConfig(), None)
REFIT_INTERVAL: int = signature(AcceptanceEstimator).parameters["refit_interval"].default
#: What the rule "discounted" keeps of its labels at a refit.
DISCOUNT = 0.5
_FIRST = torch.zeros(1, dtype=torch.int32)
_REFERENCE_BOUND = 40.0

Float64 = NDArray[np.float64]


@dataclass(slots=True)
class Predictions:
    """``chance`` [M, K] f64 of acceptance; ``fits``: (round from which they hold, coefficients)."""

    chance: Float64
    fits: list[tuple[int, Floats]] = field(default_factory=list)


Rule = Callable[[Stream], Predictions]
Statistics = Callable[[Floats, Floats, Floats], Float64]


def windows(stream: Stream, interval: int) -> list[tuple[int, slice]]:
    """(first round, rows) of every ``interval`` rounds."""
    edges = np.arange(0, int(stream.round[-1]) + interval, interval)
    cuts = np.searchsorted(stream.round, edges)
    pairs = zip(edges.tolist(), cuts, np.append(cuts[1:], stream.round.size), strict=True)
    return [(first, slice(int(a), int(b))) for first, a, b in pairs if b > a]


def product_statistics(features: Floats, labels: Floats, coefficients: Floats) -> Float64:
    """The product's sums [K, n(F)] of ``features`` [N, K, F] and ``labels`` [N, K]."""
    return torch_ops.accumulate_statistics(
        torch.from_numpy(features), torch.from_numpy(labels), torch.from_numpy(coefficients)
    ).numpy()


def score(features: Floats, coefficients: Floats) -> Float64:
    """The product's confidences [N, K] of ``features`` [N, K, F]."""
    scored = torch_ops.score_features(
        torch.from_numpy(features), torch.from_numpy(coefficients), _FIRST
    )
    return scored.double().numpy()


def fit_online(
    stream: Stream,
    features: Floats,
    labels: Floats | None = None,
    *,
    interval: int = REFIT_INTERVAL,
    discount: float = OPTIONS.discount,
    cold: Floats | None = None,
    statistics: Statistics = product_statistics,
) -> Predictions:
    """The product's estimator over ``features`` [M, K, F], refitted every ``interval`` rounds."""
    labels = stream.labels if labels is None else labels
    estimator = AcceptanceEstimator(
        stream.num_positions,
        refit_interval=interval,
        num_features=features.shape[2],
        discount=discount,
        cold=cold,
    )
    features = np.ascontiguousarray(features)
    result = Predictions(np.zeros(labels.shape))
    for first, rows in windows(stream, interval):
        coefficients = estimator.coefficients
        result.fits.append((first, coefficients))
        result.chance[rows] = score(features[rows], coefficients)
        sums = statistics(features[rows], np.ascontiguousarray(labels[rows]), coefficients)
        estimator.observe(sums, estimator.version)
        estimator.refit()
    return result


def stack(stream: Stream, names: Sequence[str], bound: float | None = None) -> Floats:
    """[M, K, F] of named features, log-odds and gaps clamped as the product clamps them."""
    columns = []
    for name in names:
        values = stream.features[name]
        is_odds = name in ("log_odds", "top2_gap", "head_logit", "tail")
        columns.append(
            (clamp(values) if bound is None else clamp(values, bound)) if is_odds else values
        )
    return np.stack(columns, -1)


def default_features(stream: Stream, bound: float | None = None) -> Floats:
    """[M, K, F] of what the product reads by default."""
    return stack(stream, ("log_odds", *OPTIONS.extra_features), bound)


def estimator(
    *extra: str, soft: bool = OPTIONS.soft_labels, discount: float = OPTIONS.discount
) -> Rule:
    """The product's default, or one with extra features, soft labels or another discount."""

    def rule(stream: Stream) -> Predictions:
        labels = stream.overlaps if soft else None
        names = dict.fromkeys(("log_odds", *OPTIONS.extra_features, *extra))
        features = stack(stream, list(names))
        return fit_online(stream, features, labels, discount=discount)

    return rule


def single_feature(stream: Stream) -> Predictions:
    """logit(q_max) alone, as published: at the request's temperature, clamped at ±40, hard labels."""
    labels = np.where(stream.is_judged, stream.labels, np.nan).astype(np.float32)
    features = clamp(stream.features["raw_log_odds"], _REFERENCE_BOUND)[:, :, None]
    return fit_online(stream, features, labels, discount=0.0)


def unfitted(stream: Stream) -> Predictions:
    """q_max itself."""
    log_odds = stream.features["raw_log_odds"].astype(np.float64)
    return Predictions(1 / (1 + np.exp(-log_odds)))


def sampled(transform: Callable[[Floats], Floats], stream: Stream) -> Predictions:
    """A fit to the probability of the drawn token: what a lossless rule cannot see."""
    log_q = np.minimum(stream.features["log_probability"], -1e-4)
    return fit_online(stream, clamp(transform(log_q))[:, :, None])


def log_log(log_q: Floats) -> Floats:
    """−log(−log q)."""
    return np.asarray(-np.log(-log_q), np.float32)


def head(stream: Stream) -> Predictions:
    """The drafter's confidence head as it is."""
    logit = stream.features["head_logit"].astype(np.float64)
    return Predictions(1 / (1 + np.exp(-logit)))


def head_recalibrated(stream: Stream) -> Predictions:
    """The product's estimator with the head's logit as its feature."""
    cold = cold_coefficients(stream.num_positions, slope=1.0, intercept=0.0)
    return fit_online(stream, stack(stream, ("head_logit",)), cold=cold)


def head_then_estimator(stream: Stream) -> Predictions:
    """The head at the first position, the estimator behind it."""
    result = estimator()(stream)
    result.chance[:, 0] = head(stream).chance[:, 0]
    return result


def reference(stream: Stream, *, interval: int = REFIT_INTERVAL) -> Predictions:
    """The public update rule: curvature p(1−p) without a floor, one undamped-by-bounds Newton step.

    Statistics per position and a clear at every refit; steps are damped by n/(n + 50) only, the slope is
    kept ≥ 0; nothing bounds an intercept. Trimmed drafts teach nothing.
    """
    f = clamp(stream.features["raw_log_odds"], _REFERENCE_BOUND).astype(np.float64)
    labels = np.where(stream.is_judged, stream.labels, np.nan).astype(np.float64)
    coefficients = cold_coefficients(stream.num_positions).astype(np.float64)
    result = Predictions(np.zeros(f.shape))
    for first, rows in windows(stream, interval):
        result.fits.append((first, coefficients.astype(np.float32)))
        logit = coefficients[0] * f[rows] + coefficients[1:]
        p = 1 / (1 + np.exp(-np.clip(logit, -700, 700)))
        result.chance[rows] = p
        known = np.isfinite(labels[rows])
        weight = np.where(known, p * (1 - p), 0)
        residual = np.where(known, labels[rows] - p, 0)
        x = f[rows]
        a, b, c = ((weight * power).sum(0) for power in (x * x, x, 1.0))
        g0, g1, n = (residual * x).sum(0), residual.sum(0), known.sum(0)
        c = c + 1e-3
        slope = (g0.sum() - (b * g1 / c).sum()) / (a.sum() + 1e-3 - (b * b / c).sum())
        slope *= n.sum() / (n.sum() + 50)
        slope = max(coefficients[0] + slope, 0.0) - coefficients[0]
        level = (g1 - b * slope) / c * (n / (n + 50))
        coefficients = coefficients + np.append(slope, level)
    return result


#: Rules for any drafter, in the order they are reported.
RULES: dict[str, Rule] = {
    "default": estimator(),
    "logit_qmax": single_feature,
    "qmax_unfitted": unfitted,
    "reference": reference,
    "q_sampled_lossy": partial(sampled, lambda log_q: log_q),
    "loglog_q_sampled_lossy": partial(sampled, log_log),
    "top2_gap": estimator("top2_gap"),
    "entropy": estimator("entropy"),
    "recent_acceptance": estimator("recent_acceptance"),
    "tail": estimator("tail"),
    "soft_labels": estimator(soft=True),
    "discounted": estimator(discount=DISCOUNT),
}
#: Rules for drafters with a confidence head.
HEAD_RULES: dict[str, Rule] = {
    "head": head,
    "head_recalibrated": head_recalibrated,
    "head_then_estimator": head_then_estimator,
}
