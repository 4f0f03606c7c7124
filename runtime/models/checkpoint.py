"""From a folder name to a model that can run.

Objective: load the packaged SmolLM2 ("smollm2") or any local Hugging Face folder of the Llama family
(config.json, safetensors in one file or in shards, tokenizer files where there are any). Invariants:
nothing is downloaded; weights are memory-mapped; every failure is one line that names the file or field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.llama import LlamaModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Enough of each end of a file to tell fine-tunes of one shape apart without reading gigabytes.
_DIGEST_SPAN = 1 << 16


@dataclass(slots=True)
class LoadedModel:
    """A model with what is needed to serve it; ``tokenizer`` is None if the folder has none.

    ``digest`` (hex) names configuration and weights, for caches of measured costs.
    """

    model: LlamaModel
    config: LlamaConfig
    tokenizer: PreTrainedTokenizerBase | None
    digest: str
    eos_token_ids: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A model folder whose configuration was read and whose weight files exist; for builders, which need
    the tensors and no model. ``hf_config`` is the parsed ``config.json``."""

    folder: Path
    hf_config: dict[str, Any]
    config: LlamaConfig
    weights: list[Path]

    @classmethod
    def find(cls, source: str | Path) -> CheckpointFiles:
        """Look at ``"smollm2"`` or a folder; raises as ``load_checkpoint`` does."""
        folder = smollm2.converted_folder() if source == smollm2.NAME else Path(source)
        if not source or not folder.is_dir():  # Path("") is the folder one is in
            raise CheckpointError(
                f"model folder {str(source)!r} does not exist; give a Hugging Face model folder or "
                f"{smollm2.NAME!r}"
            )
        hf_config = _read_json(folder / "config.json")
        return cls(folder, hf_config, LlamaConfig.from_hf(hf_config), _weight_files(folder))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, memory-mapped, in the files' dtype."""
        return _read_tensors(self.weights)

    def lazy_tensors(self) -> Mapping[str, Tensor]:
        """The same, each mapped when it is asked for: what is converted and dropped needs no memory."""
        return _LazyTensors(self.weights)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_tokenizer(self.folder)

    def eos_token_ids(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
        """Tokens that end a text, () if nothing names one."""
        return _eos_token_ids(self.folder, self.hf_config, tokenizer)

    def digest(self) -> str:
        """Hex; names configuration and weights."""
        return _digest([self.folder / "config.json", *self.weights])


def load_checkpoint(source: str | Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load ``"smollm2"`` or a folder, with weights of ``dtype`` (float32 or bfloat16).

    Raises CheckpointError for anything unreadable or unsupported, MissingDependencyError if
    ``"smollm2"`` is asked for and its package is not installed.
    """
    files = CheckpointFiles.find(source)
    # Importing the tokenizer's library takes as long as reading the weights, and both can overlap.
    with ThreadPoolExecutor(1) as pool:
        pending_tokenizer = pool.submit(files.tokenizer)
        model = LlamaModel(files.config, files.tensors(), dtype)
        tokenizer = pending_tokenizer.result()
    return LoadedModel(
        model=model,
        config=files.config,
        tokenizer=tokenizer,
        digest=files.digest(),
        eos_token_ids=files.eos_token_ids(tokenizer),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"model folder {str(path.parent)!r} has no {path.name}; give a Hugging Face model folder or "
            f"{smollm2.NAME!r}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{str(path)!r} must hold a JSON object")
    return data


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``, each known to exist."""
    if (folder / _WEIGHTS_INDEX).exists():
        index = _read_json(folder / _WEIGHTS_INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{str(folder / _WEIGHTS_INDEX)!r} has no weight_map")
        names = sorted({str(name) for name in index.values()})
    elif (folder / _WEIGHTS).exists():
        names = [_WEIGHTS]
    else:
        raise CheckpointError(
            f"model folder {str(folder)!r} has neither {_WEIGHTS} nor {_WEIGHTS_INDEX}; "
            "save it with save_pretrained(safe_serialization=True)"
        )
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"model folder {str(folder)!r} lacks the shard {name!r}")
    return [folder / name for name in names]


def _read_tensors(files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (a shard is no mapping)
                    tensors[name] = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read weights {str(path)!r}: {error}") from None
    return tensors


class _LazyTensors(Mapping[str, Tensor]):
    def __init__(self, files: list[Path]) -> None:
        self._file_of: dict[str, Path] = {}
        for path in files:
            self._file_of |= dict.fromkeys(_read_tensors([path]), path)

    def __getitem__(self, name: str) -> Tensor:
        path = self._file_of[name]
        with safe_open(str(path), framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(name)
            return tensor

    def __contains__(self, name: object) -> bool:  # without mapping the tensor
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The Hugging Face tokenizer of ``folder``, None if it has none; raises CheckpointError."""
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        )
    except Exception as error:  # the tokenizer classes raise whatever their parsers raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"cannot read the tokenizer of {str(folder)!r}: {reason[0]}"
        ) from None
    return tokenizer


def _eos_token_ids(
    folder: Path, hf_config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """End tokens as ``generate`` would take them: generation config, config, tokenizer."""
    generation = folder / "generation_config.json"
    candidates = [
        _read_json(generation).get("eos_token_id") if generation.exists() else None,
        hf_config.get("eos_token_id"),
        tokenizer.eos_token_id if tokenizer is not None else None,
    ]
    for value in candidates:
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
            return tuple(value)
    return ()


def _digest(files: list[Path]) -> str:
    """SHA-256 over name, size and both ends of each file."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_DIGEST_SPAN))
            stream.seek(max(0, size - _DIGEST_SPAN))
            digest.update(stream.read(_DIGEST_SPAN))
    return digest.hexdigest()
