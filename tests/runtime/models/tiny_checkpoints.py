"""Small random checkpoints that `transformers` writes, and its logits as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # large enough that wrong attention changes the logits visibly
}
# Of the four frequencies of an 8-wide head one is kept, two are blended and one is divided.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = ("llama", "llama_biases", "llama3_rope", "head_dim", "mistral", "qwen2", "multi_head")


def save_tiny(folder: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of one of KINDS and return its folder; ``changes`` edit its configuration."""
    torch.manual_seed(seed)
    sizes = SIZES | changes
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "llama_biases":
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True))
    elif kind == "llama3_rope":
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=LLAMA3_ROPE))
    elif kind == "head_dim":
        model = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=12, tie_word_embeddings=True))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    elif kind == "multi_head":
        model = LlamaForCausalLM(LlamaConfig(**sizes | {"num_key_value_heads": 4}))
    else:
        raise AssertionError(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default, which would hide a bias that is not added
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """The checkpoint as ``transformers`` runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), V] of one sequence from scratch."""
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits
