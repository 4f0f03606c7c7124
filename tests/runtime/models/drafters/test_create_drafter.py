"""The registry, and settings that a family cannot honour."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.runtime.models.tiny_checkpoints import save_tiny
from trtllm_av.runtime.errors import AdaptiveVerificationError, CheckpointError, UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import create_drafter
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("target")))


def create(target: LoadedModel, **settings: Any) -> Any:
    cache = KVCache(target.config, num_slots=2, max_len=16)
    return create_drafter(SpeculativeConfig(**settings), target, cache)


def test_methods(target: LoadedModel, tmp_path: Path) -> None:
    """A registered family that cannot be built, or one that ignores K."""
    drafter = create(target, num_speculative_tokens=3)
    assert (drafter.name, drafter.max_draft_len) == ("layer_skip", 3)
    drafter = create(target, method="draft_model", model=str(save_tiny(tmp_path)))
    assert (drafter.name, drafter.max_draft_len) == ("draft_model", 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "medusa"}, "method='medusa' is unknown; choose one of dflash, draft_model, "),
        ({"method": "draft_model"}, "needs model"),
        ({"method": "draft_model", "model": "x", "skip_layers": [1]}, "skip_layers=[1]"),
        ({"method": "layer_skip", "model": "x"}, "model='x'"),
        ({"skip_layers": [3]}, "names layer 3; the target has 0 … 2"),
        ({"skip_layers": [-1]}, "names layer -1"),
        ({"skip_layers": [1, 1]}, "names a layer twice"),
        ({"skip_layers": [0, 1, 2]}, "leaves none of the target's 3 layers"),
    ],
)
def test_settings_are_honoured_or_refused(
    target: LoadedModel, settings: dict[str, Any], message: str
) -> None:
    """A setting without effect."""
    with pytest.raises(UsageError, match=re.escape(message)):
        create(target, **settings)


def test_vocabulary_sizes_must_agree(target: LoadedModel, tmp_path: Path) -> None:
    """Token ids of one model fed to another."""
    folder = save_tiny(tmp_path, vocab_size=96)
    with pytest.raises(CheckpointError, match="vocabulary of 96 tokens, the target of 97"):
        create(target, method="draft_model", model=str(folder))


def test_tokenizers_must_agree(tmp_path: Path) -> None:
    """Equal sizes with different meanings: drafts would be noise, and nobody would be told."""
    folders = []
    for name, vocabulary in (("a", {"x": 0, "y": 1}), ("b", {"x": 0, "z": 1})):
        folder = save_tiny(tmp_path / name)
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        folders.append(folder)
    target = load_checkpoint(folders[0])
    assert create(target, method="draft_model", model=str(folders[0])).name == "draft_model"
    with pytest.raises(CheckpointError, match="different tokenizers: token 1 "):
        create(target, method="draft_model", model=str(folders[1]))


def test_missing_draft_checkpoint(target: LoadedModel) -> None:
    """A traceback for a mistyped draft model."""
    with pytest.raises(AdaptiveVerificationError, match="'/nowhere' does not exist"):
        create(target, method="draft_model", model="/nowhere")
