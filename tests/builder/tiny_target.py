"""A random target that every backend has kernels for, with a tokenizer and a random head."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.runtime.models.tiny_checkpoints import save_tiny
from tests.runtime.tiny_checkpoint import byte_level_tokenizer
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.models.drafters.eagle_head import (
    EagleHead,
    EagleHeadConfig,
    save_head,
)
from trtllm_av.runtime.models.drafters.head_file import target_fingerprint

NUM_DRAFT_IDS = 41


def save_target(folder: Path, kind: str = "llama", *, seed: int = 0) -> Path:
    """Two layers; TensorRT-RTX has no attention kernel for heads narrower than 16."""
    tokenizer = byte_level_tokenizer()
    save_tiny(folder, kind, seed=seed, head_dim=16, num_hidden_layers=2, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def save_random_head(path: Path, target: Path) -> Path:
    """A head of random weights that says it was trained for ``target``."""
    loaded = load_checkpoint(target)
    config = EagleHeadConfig(
        hidden_size=loaded.config.hidden_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=40,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        target_fingerprint=target_fingerprint(loaded.model.embed, loaded.config.vocab_size),
    )
    head = EagleHead(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    ids = torch.randperm(loaded.config.vocab_size, generator=generator)[:NUM_DRAFT_IDS]
    save_head(path, head, ids.sort().values)
    return path
