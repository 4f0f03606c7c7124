"""Weights of drafting heads on disk: written in float16, refused unless they are whole and fit the target.

A file is a safetensors with one tensor per parameter, the map of draft ids, and the head's configuration
as JSON in its metadata, under a key that names the family. Invariants: the configuration names the target
whose states the head was trained on; a head of another target is refused, because it would be lossless
and accept nothing; every draft id is one token of the target, named once: q of a token that two ids mean
would not be the law it was drawn from.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.params import SpeculativeConfig

if TYPE_CHECKING:
    from dataclasses import Field

    from trtllm_av.runtime.models.checkpoint import LoadedModel

_MAP_NAME = "draft_to_target"


class HeadConfig(Protocol):
    """What every head's configuration tells, whatever else is in it (a dataclass)."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def target_fingerprint(self) -> str: ...


class _Configured(Protocol):
    @property
    def config(self) -> HeadConfig: ...


Head = TypeVar("Head", bound=nn.Module)
Checked = TypeVar("Checked", bound=_Configured)


def target_fingerprint(embed: Callable[[Tensor], Tensor], vocab_size: int) -> str:
    """16 hex digits that tell targets apart, whatever their file format and working dtype.

    ``embed`` maps token ids [N] int64 to the target's embeddings [N, H].
    """
    sample = embed(torch.arange(0, vocab_size, max(1, vocab_size // 64)))
    bits = sample.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def save_weights(
    path: Path, family: str, config: HeadConfig, head: nn.Module, draft_to_target: Tensor
) -> None:
    """Write the weights in float16 and the map of draft ids [V_d] in int32."""
    tensors = {name: value.detach().cpu().half() for name, value in head.named_parameters()}
    tensors[_MAP_NAME] = draft_to_target.to("cpu", torch.int32)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={family: json.dumps(asdict(config))},
    )


def load_weights(
    path: Path, family: str, build: Callable[[dict[str, Any]], Head], dtype: torch.dtype
) -> tuple[Head, Tensor]:
    """Read a head, frozen, and its map of draft ids (int64 [V_d]); ``build`` makes it from its JSON.

    Raises CheckpointError if ``path`` is missing, unreadable, damaged or no head of this family.
    """
    if not path.is_file():
        raise CheckpointError(f"drafter weights {str(path)!r} not found; name an existing file")
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(family)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if text is None:
            raise CheckpointError(
                f"{str(path)!r} has no {family!r} metadata; use a file written by "
                "benchmarks/train_drafter.py"
            )
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"tensor {name!r} holds a value that is not finite")
        draft_to_target = _draft_ids(tensors.pop(_MAP_NAME))
        config = json.loads(text)
        _check_numbers(config)
        head = build(config)
        head.load_state_dict(tensors)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"cannot read drafter weights {str(path)!r}: {reason}; use a whole file written by "
            "benchmarks/train_drafter.py"
        ) from None
    return head.to(dtype).requires_grad_(False).eval(), draft_to_target


def _draft_ids(stored: Tensor) -> Tensor:
    """The map of draft ids, int64 [V_d]; ValueError unless it names tokens, each once."""
    if stored.dtype not in (torch.int32, torch.int64) or stored.ndim != 1 or stored.numel() == 0:
        raise ValueError(f"{_MAP_NAME} is {stored.dtype} {list(stored.shape)}, not a list of ids")
    if int(stored.min()) < 0 or stored.unique().numel() != stored.numel():
        raise ValueError(f"{_MAP_NAME} has a negative id, or one id twice")
    return stored.long()


def _check_numbers(config: dict[str, Any]) -> None:
    """Raise ValueError for a size or constant that is no positive number, at any depth."""
    if not isinstance(config, dict):
        raise ValueError(f"its configuration is {config!r}, not an object")
    for name, value in config.items():
        if isinstance(value, dict):
            _check_numbers(value)
        elif name != "target_fingerprint" and not (
            isinstance(value, int | float) and 0 < value < math.inf
        ):
            raise ValueError(f"its {name}={value!r} is no positive number")


def packaged_file(target: LoadedModel, packaged: Mapping[str, str]) -> Path | None:
    """The file of ``packaged`` (names by fingerprint) that was trained for ``target``, if one was."""
    name = packaged.get(target_fingerprint(target.model.embed, target.config.vocab_size))
    return None if name is None else Path(__file__).with_name("weights") / name


def head_path(
    config: SpeculativeConfig, target: LoadedModel, method: str, packaged: Mapping[str, str]
) -> Path:
    """Where the weights are that ``config`` asks for: its ``model``, else what ships for ``target``.

    Raises UsageError if nothing ships for it, or for a setting that a head cannot honour.
    """
    if config.skip_layers is not None:
        raise UsageError(
            f"skip_layers={config.skip_layers}: only method 'layer_skip' has it; remove it"
        )
    if config.model is not None:
        return Path(config.model)
    path = packaged_file(target, packaged)
    if path is None:
        raise UsageError(
            f"method {method!r} has no packaged head for this target; set model to a file of weights"
        )
    return path


def check_draft_ids(path: Path, draft_to_target: Tensor, vocab_size: int) -> None:
    """Raise CheckpointError if the map [V_d] of the head of ``path`` names a token that the target lacks."""
    if (largest := int(draft_to_target.max())) >= vocab_size:
        raise CheckpointError(
            f"{str(path)!r} drafts token {largest}, and the target's vocabulary has {vocab_size}; use a "
            "whole file written by benchmarks/train_drafter.py"
        )


def check_target(
    path: Path, config: HeadConfig, draft_to_target: Tensor, target: LoadedModel
) -> None:
    """Raise CheckpointError unless the head of ``path`` was trained on ``target``."""
    own = target_fingerprint(target.model.embed, target.config.vocab_size)
    if config.target_fingerprint != own:
        raise CheckpointError(
            f"{str(path)!r} was trained for another target; train a head for this one with "
            "benchmarks/train_drafter.py"
        )
    check_draft_ids(path, draft_to_target, target.config.vocab_size)


def open_head(
    config: SpeculativeConfig,
    target: LoadedModel,
    method: str,
    packaged: Mapping[str, str],
    load: Callable[[Path, torch.dtype], tuple[Checked, Tensor]],
) -> tuple[Checked, Tensor]:
    """The head that ``config`` asks for, in the target's dtype and trained for it, and its map of draft ids.

    Raises what :func:`head_path`, ``load`` and :func:`check_target` raise.
    """
    path = head_path(config, target, method, packaged)
    head, draft_to_target = load(path, target.dtype)
    check_target(path, head.config, draft_to_target, target)
    return head, draft_to_target
