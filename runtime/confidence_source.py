"""Scores one drafted position from the source that was chosen: the drafter's head, the estimator, or both.

Invariants: features and confidence of position i are functions of the draft law, the head's logit and the
request's earlier rounds, all of which exist before x_i is drawn; a row that cannot be scored or did not
draft here has confidence 0; a draft whose confidence came from the head still carries the estimator's
features, so that the fit goes on, or NaN where it has none, which trains nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trtllm_av.plugins.torch_ops import law_features, score_features
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.confidence import COLD_FEATURE
from trtllm_av.runtime.operations import DraftOperations

_TYPICAL_TAIL = math.log1p(math.exp(COLD_FEATURE))
_FIRST = torch.zeros(1, dtype=torch.int32)
#: Slope 1 and intercept 0: the head's logit as it is.
_AS_GIVEN = torch.tensor([1.0, 0.0])


class ConfidenceScorer:
    """Scores with ``options``; see ``score``."""

    def __init__(self, options: AdaptiveOptions) -> None:
        self.options = options
        self._num_features = options.num_features
        self._arguments = options.score_arguments

    @property
    def needs_head(self) -> bool:
        return self.options.needs_head

    def score(
        self,
        operations: DraftOperations,
        logits: Tensor,
        temperature: Tensor,
        coefficients: Tensor,
        position: int,
        *,
        vocab_size: int,
        draft_lens: Tensor,
        head_logit: Tensor | None,
        recent_acceptance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """features [R, F] and confidence [R] of the law ``logits`` [R, V] of ``position``.

        ``temperature``, ``draft_lens`` (int32), ``head_logit`` and ``recent_acceptance`` are [R]; the last
        two where the options need them. ``coefficients`` [F+K].
        """
        place = torch.tensor([position], dtype=torch.int32)
        source = self.options.source
        if source == "recalibrated":
            assert head_logit is not None
            bound = self.options.feature_bound
            is_scored = head_logit.isfinite() & (draft_lens > position)
            first = torch.where(is_scored, head_logit.clamp(-bound, bound), 0.0)[:, None]
        else:
            # One slope: what else the confidence needs is added below.
            slopes = coefficients if self._num_features == 1 else self._first_slope(coefficients)
            features, confidence = operations.score_drafts(
                logits[:, None, :],
                temperature,
                slopes,
                place,
                vocab_size=vocab_size,
                draft_lens=draft_lens,
                **self._arguments,
            )
            first, confidence = features[:, 0], confidence[:, 0]
            if source == "estimator" and self._num_features == 1:
                return first, confidence
            is_scored = confidence > 0
        all_features = self._append_extra(
            first, logits, temperature, vocab_size, recent_acceptance, is_scored
        )
        if source == "head" or (source == "head_then_estimator" and position == 0):
            assert head_logit is not None
            confidence = score_features(head_logit[:, None, None], _AS_GIVEN, _FIRST)[:, 0]
            confidence = torch.where(draft_lens > position, confidence, 0.0)
            return torch.where(is_scored[:, None], all_features, torch.nan), confidence
        confidence = score_features(all_features[:, None], coefficients, place)[:, 0]
        return all_features, torch.where(is_scored, confidence, 0.0)

    def _first_slope(self, coefficients: Tensor) -> Tensor:
        return torch.cat([coefficients[:1], coefficients[self._num_features :]])

    def _append_extra(
        self,
        first: Tensor,
        logits: Tensor,
        temperature: Tensor,
        vocab_size: int,
        recent_acceptance: Tensor | None,
        is_scored: Tensor,
    ) -> Tensor:
        """[R, F]: ``first`` [R, 1] and the extra features, 0 where nothing was scored."""
        extra = self.options.extra_features
        if not extra:
            return first
        columns = {}
        if recent_acceptance is not None:
            columns["recent_acceptance"] = recent_acceptance
        if "tail" in extra:
            # −log(1 − q_max), 0 at the typical log-odds.
            columns["tail"] = softplus(first[:, 0]) - _TYPICAL_TAIL
        if "top2_gap" in extra or "entropy" in extra:
            of_law = law_features(
                logits[:, None, :], temperature, vocab_size=vocab_size, **self._arguments
            )
            columns["top2_gap"], columns["entropy"] = of_law[:, 0, 0], of_law[:, 0, 1]
        values = torch.stack([columns[name].to(first.dtype) for name in extra], 1)
        return torch.cat([first, torch.where(is_scored[:, None], values, 0.0)], 1)
