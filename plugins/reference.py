"""What each operation means, in NumPy: every other implementation is tested against this file.

Written to be read, not to be fast: plain loops where a loop is the definition. ``dtype`` is the float
type of the arithmetic and of the results (float64 for exact enumeration, float32 as on a device).

Shapes: R requests, K draft positions, P of them scored by one call, V columns of logits (the first
``vocab_size`` are real), F features.

Invariants: no operation takes a drawn token, so a score and a verify length can depend only on what
existed before the draw; a row's result depends on no other row, except through the shared budget;
non-finite input gives confidence 0 in its own row and nothing elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int32]

#: Lower bound of the curvature weight p(1−p) of a label: half the Böhning–Lindsay bound of 1/4, which
#: keeps the fixed point of the fit and bounds a step from saturated confidences.
CURVATURE_FLOOR = 0.125


def score_drafts(
    draft_logits: ArrayLike,
    temperature: ArrayLike,
    coefficients: ArrayLike,
    position: ArrayLike,
    *,
    vocab_size: int,
    allowed_mask: ArrayLike | None = None,
    draft_lens: ArrayLike | None = None,
    feature_bound: float = 15.0,
    temperature_floor: float = 0.5,
    dtype: DTypeLike = np.float32,
) -> tuple[Floats, Floats]:
    """Confidence that the target accepts a draft drawn from these logits, before it is drawn.

    The feature is log(q_max / (1 − q_max)) of the drafter's softmax over real, allowed tokens after
    temperature and before top-k and top-p, clamped to ±``feature_bound``. Temperature 0 scores as 1 and
    lower ones than ``temperature_floor`` as the floor. 1 − q_max is summed without the top token:
    "Σexp − 1" cancels in float32 and would read the bound from a gap of 17 on.

    A row of −inf alone, or with NaN or +inf among its allowed tokens, cannot be scored: feature 0 and
    confidence 0. So do positions at or behind ``draft_lens``.

    Args:
        draft_logits: [R, P, V] of any float type.
        temperature: [R].
        coefficients: [1 + K], slope ω then the intercepts β of the K positions.
        position: [1] int32, 0-based position of the first scored column.
        vocab_size: real tokens; columns from here on are padding and never count.
        allowed_mask: [R, V] bool, True where a token may be drafted.
        draft_lens: [R] int32, valid drafts of each request; None means all.

    Returns:
        features [R, P, 1] and confidence [R, P] = σ(ω·feature + β_{position + i}).
    """
    logits = np.asarray(draft_logits).astype(dtype)
    check_vocabulary(vocab_size, logits.shape[2])
    logits = logits[:, :, :vocab_size]
    num_rows, num_scored, _ = logits.shape
    features = np.zeros((num_rows, num_scored, 1), dtype)
    scored = np.zeros((num_rows, num_scored), bool)
    first = int(np.asarray(position).reshape(()))
    for row in range(num_rows):
        scale = np.asarray(temperature, dtype)[row]
        scale = np.asarray(1.0 if scale == 0 else np.maximum(scale, temperature_floor), dtype)
        for i in range(num_scored):
            if draft_lens is not None and first + i >= np.asarray(draft_lens)[row]:
                continue
            values = logits[row, i]
            if allowed_mask is not None:
                values = np.where(np.asarray(allowed_mask)[row, :vocab_size], values, -np.inf)
            top = int(np.argmax(values))
            if not np.isfinite(values[top]):
                continue
            others = np.delete(values, top)
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                feature = -np.log(np.exp((others - values[top]) / scale).sum())
            if np.isnan(feature):  # a temperature that is no number
                continue
            features[row, i, 0] = np.clip(feature, -feature_bound, feature_bound)
            scored[row, i] = True
    confidence = score_features(features, coefficients, first, dtype=dtype)
    return features, np.where(scored, confidence, np.asarray(0, dtype))


def law_features(
    draft_logits: ArrayLike,
    temperature: ArrayLike,
    *,
    vocab_size: int,
    feature_bound: float = 15.0,
    temperature_floor: float = 0.5,
    dtype: DTypeLike = np.float32,
) -> Floats:
    """Two more features of the law that a draft is drawn from, before it is drawn: [R, P, 2].

    The log-odds between the two likeliest tokens, at most ``feature_bound``, and the entropy in nats; of
    the same softmax as the feature of ``score_drafts``, whose arguments these are. Both are 0 where a row
    cannot be scored.
    """
    logits = np.asarray(draft_logits).astype(dtype)
    check_vocabulary(vocab_size, logits.shape[2])
    features = np.zeros((*logits.shape[:2], 2), dtype)
    for row, i in np.ndindex(*logits.shape[:2]):
        scale = np.asarray(temperature, dtype)[row]
        scale = np.asarray(1.0 if scale == 0 else np.maximum(scale, temperature_floor), dtype)
        values = logits[row, i, :vocab_size]
        top = int(np.argmax(values))
        if not np.isfinite(values[top]) or np.isnan(scale):
            continue
        below = (values - values[top]) / scale
        second = np.delete(below, top).max(initial=-np.inf)
        weights = np.exp(below)
        total = weights.sum()
        terms = weights[weights > 0] * below[weights > 0]
        features[row, i] = min(-second, feature_bound), np.log(total) - terms.sum() / total
    return features


def score_features(
    features: ArrayLike,
    coefficients: ArrayLike,
    position: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
) -> Floats:
    """Confidence [R, P] from given features [R, P, F], for instance a drafter's own head.

    ``coefficients`` [F + K] are F slopes, then K intercepts; ``position`` [1] int32 is the 0-based
    position of the first column. A column whose log-odds are not finite has confidence 0.
    """
    x = np.asarray(features).astype(dtype)
    c = np.asarray(coefficients).astype(dtype)
    num_scored, num_features = x.shape[1:]
    first = int(np.asarray(position).reshape(()))
    check_positions(first, num_scored, c.size - num_features)
    intercepts = c[num_features + first : num_features + first + num_scored]
    with np.errstate(over="ignore", invalid="ignore"):
        log_odds = np.broadcast_to(intercepts, x.shape[:2])
        for k in range(num_features):
            log_odds = log_odds + c[k] * x[:, :, k]
        confidence = 1 / (1 + np.exp(-log_odds))
    return np.where(np.isfinite(log_odds), confidence, np.asarray(0, dtype)).astype(dtype)


def trim_drafts(
    confidence: ArrayLike,
    draft_lens: ArrayLike,
    base_lens: ArrayLike,
    min_verify_lens: ArrayLike,
    draft_budget: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
) -> tuple[Floats, Ints, Ints]:
    """How many drafts of each request are verified: the likeliest ``draft_budget`` of the batch.

    Survival of position i is the product of the confidences 0 … i, multiplied from left to right with
    gradual underflow; confidences are first taken into [0, 1], and NaN and denormal values become 0.
    The floors are admitted first, then the best of the remaining slots in the total order (survival
    descending, position ascending, request ascending) until the budget is used. As survival never rises
    along a request, what is admitted is a prefix of each draft.

    Args:
        confidence: [R, K].
        draft_lens: [R] int32, valid drafts, taken into 0 … K; a dead row has none.
        base_lens: [R] int32, rows of each request that are no drafts; 0 marks a dead row.
        min_verify_lens: [R] int32, floors fixed before the round, taken into 0 … draft_lens.
        draft_budget: [1] int32, drafts to admit, floors included.

    Returns:
        survival [R, K] (0 behind draft_lens), verify_lens [R] int32 with
        Σ = min(max(budget, Σ floors), Σ draft_lens), and cu_seqlens [R + 1] int32, the exclusive sum of
        base_lens + verify_lens.
    """
    p = np.asarray(confidence).astype(dtype)
    num_rows, num_positions = p.shape
    tiny = np.finfo(p.dtype).tiny
    base = np.asarray(base_lens, np.int32)
    lens = np.where(base > 0, np.clip(draft_lens, 0, num_positions), 0).astype(np.int32)
    floors = np.clip(min_verify_lens, 0, lens).astype(np.int32)
    p = np.where(p >= tiny, np.minimum(p, 1), 0).astype(dtype)

    survival = np.zeros_like(p)
    for row in range(num_rows):
        product = np.asarray(1, dtype)
        for i in range(lens[row]):
            product = product * p[row, i]
            product = product if product >= tiny else np.asarray(0, dtype)
            survival[row, i] = product

    candidates = [(row, i) for row in range(num_rows) for i in range(floors[row], lens[row])]
    candidates.sort(key=lambda slot: (-survival[slot], slot[1], slot[0]))
    budget = int(np.asarray(draft_budget).reshape(()))
    verify_lens = floors.copy()
    for row, _ in candidates[: max(budget - int(floors.sum()), 0)]:
        verify_lens[row] += 1
    cu_seqlens = np.concatenate([[0], np.cumsum(base + verify_lens)]).astype(np.int32)
    return survival, verify_lens, cu_seqlens


def pack_drafts(
    base_lens: ArrayLike, verify_lens: ArrayLike, *, stride: int, capacity: int
) -> Ints:
    """Where each packed row of the verify pass comes from: [capacity] int32.

    The packed rows of request r are the offsets 0 … base_lens + verify_lens − 1 of its ``stride`` slots,
    as r·stride + offset; the tail is −1. Raises ValueError if a request does not fit its stride or the
    batch not the capacity.
    """
    lens = np.asarray(base_lens, np.int64) + np.asarray(verify_lens, np.int64)
    check_pack(int(lens.max(initial=0)), int(lens.sum()), stride, capacity)
    rows = [row * stride + offset for row, n in enumerate(lens) for offset in range(n)]
    return np.array(rows + [-1] * (capacity - len(rows)), np.int32)


def label_drafts(
    draft_lens: ArrayLike,
    verify_lens: ArrayLike,
    accepted_lens: ArrayLike,
    trainable_lens: ArrayLike,
    overlap: ArrayLike,
    *,
    num_positions: int,
    confidence: ArrayLike | None = None,
    dtype: DTypeLike = np.float32,
) -> Floats:
    """What a round taught about each draft: [R, ``num_positions``], NaN where it taught nothing.

    1 for an accepted draft and 0 for the first rejected one. If all verified drafts were accepted and the
    draft was trimmed there, the bonus row holds the target's law p at the first trimmed position, and
    the probability that a draft from q is accepted, Σ min(p, q) = ``overlap``, is its soft label.

    Args:
        draft_lens, verify_lens, accepted_lens: [R] int32, drafted ≥ verified ≥ accepted.
        trainable_lens: [R] int32, positions that may train: 0 for constrained and dead rows, the
            position of the stop + 1 after a stop, K otherwise.
        overlap: [R]; read at the first trimmed position only.
        confidence: [R, K] as trimmed; a draft with confidence 0 could not be scored, so that its feature
            means nothing and it stays without a label.
    """
    drafted, verified, accepted, trainable = (
        np.asarray(lens, np.int32)
        for lens in (draft_lens, verify_lens, accepted_lens, trainable_lens)
    )
    labels = np.full((drafted.size, num_positions), np.nan, dtype)
    for row in range(drafted.size):
        labels[row, : accepted[row]] = 1
        if accepted[row] < verified[row]:
            labels[row, accepted[row]] = 0
        elif verified[row] < drafted[row]:
            labels[row, verified[row]] = np.asarray(overlap)[row]
        labels[row, max(trainable[row], 0) :] = np.nan
    if confidence is not None:
        labels[~(np.asarray(confidence) > 0)] = np.nan
    return labels


def accumulate_statistics(
    features: ArrayLike, labels: ArrayLike, coefficients: ArrayLike
) -> NDArray[np.float64]:
    """What the estimator's refit needs to know about one round: [K, n(F)] float64.

    Per position, with p = σ(Σ ω_i f_i + β) from the ``coefficients`` given and the curvature weight
    w = max(p(1−p), 1/8): the upper triangle of a = Σ w f fᵀ row by row, b = Σ w f, c = Σ w,
    g0 = Σ (y−p) f, g1 = Σ (y−p) and the count n; n(F) = F(F+1)/2 + 2F + 3, 6 for one feature.
    Requests are added one after another, so equal rounds give equal bits. A draft with a non-finite
    feature or label is skipped.

    Args: features [R, K, F]; labels [R, K]; coefficients [F + K].
    """
    f = np.asarray(features, np.float64)
    y = np.asarray(labels, np.float64)
    known = np.isfinite(f).all(axis=2) & np.isfinite(y)
    f, y = np.where(known[:, :, None], f, 0), np.where(known, y, 0)
    p = score_features(f, coefficients, 0, dtype=np.float64)
    w = np.maximum(p * (1 - p), CURVATURE_FLOOR)
    slots = range(f.shape[2])
    columns = [w * f[:, :, i] * f[:, :, j] for i in slots for j in slots if i <= j]
    columns += [*(w * f[:, :, i] for i in slots), w]
    columns += [*((y - p) * f[:, :, i] for i in slots), y - p, np.ones_like(p)]
    terms = np.stack(columns, axis=-1)
    statistics = np.zeros(terms.shape[1:], np.float64)
    for row in range(terms.shape[0]):
        statistics += np.where(known[row, :, None], terms[row], 0)
    return statistics


def num_statistics(num_features: int) -> int:
    """Sums per position: upper triangle of a, then b, c, g0, g1, n."""
    return num_features * (num_features + 1) // 2 + 2 * num_features + 3


def check_vocabulary(vocab_size: int, num_columns: int) -> None:
    """Refuse a vocabulary that the logits do not hold."""
    if not 1 <= vocab_size <= num_columns:
        raise ValueError(
            f"vocab_size={vocab_size} must be in 1 … {num_columns}, the logits' columns"
        )


def check_positions(first: int, num_scored: int, num_positions: int) -> None:
    """Refuse positions without an intercept: another position's would be used."""
    if first < 0 or first + num_scored > num_positions:
        raise ValueError(
            f"position={first} with {num_scored} scored columns leaves the {num_positions} positions "
            "of the coefficients; pass one intercept per draft position"
        )


def check_pack(longest: int, total: int, stride: int, capacity: int) -> None:
    """Refuse a batch that does not fit: packed rows would be another request's, or be lost."""
    if longest > stride:
        raise ValueError(f"a request of {longest} rows exceeds stride={stride}; raise the stride")
    if total > capacity:
        raise ValueError(f"{total} packed rows exceed capacity={capacity}; lower the draft budget")
