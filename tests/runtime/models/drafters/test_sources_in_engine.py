"""Every confidence source behind the engine, on a trained kind of head: only the speed may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.models.drafters.tiny_heads import FAMILIES
from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.runtime.api import LLM, SamplingParams, SpeculativeConfig
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3]]
EVERYTHING = {
    "extra_features": ["top2_gap", "entropy", "recent_acceptance"],
    "soft_labels": True,
    "discount": 0.5,
    "exploration": 0.01,
    "min_gain": 0.02,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=2)
    return load_checkpoint(str(folder))


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def load(loaded: LoadedModel, folder: Path, method: str, **options: Any) -> LLM:
    (family,) = [family for family in FAMILIES if family.name == method]
    path = folder / f"{method}.safetensors"
    family.save(path, family.head(loaded), torch.arange(40))
    config = SpeculativeConfig(method=method, model=str(path), num_speculative_tokens=4, **options)
    return LLM(loaded, config, max_batch_size=2, cost_table=cheap_draft_costs())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "every option"])
@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("auto", "recalibrated"),
        ("head", "head"),
        ("estimator", "estimator"),
        ("recalibrated", "recalibrated"),
        ("head_then_estimator", "head_then_estimator"),
    ],
)
def test_a_source_changes_no_token(
    source: str, taken: str, options: dict[str, Any], loaded: LoadedModel, tmp_path: Path
) -> None:
    """Guards against a head's logit of another position or row, and options that fail together."""
    llm = load(loaded, tmp_path, "dspark", confidence_source=source, **options)
    assert llm.engine.controller.options.source == taken
    assert tokens_of(llm) == tokens_of(LLM(loaded, max_batch_size=2))
    estimator = llm.engine.controller.estimator
    assert estimator.num_refits > 0  # whoever scores, the estimator goes on learning
    assert llm.report().drafted > 0


def test_a_head_that_does_not_exist_is_refused_before_anything_runs(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """Guards against a typing error in a configuration that costs a profile of the engine first."""
    with pytest.raises(UsageError, match="'eagle' has none; choose 'estimator' or another method"):
        load(loaded, tmp_path, "eagle", confidence_source="head")


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_block_is_not_stopped_early(loaded: LoadedModel, tmp_path: Path, method: str) -> None:
    """Guards against an option that changes nothing and says nothing."""
    with pytest.raises(UsageError, match=rf"early_stop=True has no use with '{method}'.*leave it"):
        load(loaded, tmp_path, method, early_stop=True)
