"""The target as its checkpoint stores it: raw tensors beside configuration and tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.config import LlamaConfig


@dataclass(slots=True)
class Source:
    """``weights`` are named as in the checkpoint, in the dtype that is stored."""

    weights: dict[str, Tensor]
    config: LlamaConfig
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised, none are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def load_source(name: str) -> Source:
    """Load the target ``name`` ("smollm2" or a Hugging Face folder) for training."""
    folder = smollm2.converted_folder() if name == smollm2.NAME else Path(name)
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise UsageError(f"--model {name} has no {needed}; name a folder that does")
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    config = LlamaConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return Source(weights, config, Tokenizer.from_file(str(folder / "tokenizer.json")))
