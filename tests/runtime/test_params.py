"""Options that a user may set: their bounds, and one line for what is wrong."""

from __future__ import annotations

import pytest

from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig


def test_the_defaults_are_the_method_without_options() -> None:
    """Guards against an option that is on although nobody asked."""
    assert AdaptiveOptions.resolve(SpeculativeConfig(), None) == AdaptiveOptions()
    assert AdaptiveOptions().score_arguments == {}
    assert not SpeculativeConfig().keep_coefficients


def test_every_option_reaches_the_engine() -> None:
    """Guards against a key that is accepted and ignored."""
    text = (
        '{"extra_features": ["entropy", "top2_gap"], "soft_labels": true, "discount": 0.5, '
        '"feature_bound": 12, "temperature_floor": 0.7, "exploration": 0.005, "min_gain": 0.02, '
        '"early_stop": true, "confidence_source": "estimator"}'
    )
    options = AdaptiveOptions.resolve(SpeculativeConfig.from_json(text), None)
    assert options == AdaptiveOptions(
        source="estimator",
        extra_features=("top2_gap", "entropy"),
        soft_labels=True,
        discount=0.5,
        feature_bound=12.0,
        temperature_floor=0.7,
        exploration=0.005,
        min_gain=0.02,
        early_stop=True,
    )
    assert options.score_arguments == {"feature_bound": 12.0, "temperature_floor": 0.7}


@pytest.mark.parametrize(
    "wrong",
    [
        {"confidence_source": "both"},
        {"extra_features": ["margin"]},
        {"discount": 1.0},
        {"feature_bound": 50.0},
        {"temperature_floor": 0.0},
        {"exploration": 0.02},
        {"min_gain": -0.1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_value_out_of_range_is_one_line(wrong: dict[str, object]) -> None:
    """Guards against exploration beyond 1 %, a fit that never forgets, and a traceback for a typing error."""
    with pytest.raises(UsageError, match=next(iter(wrong))) as caught:
        SpeculativeConfig(**wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["fixed", "off"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("confidence_source", "estimator"), ("exploration", 0.01), ("extra_features", ["entropy"])],
)
def test_an_option_without_use_is_refused(mode: str, name: str, value: object) -> None:
    """Guards against a setting that looks as if it did something where nothing adapts."""
    with pytest.raises(UsageError, match=f"{name}=.* has no use in av_mode '{mode}'; leave it out"):
        SpeculativeConfig(av_mode=mode, **{name: value})  # type: ignore[arg-type]
    SpeculativeConfig(av_mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ['{"method": "eagle", "method": "layer_skip"}', "{", "[" * 100_000]
)
def test_a_configuration_that_is_not_clear_is_one_line(text: str) -> None:
    """Guards against a key that is dropped because it stands twice, and a traceback."""
    with pytest.raises(UsageError, match="cannot read speculative config") as caught:
        SpeculativeConfig.from_json(text)
    assert "\n" not in str(caught.value)
    assert ("'method' stands twice" in str(caught.value)) == ("method" in text)


def test_a_contradiction_of_two_keys_names_them_alone() -> None:
    """Guards against a message that begins with the whole configuration."""
    with pytest.raises(UsageError, match=r"^SamplingParams: min_tokens=9 exceeds max_tokens=3$"):
        SamplingParams(min_tokens=9, max_tokens=3, seed=5)


@pytest.mark.parametrize("mode, enabled", [("adaptive", False), ("fixed", True), ("off", True)])
def test_a_mode_that_contradicts_the_switch_is_refused(mode: str, enabled: bool) -> None:
    """Guards against one of two opposite keys that wins without a word."""
    with pytest.raises(UsageError, match=f"av_mode='{mode}' contradicts .*; leave one out"):
        SpeculativeConfig(av_mode=mode, enable_adaptive_verification=enabled)  # type: ignore[arg-type]
