"""Drafters that are decoders: the target without some of its layers, and a second checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_av.builder.draft_source import LogitPair
from trtllm_av.builder.export import DRAFT_STEP, VERIFY, export_decoder, share_weights
from trtllm_av.builder.networks import DecoderNetwork
from trtllm_av.builder.verify import verify_decoder
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
from trtllm_av.runtime.models.drafters.draft_model import check_vocabulary
from trtllm_av.runtime.models.drafters.layer_skip import kept_layers
from trtllm_av.runtime.models.llama import LlamaModel

LAYER_SKIP = "layer_skip"


@dataclass(frozen=True, slots=True)
class LayerSkipSource:
    """The middle layers left out, as ``runtime.models.drafters.layer_skip`` does by default."""

    target: CheckpointFiles

    @property
    def label(self) -> str:
        num_layers = self.target.config.num_layers
        return f"{LAYER_SKIP}, {len(self._layers)} of {num_layers} layers"

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size

    @property
    def num_attention_layers(self) -> int:
        return len(self._layers)

    @property
    def _layers(self) -> list[int]:
        return kept_layers(self.target.config.num_layers, None)

    def export(self, dtype: torch.dtype, max_len: int, folder: Path) -> None:
        tensors = self.target.lazy_tensors()
        network = DecoderNetwork(self.target.config, tensors, dtype, self._layers)
        export_decoder(network, dtype, max_len, folder / DRAFT_STEP)
        share_weights(folder / DRAFT_STEP, folder / VERIFY)

    def check(
        self, folder: Path, target: LlamaModel, num_positions: int
    ) -> tuple[float, list[LogitPair]]:
        return verify_decoder(folder / DRAFT_STEP, target, num_positions, self._layers)

    def describe(self) -> dict[str, Any]:
        return {"method": LAYER_SKIP, "layers": self._layers}


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A second checkpoint of the target's vocabulary."""

    files: CheckpointFiles

    @classmethod
    def find(cls, folder: Path, target: CheckpointFiles, target_tokenizer: Any) -> CheckpointSource:
        """Raises CheckpointError for a folder that is no checkpoint or counts its tokens differently."""
        files = CheckpointFiles.find(folder)
        check_vocabulary(
            files.config.vocab_size, target.config.vocab_size, files.tokenizer(), target_tokenizer
        )
        return cls(files)

    @property
    def label(self) -> str:
        return f"draft_model {self.files.folder.name}"

    @property
    def vocab_size(self) -> int:
        return self.files.config.vocab_size

    @property
    def num_attention_layers(self) -> int:
        return self.files.config.num_layers

    def export(self, dtype: torch.dtype, max_len: int, folder: Path) -> None:
        network = DecoderNetwork(self.files.config, self.files.lazy_tensors(), dtype)
        export_decoder(network, dtype, max_len, folder / DRAFT_STEP)

    def check(
        self, folder: Path, target: LlamaModel, num_positions: int
    ) -> tuple[float, list[LogitPair]]:
        model = LlamaModel(self.files.config, self.files.tensors())
        return verify_decoder(folder / DRAFT_STEP, model, num_positions)

    def describe(self) -> dict[str, Any]:
        return {"method": "draft_model", "digest": self.files.digest()}
