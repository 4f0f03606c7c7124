"""Which drafting head goes into an engine, and the two tensors of the target that it uses.

Invariants: a head is exported only with the target it was trained for; the target's tensors are taken as
``runtime.models.drafters.eagle`` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.builder.networks import DraftStepNetwork
from trtllm_av.runtime.errors import CheckpointError, UsageError
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.drafters import eagle
from trtllm_av.runtime.models.drafters.eagle_head import load_head, target_fingerprint
from trtllm_av.runtime.models.llama import TensorReader

PACKAGED = "smollm2-head"


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights at ``path`` that fit the target; ``draft_to_target`` [V_d] int64."""

    path: Path
    draft_to_target: Tensor

    def network(
        self, config: LlamaConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
    ) -> DraftStepNetwork:
        """The step network with weights of ``dtype``."""
        take, shape = TensorReader(tensors, dtype), (config.vocab_size, config.hidden_size)
        embedding = take("model.embed_tokens.weight", *shape)
        rows = embedding if config.tie_word_embeddings else take("lm_head.weight", *shape)
        head, _ = load_head(self.path, dtype)
        return DraftStepNetwork(head, embedding, rows[self.draft_to_target])


def find_head(
    name: str | None, config: LlamaConfig, tensors: Mapping[str, Tensor]
) -> DraftHead | None:
    """The head called ``name``: ``smollm2-head``, a file of weights, or None for the one that ships
    for this target, if any does.

    Raises UsageError for anything else and for a missing packaged head, CheckpointError for a file that
    is no head or one of another target.
    """
    take = TensorReader(tensors, torch.bfloat16)  # what a fingerprint is made of
    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    fingerprint = target_fingerprint(lambda ids: F.embedding(ids, embedding), config.vocab_size)
    packaged = eagle.PACKAGED_HEADS.get(fingerprint)
    if name is None or name == PACKAGED:
        if packaged is None:
            if name is None:
                return None
            raise UsageError(
                f"--speculative_model {PACKAGED}: it was trained for SmolLM2-135M-Instruct, not for this "
                "model; give a file of weights"
            )
        path = Path(eagle.__file__).with_name("weights") / packaged
    elif name == "layer_skip" or Path(name).is_dir():
        raise UsageError(
            f"--speculative_model {name!r}: only heads are exported; give a file written by "
            f"benchmarks/train_drafter.py, or {PACKAGED}"
        )
    else:
        path = Path(name)
    head, draft_to_target = load_head(path)
    if head.config.target_fingerprint != fingerprint:
        raise CheckpointError(
            f"--speculative_model {name!r} was trained for the target {head.config.target_fingerprint}, "
            f"this model is {fingerprint}; train a head for it with benchmarks/train_drafter.py"
        )
    return DraftHead(path, draft_to_target)
