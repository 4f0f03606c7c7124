"""Coefficients over restarts: they come back under their key, and nothing else does."""

from __future__ import annotations

import gc
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.closed_loop import COST_PROFILE
from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.plugins.reference import accumulate_statistics
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.api import LLM, SamplingParams, SpeculativeConfig
from trtllm_av.runtime.coefficient_store import (
    WRITE_SECONDS,
    CoefficientKey,
    CoefficientStore,
    drafter_identity,
)
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel

K = 3
KEY = CoefficientKey.of("target", "drafter 1", AdaptiveOptions(), K)
VALUES = np.array([0.7, 0.1, -0.2, -0.3], np.float32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def controller(
    folder: Path, key: CoefficientKey = KEY, clock: Clock | None = None
) -> AdaptiveController:
    return AdaptiveController(
        "adaptive",
        K,
        4,
        CostModel.from_table(COST_PROFILE, num_positions=K),
        refit_interval=1,
        store=CoefficientStore(folder, key, clock=clock or Clock()),
    )


def finish_round(running: AdaptiveController, label: float) -> None:
    """A refit from 50 labels, as the end of a round makes it."""
    features, labels = np.full((50, K, 1), 2.0), np.full((50, K), label)
    estimator = running.estimator
    estimator.observe(
        accumulate_statistics(features, labels, estimator.coefficients), estimator.version
    )
    assert estimator.refit()
    assert running._store is not None
    running._store.save(estimator.coefficients)


def test_a_restart_begins_where_the_last_run_ended(tmp_path: Path) -> None:
    """Guards against a cold start after every restart, and against a last refit that is lost."""
    first = controller(tmp_path)
    assert not first.is_restored
    for label in (1.0, 0.0, 1.0):
        finish_round(first, label)
    kept = first.estimator.coefficients
    del first
    gc.collect()
    second = controller(tmp_path)
    assert second.is_restored
    np.testing.assert_array_equal(second.estimator.coefficients, kept)
    cold = controller(tmp_path / "other")
    assert (second.history.mean_survival() != cold.history.mean_survival()).all()


def test_an_engine_keeps_its_fit_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an option that nothing reads, and against files that nobody asked for."""
    monkeypatch.setenv("TRTLLM_AV_CACHE", str(tmp_path / "cache"))
    model = write_tiny_checkpoint(tmp_path / "model")
    for is_kept in (False, True, True):
        llm = LLM(
            model,
            SpeculativeConfig(
                method="layer_skip", num_speculative_tokens=K, keep_coefficients=is_kept
            ),
            max_batch_size=4,
            cost_table=cheap_draft_costs(),
        )
        was_there = any((tmp_path / "cache").glob("coefficients-*.json"))
        assert llm.engine.controller.is_restored == was_there
        llm.generate([[7, n] for n in range(4)], SamplingParams(max_tokens=40, ignore_eos=True))
        assert llm.engine.controller.estimator.num_refits > 0
        del llm
        gc.collect()
        assert any((tmp_path / "cache").glob("coefficients-*.json")) == is_kept


def test_refits_are_written_seldom(tmp_path: Path) -> None:
    """Guards against a file that is written in every hundredth round of a fast engine."""
    clock = Clock()
    store = CoefficientStore(tmp_path, KEY, clock=clock)
    store.save(VALUES)
    written = store.path.read_text()
    clock.now = WRITE_SECONDS - 1.0
    store.save(2 * VALUES)
    assert store.path.read_text() == written
    clock.now = WRITE_SECONDS
    store.save(3 * VALUES)
    assert store.load() is not None
    np.testing.assert_allclose(store.load(), 3 * VALUES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"target_digest": "other"},
        {"drafter": "drafter 2"},
        {"source": "recalibrated"},
        {"features": ("entropy",)},
        {"feature_bound": 20.0},
        {"temperature_floor": 0.7},
        {"num_positions": K + 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_key_is_another_fit(change: dict[str, object], tmp_path: Path) -> None:
    """Guards against coefficients of another model, drafter, source or feature."""
    CoefficientStore(tmp_path, KEY).save(VALUES)
    other = CoefficientStore(tmp_path, replace(KEY, **change))  # type: ignore[arg-type]
    assert other.load() is None


def test_the_key_names_what_the_fit_depends_on() -> None:
    """Guards against an option that changes features and shares a file with those who lack it."""
    options = [
        AdaptiveOptions(),
        AdaptiveOptions(source="recalibrated"),
        AdaptiveOptions(extra_features=("entropy",)),
        AdaptiveOptions(extra_features=("top2_gap",)),
        AdaptiveOptions(feature_bound=20.0),
        AdaptiveOptions(temperature_floor=0.7),
    ]
    keys = {CoefficientKey.of("target", "drafter 1", chosen, K) for chosen in options}
    assert len(keys) == len(options)
    assert CoefficientKey.of("target", "drafter 1", AdaptiveOptions(min_gain=0.1), K) == KEY


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00\xff",
        json.dumps({"key": {}, "coefficients": [0.5, 0.0, 0.0, 0.0]}),
        '{"key": KEY}',
        '{"key": KEY, "coefficients": [0.5, 0.0]}',
        '{"key": KEY, "coefficients": [NaN, 0.0, 0.0, 0.0]}',
        '{"key": KEY, "coefficients": [0.5, 0.0, 0.0, 99.0]}',
        '{"key": KEY, "coefficients": [-0.5, 0.0, 0.0, 0.0]}',
        '{"key": KEY, "coefficients": ["a", 0.0, 0.0, 0.0]}',
        '{"key": KEY, "coefficients": null}',
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_reason(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a start that fails, or takes over anything, because of a file in a cache."""
    store = CoefficientStore(tmp_path, KEY)
    key = json.dumps(store._key)
    store.path.write_text(text.replace("KEY", key), encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        running = controller(tmp_path)
    assert not running.is_restored
    assert running.estimator.version == 0
    assert str(store.path) in caplog.text
    finish_round(running, 1.0)  # and it is overwritten
    del running
    gc.collect()
    assert controller(tmp_path).is_restored


def test_a_folder_that_cannot_be_written_costs_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a round that ends the engine because a disk is full."""
    (tmp_path / "file").write_text("")
    store = CoefficientStore(tmp_path / "file" / "folder", KEY)
    assert store.load() is None
    with caplog.at_level(logging.WARNING):
        store.save(VALUES)
    assert "coefficients are not kept" in caplog.text


def test_a_retrained_head_or_another_way_to_sample_is_another_drafter(tmp_path: Path) -> None:
    """Guards against coefficients of other weights of the same size, or of greedy drafts, taken for one's own."""
    head = tmp_path / "head.safetensors"
    identities = set()
    for weights in (b"one", b"two"):
        head.write_bytes(weights)
        for method in ("probabilistic", "greedy"):
            config = SpeculativeConfig(method="eagle", model=str(head), draft_sample_method=method)
            identities.add(drafter_identity("eagle 9,64", config))
    assert len(identities) == 4
    assert drafter_identity("eagle 9,64", SpeculativeConfig()) not in identities
