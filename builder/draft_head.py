"""Heads on the target's hidden state, and the two tensors of the target that they use.

Invariants: a head is exported only with the target it was trained for; the target's tensors are taken as
``runtime.models.drafters.eagle`` takes them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.builder.draft_source import LogitPair
from trtllm_av.builder.export import DRAFT_STEP, export_head_step
from trtllm_av.builder.networks import HeadStepNetwork
from trtllm_av.builder.verify import verify_head_step
from trtllm_av.runtime.engines.engine_directory import DRAFT_TO_TARGET
from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
from trtllm_av.runtime.models.drafters import eagle
from trtllm_av.runtime.models.drafters.eagle_head import EagleHeadConfig, load_head
from trtllm_av.runtime.models.drafters.head_file import check_draft_ids, target_fingerprint
from trtllm_av.runtime.models.llama import LlamaModel, TensorReader


@dataclass(frozen=True, slots=True)
class HeadSource:
    """Weights at ``path`` that fit ``target``; ``config`` is the shape of the head's layer,
    ``draft_to_target`` [V_d] int64."""

    method: ClassVar[str] = "eagle"

    path: Path
    config: EagleHeadConfig
    draft_to_target: Tensor
    target: CheckpointFiles

    @classmethod
    def find(cls, path: Path, target: CheckpointFiles) -> HeadSource:
        """Raises CheckpointError for a file that is no head or one of another target."""
        head, draft_to_target = load_head(path)
        check_fingerprint(str(path), head.config.target_fingerprint, target)
        check_draft_ids(path, draft_to_target, target.config.vocab_size)
        return cls(path, head.config, draft_to_target, target)

    @property
    def label(self) -> str:
        return self.path.name

    @property
    def vocab_size(self) -> int:
        return self.draft_to_target.numel()

    @property
    def num_attention_layers(self) -> int:
        return 1

    def export(self, dtype: torch.dtype, max_len: int, folder: Path) -> None:
        export_head_step(self.network(dtype), dtype, max_len, folder / DRAFT_STEP)
        np.save(folder / DRAFT_TO_TARGET, self.draft_to_target.int().numpy())

    def check(
        self, folder: Path, target: LlamaModel, num_positions: int
    ) -> tuple[float, list[LogitPair]]:
        return verify_head_step(folder / DRAFT_STEP, self.network(torch.float32), num_positions)

    def describe(self) -> dict[str, Any]:
        return {"method": self.method, "head": asdict(self.config)}

    def network(self, dtype: torch.dtype) -> HeadStepNetwork:
        """The step network with weights of ``dtype``."""
        head, _ = load_head(self.path, dtype)
        return HeadStepNetwork(head, *target_tensors(self.target, self.draft_to_target, dtype))


def packaged_head(target: CheckpointFiles) -> Path | None:
    """The file of weights that ships for ``target``, if any does."""
    name = eagle.PACKAGED_HEADS.get(_fingerprint(target))
    return None if name is None else Path(eagle.__file__).with_name("weights") / name


def check_fingerprint(name: str, trained_for: str, target: CheckpointFiles) -> None:
    """Raise CheckpointError unless the head ``name`` was trained for ``target``."""
    fingerprint = _fingerprint(target)
    if trained_for != fingerprint:
        raise CheckpointError(
            f"--speculative_model {name!r} was trained for the target {trained_for}, this model is "
            f"{fingerprint}; train a head for it with benchmarks/train_drafter.py"
        )


def target_tensors(
    target: CheckpointFiles, draft_to_target: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The target's embedding [V, H], and its output layer at the draft vocabulary [V_d, H]."""
    config = target.config
    take = TensorReader(target.lazy_tensors(), dtype)
    shape = (config.vocab_size, config.hidden_size)
    embedding = take("model.embed_tokens.weight", *shape)
    rows = embedding if config.tie_word_embeddings else take("lm_head.weight", *shape)
    return embedding, rows[draft_to_target]


def _fingerprint(target: CheckpointFiles) -> str:
    config = target.config
    take = TensorReader(target.lazy_tensors(), torch.bfloat16)  # what a fingerprint is made of
    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    return target_fingerprint(lambda ids: F.embedding(ids, embedding), config.vocab_size)
