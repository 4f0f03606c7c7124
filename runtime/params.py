"""What a user may ask for: per request (SamplingParams) and per engine (SpeculativeConfig).

Invariants: unknown keys are errors; every field is either honoured or refused by name; nothing here
depends on a model. Shaped like TensorRT-LLM's LLM API, with JSON keys as in vLLM's configuration.
"""

from __future__ import annotations

import math
import reprlib
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.strict_json import parse_json

AvMode = Literal["adaptive", "shadow", "fixed", "off"]
ConfidenceSource = Literal["auto", "head", "estimator", "recalibrated", "head_then_estimator"]
ExtraFeature = Literal["tail", "top2_gap", "entropy", "recent_acceptance"]

_MAX_TEMPERATURE = 1e6  # flat for any logits; float32 holds it
_MAX_TOP_K = 2**31 - 1

#: What other engines take and this one does not have, and what to do instead.
REFUSED = {
    "n": "a request has one completion; submit the prompt again with another seed",
    "best_of": "a request has one completion; submit the prompt again with another seed",
    "use_beam_search": "beam search is not implemented; sample or decode greedily",
    "beam_width": "beam search is not implemented; sample or decode greedily",
    "guided_decoding": "no grammar engine is built in; allowed_token_ids and bad_words_ids restrict tokens",
    "lora_request": "adapters are not applied; merge the adapter into the checkpoint",
    "enable_lora": "adapters are not applied; merge the adapter into the checkpoint",
    "lora_config": "adapters are not applied; merge the adapter into the checkpoint",
    "tensor_parallel_size": "a model runs in one process; start one engine per process",
    "pipeline_parallel_size": "a model runs in one process; start one engine per process",
    "quant_config": "quantised weights are not implemented; use an unquantised checkpoint",
}


#: Keys of SpeculativeConfig that say how verification adapts.
_ADAPTIVE_KEYS = (
    *("confidence_source", "extra_features", "soft_labels", "discount", "feature_bound"),
    *("temperature_floor", "keep_coefficients", "exploration", "min_gain", "early_stop"),
)


#: Values in messages: a client may send megabytes.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def describe_validation_error(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line: key, offending value, reason."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "value"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not first["loc"]:  # keys that do not fit together
        return message  # it names them; the input is all the keys there are
    if first["type"] == "extra_forbidden":
        if key in REFUSED:
            return f"{key}={first['input']!r} is not supported: {REFUSED[key]}"
        return f"unknown key {key!r} (value {first['input']!r}); remove it"
    return f"{key}={_SHORT.repr(first['input'])}: {message}"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, /, **data: object) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise UsageError(f"{type(self).__name__}: {describe_validation_error(error)}") from None


class SamplingParams(_Strict):
    """How one request is decoded.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. ``logit_bias`` maps token ids to
    additive biases; ``allowed_token_ids`` restricts the vocabulary; ``bad_words_ids`` are token sequences
    that must not be completed. ``logprobs`` asks for the target's log-probability of each emitted token
    before temperature. ``adaptive=False`` verifies the whole draft; ``num_speculative_tokens`` caps this
    request's draft (0 switches speculation off, None means the engine's K). ``seed`` None draws one.
    """

    max_tokens: int = Field(default=32, ge=1)
    temperature: float = 1.0
    top_k: int = Field(default=0, ge=0, le=_MAX_TOP_K)
    top_p: float = 1.0
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    min_tokens: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words_ids: list[list[int]] = Field(default_factory=list)
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: bool = False
    adaptive: bool = True
    num_speculative_tokens: int | None = Field(default=None, ge=0)

    @field_validator("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if value < 0.0:
            raise ValueError("must be ≥ 0; 0 decodes greedily")
        if value > _MAX_TEMPERATURE:
            raise ValueError(f"must be ≤ {_MAX_TEMPERATURE:g}; every token is equally likely there")
        return value

    @field_validator("top_p")
    @classmethod
    def _top_p(cls, value: float) -> float:
        if not 0.0 < value <= 1.0:
            raise ValueError("must be in (0, 1]; 1 keeps the whole distribution")
        return value

    @field_validator("allowed_token_ids")
    @classmethod
    def _allowed(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and not value:
            raise ValueError("must name at least one token, or be left out")
        return value

    @field_validator("bad_words_ids")
    @classmethod
    def _bad_words(cls, value: list[list[int]]) -> list[list[int]]:
        if any(not word for word in value):
            raise ValueError("holds an empty sequence; remove it")
        return value

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: list[str]) -> list[str]:
        if any(not text for text in value):
            raise ValueError("holds an empty string; remove it")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[int, float]) -> dict[int, float]:
        if any(math.isnan(bias) or bias == math.inf for bias in value.values()):
            raise ValueError("biases must be finite or -inf")
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        return self

    @property
    def is_constrained(self) -> bool:
        """True if the target's law is edited beyond temperature, top-k and top-p: such a row must not train."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_ids
            or self.min_tokens
        )


class SpeculativeConfig(_Strict):
    """Which drafter proposes, how many tokens, and whether verification adapts.

    ``method`` names the drafter family; None takes the trained head that ships for the target, and
    ``layer_skip`` where none does. ``model`` is the drafter's checkpoint where the family needs one;
    ``skip_layers`` (layer_skip only) lists the target layers that the drafter leaves out.
    ``av_mode``: ``adaptive`` trims, ``shadow`` decides and counts but verifies everything, ``fixed``
    verifies everything, ``off`` does not draft.
    ``confidence_source``: the drafter's own ``head``, the ``estimator``, the estimator with the head's
    logit as its feature (``recalibrated``), or the head at the first position and the estimator behind it
    (``head_then_estimator``); ``auto`` recalibrates the head where there is one.

    The estimator's further features, fit and score: ``extra_features``, each with a slope of its own, are
    −log(1 − q_max), which bends the law where the draft is unsure (``tail``), the log-odds between the draft
    law's two likeliest tokens, its entropy, and the request's own acceptance in earlier rounds;
    ``soft_labels`` trains every judged position on Σ min(p, q) instead of 1 or 0 (the first trimmed one
    always does); ``discount`` is the weight that labels keep at a refit;
    ``feature_bound`` clamps log-odds, and ``temperature_floor`` is the least temperature of a score.
    ``keep_coefficients`` saves the fit in the cache folder and starts from it the next time.

    What a round verifies: ``exploration`` is the share of the expected tokens that may be given up to
    verify positions that got few labels, in place of the admitted drafts that are least likely to survive;
    ``min_gain`` is the relative gain in tokens per ms below which a round verifies all that it drafts,
    which is cheaper on executors with a uniform path; ``early_stop`` ends an autoregressive draft
    when no row's survival can pay for another step any more.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: StrictInt = Field(default=7, ge=0, le=16)
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    enable_adaptive_verification: bool = True
    av_mode: AvMode | None = None
    skip_layers: list[StrictInt] | None = None
    confidence_source: ConfidenceSource = "auto"
    extra_features: list[ExtraFeature] = Field(default_factory=list)
    soft_labels: bool = False
    discount: float = Field(default=0.0, ge=0.0, lt=1.0)
    feature_bound: float = Field(default=15.0, ge=1.0, le=40.0)
    temperature_floor: float = Field(default=0.5, gt=0.0, le=1.0)
    keep_coefficients: bool = False
    exploration: float = Field(default=0.0, ge=0.0, le=0.01)
    min_gain: float = Field(default=0.0, ge=0.0, le=1.0)
    early_stop: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        mode = self.resolved_mode
        if self.num_speculative_tokens == 0 and mode in ("adaptive", "shadow"):
            raise ValueError(
                "num_speculative_tokens=0 leaves nothing to adapt; raise it or set av_mode to 'off'"
            )
        if self.method is None and self.model is not None:
            raise ValueError(
                f"model={self.model!r} needs a method: 'draft_model', 'eagle', 'mtp', 'dflash' or 'dspark'"
            )
        if self.av_mode == "adaptive" and not self.enable_adaptive_verification:
            raise ValueError(
                "av_mode='adaptive' contradicts enable_adaptive_verification=false; leave one out"
            )
        is_asked = "enable_adaptive_verification" in self.model_fields_set
        if self.av_mode in ("fixed", "off") and is_asked and self.enable_adaptive_verification:
            raise ValueError(
                f"av_mode={self.av_mode!r} contradicts enable_adaptive_verification=true; leave one out"
            )
        if mode in ("fixed", "off"):
            for name in _ADAPTIVE_KEYS:
                value = getattr(self, name)
                if value != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(
                        f"{name}={value!r} has no use in av_mode {mode!r}; leave it out"
                    )
        return self

    @property
    def resolved_mode(self) -> AvMode:
        """``av_mode``, or what ``enable_adaptive_verification`` and K imply."""
        if self.av_mode is not None:
            return self.av_mode
        if self.enable_adaptive_verification:
            return "adaptive"
        return "fixed" if self.num_speculative_tokens else "off"

    @classmethod
    def from_json(cls, text: str) -> SpeculativeConfig:
        """Parse a JSON object; malformed text and unknown keys raise UsageError."""
        try:
            data = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"cannot read speculative config ({error}): {text[:100]!r}") from None
        if not isinstance(data, dict):
            raise UsageError(f"speculative config must be a JSON object, not {text[:100]!r}")
        return cls(**data)
