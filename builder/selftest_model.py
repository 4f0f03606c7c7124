"""A random model of a few kilobytes for the self-test, and a random head for it.

Invariants: nothing is downloaded; every backend has its kernels; equal bytes in every run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trtllm_av.runtime.models.checkpoint import load_checkpoint
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, EagleHeadConfig, save_head
from trtllm_av.runtime.models.drafters.head_file import target_fingerprint

_LAYERS, _WIDTH, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM = 3, 64, 96, 4, 2, 16
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def write_model(folder: Path) -> Path:
    """A Hugging Face folder with fixed random weights and a tokenizer of bytes."""
    folder.mkdir(parents=True)
    vocab = {"<eos>": 0}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    config = _CONFIG | {"vocab_size": len(vocab), "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(len(vocab)), folder / "model.safetensors")
    return folder


def write_head(path: Path, model: Path) -> Path:
    """A file of random drafting weights for the model at ``model``; they draft tokens of even numbers."""
    loaded = load_checkpoint(model)
    config = loaded.config
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=_WIDTH,
            num_heads=_HEADS,
            num_kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            intermediate_size=_INNER,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            target_fingerprint=target_fingerprint(loaded.model.embed, config.vocab_size),
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in head.parameters():
            if weights.ndim == 2:
                weights.normal_(std=1.5 / math.sqrt(weights.shape[1]), generator=generator)
    save_head(path, head, torch.arange(0, config.vocab_size, 2))
    return path


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Large enough that a wrong row of the cache changes the logits visibly.
        return torch.randn(rows, columns, generator=generator).mul_(1.5 / math.sqrt(columns))

    weights = {"model.embed_tokens.weight": matrix(vocab_size, _WIDTH)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.o_proj": (_WIDTH, _HEADS * _HEAD_DIM),
            "mlp.gate_proj": (_INNER, _WIDTH),
            "mlp.up_proj": (_INNER, _WIDTH),
            "mlp.down_proj": (_WIDTH, _INNER),
        }
        weights |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(_WIDTH)
    weights["model.norm.weight"] = torch.ones(_WIDTH)
    return weights
