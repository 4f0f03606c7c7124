"""Folders that load, and one clear line for those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.runtime.models.tiny_checkpoints import reference, reference_logits, save_tiny
from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.kv_cache import KVCache

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def edit_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | changes))


def logits_of(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    cache = KVCache(loaded.config, 1, 32)
    return loaded.model.forward(PackedBatch.from_lists([tokens], [0], [0]), cache).logits


def test_sharded_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Reading the first shard only."""
    model = reference(folder)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = reference_logits(model, [1, 2, 3])
    torch.testing.assert_close(
        logits_of(load_checkpoint(sharded), [1, 2, 3]), expected, atol=1e-3, rtol=0
    )


def test_half_precision_weights_are_widened(folder: Path) -> None:
    """Mixing the stored dtype into a float32 model."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    loaded = load_checkpoint(folder)
    assert loaded.dtype == torch.float32
    expected = reference_logits(reference(folder), [4, 5])
    torch.testing.assert_close(logits_of(loaded, [4, 5]), expected, atol=1e-3, rtol=0)


def test_digest_names_weights_and_configuration(folder: Path, tmp_path: Path) -> None:
    """A cost cache of one model taken for another's."""
    digest = load_checkpoint(folder).digest
    assert load_checkpoint(folder).digest == digest
    assert load_checkpoint(save_tiny(tmp_path / "other", seed=1)).digest != digest
    edit_json(folder / "config.json", rms_norm_eps=1e-3)
    assert load_checkpoint(folder).digest != digest


def test_end_tokens_as_generate_takes_them(folder: Path) -> None:
    """Generation running past the end token that only one of the files names."""
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert load_checkpoint(folder).eos_token_ids == (7,)
    edit_json(folder / "generation_config.json", eos_token_id=[5, 6])
    assert load_checkpoint(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    assert load_checkpoint(folder).eos_token_ids == ()


def test_tokenizer_is_optional(folder: Path) -> None:
    """A folder with a tokenizer losing its end token or chat template; one without failing to load."""
    assert load_checkpoint(folder).tokenizer is None
    vocabulary = {"a": 0, "b": 1, "</s>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="</s>"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    loaded = load_checkpoint(folder).tokenizer
    assert loaded is not None
    assert loaded.encode("ab") == [0, 1] and loaded.eos_token_id == 2
    assert loaded.chat_template == "{{ messages[0]['content'] }}"


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS)


def _add_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, folder / WEIGHTS
    )


def _reshape_tensor(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=40)


def _truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def _remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _lose_shard(folder: Path) -> None:
    edit_json(
        folder / "model.safetensors.index.json",
        weight_map={"lm_head.weight": "model-00001-of-00002.safetensors"},
    )


def _leave_folder(folder: Path) -> None:
    edit_json(
        folder / "model.safetensors.index.json", weight_map={"lm_head.weight": f"../{WEIGHTS}"}
    )


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": ')


def _remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _config_is_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_tensor, "lacks tensor 'model.layers.1.mlp.up_proj.weight'"),
        (_add_tensor, "holds tensor 'model.layers.0.self_attn.q_norm.weight'"),
        (_reshape_tensor, r"has shape \[48, 32\], config.json says \[40, 32\]"),
        (_truncate, "cannot read weights .*model.safetensors"),
        (_remove_weights, "has neither model.safetensors nor"),
        (_lose_shard, "lacks the shard 'model-00001-of-00002.safetensors'"),
        (_leave_folder, "lacks the shard '../model.safetensors'"),
        (_break_config, "config.json' is not JSON"),
        (_remove_config, "has no config.json"),
        (_config_is_folder, "cannot read .*config.json"),
        (_break_tokenizer, "cannot read the tokenizer"),
    ],
)
def test_damaged_folders(folder: Path, damage: Any, message: str) -> None:
    """A traceback, or worse a model with random or missing weights."""
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    """A mistyped path answered by a library's own traceback."""
    with pytest.raises(CheckpointError, match="does not exist; give a Hugging Face model folder"):
        load_checkpoint(tmp_path / "nowhere")


def test_an_empty_name_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against an unset variable that loads whatever is in the current folder."""
    monkeypatch.chdir(save_tiny(tmp_path / "here"))
    with pytest.raises(CheckpointError, match="model folder '' does not exist; give"):
        load_checkpoint("")
