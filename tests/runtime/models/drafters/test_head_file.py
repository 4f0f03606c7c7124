"""Weights of drafting heads on disk: what comes back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.runtime.models.drafters.tiny_heads import FAMILIES, NUM_POSITIONS, Family, draft_ids
from tests.runtime.models.tiny_checkpoints import VOCAB_SIZE, save_tiny
from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import create_drafter
from trtllm_av.runtime.models.drafters.block_head import load_block_head
from trtllm_av.runtime.models.drafters.dspark_head import load_dspark_head
from trtllm_av.runtime.models.drafters.eagle_head import load_head
from trtllm_av.runtime.models.drafters.mtp_head import load_mtp_head
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig

IDS = draft_ids(VOCAB_SIZE)
LOADERS: dict[str, Any] = {
    "eagle": load_head,
    "mtp": load_mtp_head,
    "dflash": load_block_head,
    "dspark": load_dspark_head,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("target"), seed=5))


@pytest.fixture(params=FAMILIES, ids=[family.name for family in FAMILIES])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


def create(family: Family, target: LoadedModel, **settings: Any) -> Any:
    config = SpeculativeConfig(
        **{"method": family.name, "num_speculative_tokens": NUM_POSITIONS} | settings
    )
    return create_drafter(config, target, KVCache(target.config, 4, 96))


def rewrite(path: Path, config: Any = None, **tensors: torch.Tensor) -> None:
    """Save the file again with another configuration or other tensors."""
    with safe_open(str(path), framework="pt") as file:
        [(key, text)] = file.metadata().items()
        content = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
    path.unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in content.items()},
        path,
        {key: text if config is None else json.dumps(config)},
    )


def test_weights_survive_the_file(family: Family, target: LoadedModel, tmp_path: Path) -> None:
    """A tensor that is left out of the file, or a map that comes back in another order."""
    head, path = family.head(target), tmp_path / "head.safetensors"
    family.save(path, head, IDS)
    loaded, loaded_ids = LOADERS[family.name](path)
    assert loaded.config == head.config
    assert loaded_ids.tolist() == IDS.tolist()
    expected = {name: value.half().float() for name, value in head.named_parameters()}
    assert expected.keys() == dict(loaded.named_parameters()).keys()
    for name, parameter in loaded.named_parameters():
        assert parameter.equal(expected[name]), name


def test_a_head_of_another_target_is_refused(
    family: Family, target: LoadedModel, tmp_path: Path
) -> None:
    """A head that reads states it was never trained on: still lossless, but nothing is accepted."""
    path = tmp_path / "head.safetensors"
    family.save(path, family.head(target), IDS)
    assert isinstance(create(family, target, model=str(path)), family.drafter)  # type: ignore[arg-type]
    other = load_checkpoint(save_tiny(tmp_path / "other", seed=6))
    with pytest.raises(CheckpointError, match="another target"):
        create(family, other, model=str(path))
    with pytest.raises(UsageError, match="no packaged head"):
        create(family, target)
    with pytest.raises(UsageError, match="skip_layers"):
        create(family, target, skip_layers=[1])


@pytest.mark.parametrize("family", FAMILIES[1:], ids=[family.name for family in FAMILIES[1:]])
def test_more_positions_than_were_trained_are_refused(
    family: Family, target: LoadedModel, tmp_path: Path
) -> None:
    """A block or a chain of modules longer than there are weights for."""
    path = tmp_path / "head.safetensors"
    family.save(path, family.head(target), IDS)
    with pytest.raises(UsageError, match="num_speculative_tokens=5: this head"):
        create(family, target, model=str(path), num_speculative_tokens=NUM_POSITIONS + 1)


@pytest.mark.parametrize("damage", ["missing", "text", "no metadata", "tensor", "config"])
def test_damaged_weights_are_one_line(
    family: Family, target: LoadedModel, tmp_path: Path, damage: str
) -> None:
    """A traceback, or a head with random weights, for a file that is no head."""
    path, head = tmp_path / "head.safetensors", family.head(target)
    family.save(path, head, IDS)
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        [key] = file.metadata()
    path.unlink()
    if damage == "text":
        path.write_text("no weights")
    elif damage == "no metadata":
        save_file(tensors, path)
    elif damage == "config":
        save_file(tensors, path, {key: json.dumps({"hidden_size": 32})})
    elif damage == "tensor":
        del tensors[max(name for name in tensors if name.endswith("down"))]
        save_file(tensors, path, {key: json.dumps(asdict(head.config))})
    with pytest.raises(CheckpointError, match=r"head\.safetensors") as caught:
        LOADERS[family.name](path)
    assert "\n" not in str(caught.value)
    if damage == "tensor":
        assert "down" in str(caught.value)  # which one


@pytest.mark.parametrize(
    "ids",
    [IDS - 1000, torch.zeros_like(IDS), IDS.view(1, -1), IDS[:0], IDS.float()],
    ids=["negative", "twice", "a table", "none", "no integers"],
)
def test_a_map_that_names_no_token_or_one_twice_is_refused(
    target: LoadedModel, tmp_path: Path, ids: torch.Tensor
) -> None:
    """A traceback in the first round; or, with two draft ids for one token, a q that nobody drew from: lossy."""
    path, family = tmp_path / "head.safetensors", FAMILIES[0]
    family.save(path, family.head(target), IDS)
    rewrite(path, draft_to_target=ids.int() if ids.dtype == torch.int64 else ids)
    with pytest.raises(CheckpointError, match=r"draft_to_target .*train_drafter"):
        load_head(path)


def test_a_map_beyond_the_vocabulary_is_refused(
    family: Family, target: LoadedModel, tmp_path: Path
) -> None:
    """An index error while the engine starts."""
    path = tmp_path / "head.safetensors"
    family.save(path, family.head(target), IDS)
    rewrite(path, draft_to_target=(IDS + VOCAB_SIZE).int())
    with pytest.raises(CheckpointError, match=rf"drafts token \d+, .* has {VOCAB_SIZE}"):
        create(family, target, model=str(path))


def test_weights_that_are_not_finite_are_refused(
    family: Family, target: LoadedModel, tmp_path: Path
) -> None:
    """A head whose every draft is a silent fallback."""
    path, head = tmp_path / "head.safetensors", family.head(target)
    next(head.parameters()).fill_(float("nan"))
    family.save(path, head, IDS)
    with pytest.raises(CheckpointError, match="not finite"):
        LOADERS[family.name](path)


@pytest.mark.parametrize("change", [{"rms_norm_eps": "x"}, {"rope_theta": -3.0}, {"num_heads": 0}])
def test_constants_that_are_no_positive_numbers_are_refused(
    target: LoadedModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    """A traceback in the first pass, or positions that are not rotated as in training."""
    path, family = tmp_path / "head.safetensors", FAMILIES[0]
    head = family.head(target)
    family.save(path, head, IDS)
    rewrite(path, asdict(head.config) | change)
    with pytest.raises(CheckpointError, match=f"its {next(iter(change))}=.* is no positive number"):
        load_head(path)


def test_a_head_of_another_family_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    """Weights of one family run as another."""
    path = tmp_path / "head.safetensors"
    FAMILIES[0].save(path, FAMILIES[0].head(target), IDS)
    with pytest.raises(CheckpointError, match="has no 'dspark_head' metadata"):
        load_dspark_head(path)
