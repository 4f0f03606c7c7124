"""What a user chose about confidences, fit and exploration, resolved for one drafter.

Invariants: ``source`` is never ``auto``; an option that the drafter cannot honour is refused here, before
anything is loaded into a round; nothing changes after the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.drafters.base import Drafter
from trtllm_av.runtime.params import ExtraFeature, SpeculativeConfig

#: Where the confidence of a position comes from.
Source = Literal["head", "estimator", "recalibrated", "head_then_estimator"]

#: Clamp of the log-odds and least temperature of a score, the defaults of the operators.
FEATURE_BOUND = 15.0
TEMPERATURE_FLOOR = 0.5
#: Columns behind the first feature come in this order, however they were listed.
_FEATURE_ORDER: tuple[ExtraFeature, ...] = ("tail", "top2_gap", "entropy", "recent_acceptance")


@dataclass(frozen=True, slots=True)
class AdaptiveOptions:
    """The options of ``SpeculativeConfig`` of these names, checked; its docstring explains them."""

    source: Source = "estimator"
    extra_features: tuple[ExtraFeature, ...] = ()
    soft_labels: bool = False
    discount: float = 0.0
    feature_bound: float = FEATURE_BOUND
    temperature_floor: float = TEMPERATURE_FLOOR
    exploration: float = 0.0
    min_gain: float = 0.0
    early_stop: bool = False

    @property
    def num_features(self) -> int:
        """F: the log-odds of the top token, or the head's logit, and the extra ones."""
        return 1 + len(self.extra_features)

    @property
    def needs_head(self) -> bool:
        """True if the drafter's confidence head is asked for its logit."""
        return self.source != "estimator"

    @property
    def uses_recent_acceptance(self) -> bool:
        return "recent_acceptance" in self.extra_features

    @property
    def score_arguments(self) -> Mapping[str, Any]:
        """Clamp and temperature floor as arguments of the score operators, where they are not theirs."""
        changed = {}
        if self.feature_bound != FEATURE_BOUND:
            changed["feature_bound"] = self.feature_bound
        if self.temperature_floor != TEMPERATURE_FLOOR:
            changed["temperature_floor"] = self.temperature_floor
        return changed

    @classmethod
    def resolve(cls, config: SpeculativeConfig, drafter: Drafter | None) -> AdaptiveOptions:
        """The options of ``config`` for ``drafter``; UsageError for what it does not have or cannot do."""
        has_head = drafter is not None and drafter.has_confidence_head
        source = config.confidence_source
        if source == "auto":
            # A head as it is errs by .027 in what it promises, recalibrated by .008: docs/estimator.md.
            source = "recalibrated" if has_head else "estimator"
        elif source != "estimator" and drafter is not None and not has_head:
            raise UsageError(
                f"confidence_source={source!r} needs a drafter with a confidence head, and "
                f"{drafter.name!r} has none; choose 'estimator' or another method"
            )
        if config.early_stop and drafter is not None and drafter.is_block:
            raise UsageError(
                f"early_stop=True has no use with {drafter.name!r}, which drafts a block in one pass; "
                "leave it out"
            )
        return cls(
            source=source,
            extra_features=tuple(f for f in _FEATURE_ORDER if f in config.extra_features),
            soft_labels=config.soft_labels,
            discount=config.discount,
            feature_bound=config.feature_bound,
            temperature_floor=config.temperature_floor,
            exploration=config.exploration,
            min_gain=config.min_gain,
            early_stop=config.early_stop,
        )
