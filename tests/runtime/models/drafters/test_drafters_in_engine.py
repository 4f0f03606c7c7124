"""Every family behind the engine: its drafts may change the speed, never the tokens."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.runtime.models.drafters.tiny_heads import FAMILIES, Family
from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.runtime.api import LLM, SamplingParams, SpeculativeConfig
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPTS = ["abc", [5, 6, 7, 8], "a longer prompt END", "ab ab"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=2)
    return load_checkpoint(str(folder))


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> list[list[int]]:
    outputs = LLM(loaded, max_batch_size=2).generate(PROMPTS, GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("av_mode", ["fixed", "adaptive"])
@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_greedy_tokens_are_the_targets(
    loaded: LoadedModel,
    plain: list[list[int]],
    tmp_path: Path,
    family: Family,
    av_mode: Literal["fixed", "adaptive"],
) -> None:
    """States of rejected drafts shown as committed, slots that see the last request, rows that mix: the
    target would verify other tokens than the drafter was told, or none would be accepted."""
    # The fewer ids there are, the likelier a random head drafts what the target says.
    common = Counter(token for tokens in plain for token in tokens).most_common(4)
    ids = torch.tensor(sorted(token for token, _ in common))
    family.save(tmp_path / "head.safetensors", family.head(loaded), ids)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(cheap_draft_costs()))
    config = SpeculativeConfig(
        method=family.name,
        model=str(tmp_path / "head.safetensors"),
        num_speculative_tokens=4,
        av_mode=av_mode,
    )
    cost_table = costs if av_mode == "adaptive" else None
    llm = LLM(loaded, config, max_batch_size=2, cost_table=cost_table)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    if av_mode == "fixed":
        assert llm.report().accepted > 0
