"""A tiny checkpoint whose drafts are right for known tokens, for the self-test: no download, no training.

All layers are zero but embeddings, norms and heads, so a token's successor is a table: the row of the head
that looks like the token's embedding. The drafting heads hold the same table but for a part of the tokens,
so they are sure, and right as often as that part says. Weights are named and shaped by the model class
itself.

Invariants: seeded; float16; the vocabulary is no multiple of the padding, so that padded columns exist.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtllm_av.builder.trtllm.assumptions import assumptions

VOCAB_SIZE = 499
HIDDEN_SIZE = 512
WRONG_SHARE = 0.25


def next_tokens() -> torch.Tensor:
    """[V] int64: what the target emits behind each token, one long cycle."""
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def write_tiny_checkpoint(
    folder: Path, *, num_levels: int, max_draft_len: int, max_non_leaves: int
) -> Path:
    """Write config.json and rank0.safetensors into ``folder``; needs TensorRT-LLM for the names."""
    config = _config(num_levels, max_draft_len, max_non_leaves)
    eagle = importlib.import_module("tensorrt_llm.models.eagle.model")
    configuration = importlib.import_module("tensorrt_llm.models.eagle.config").EagleConfig
    model = eagle.EagleForCausalLM(configuration.from_dict(json.loads(json.dumps(config))))
    weights = {
        name: _weight(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "rank0.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _embedding() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) / math.sqrt(HIDDEN_SIZE)


def _head(following: torch.Tensor, num_rows: int) -> torch.Tensor:
    head = torch.zeros(num_rows, HIDDEN_SIZE)
    head[following] = 8.0 * _embedding()  # sure of itself after the norm
    return head


def _weight(name: str, shape: Sequence[int]) -> torch.Tensor:
    """The weight of the parameter ``name``."""
    if name.endswith("vocab_embedding.weight"):
        weight = torch.zeros(*shape)
        weight[:VOCAB_SIZE] = _embedding()
    elif name.endswith("lm_head.weight"):
        following = next_tokens()
        if "eagle_nets" in name:
            wrong = torch.arange(int(WRONG_SHARE * VOCAB_SIZE))
            following[wrong] = following[wrong.roll(1)]
        weight = _head(following, shape[0])
    elif name.endswith("drafter.fc.weight"):
        weight = torch.zeros(*shape)
        weight[:, : shape[0]] = torch.eye(shape[0])  # the embedding, not the hidden state behind it
    elif len(shape) == 1 and name.endswith(("norm.weight", "layernorm.weight", "ln_f.weight")):
        weight = torch.ones(*shape)
    else:
        weight = torch.zeros(*shape)
    return weight.to(torch.float16).contiguous()


def _config(num_levels: int, max_draft_len: int, max_non_leaves: int) -> dict[str, Any]:
    def llama(num_layers: int) -> dict[str, Any]:
        return {
            "architecture": "LlamaForCausalLM",
            "dtype": "float16",
            "logits_dtype": "float32",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 1024,
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_size": 128,  # one that attention over trees of drafts has kernels for
            "intermediate_size": 1024,
            "norm_epsilon": 1e-5,
            "position_embedding_type": "rope_gpt_neox",
            "hidden_act": "silu",
            "rotary_base": 10000.0,
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        }

    return llama(2) | {
        "architecture": assumptions().architecture,
        "num_eagle_layers": num_levels,
        "max_draft_len": max_draft_len,
        "max_non_leaves_per_layer": max_non_leaves,
        "eagle_net_config": llama(1),
    }
