"""A random target that every backend has kernels for, with a tokenizer and a random head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.runtime.models.drafters.tiny_heads import layer_config, randomise
from tests.runtime.models.tiny_checkpoints import save_tiny
from tests.runtime.tiny_checkpoint import byte_level_tokenizer
from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, save_head

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
    head = EagleHead(replace(layer_config(loaded), head_dim=16))
    randomise(head)
    generator = torch.Generator().manual_seed(8)
    ids = torch.randperm(loaded.config.vocab_size, generator=generator)[:NUM_DRAFT_IDS]
    save_head(path, head, ids.sort().values)
    return path
