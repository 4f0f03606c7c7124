"""A GGUF file of the Llama architecture as a Hugging Face folder.

Objective: exact float32 weights, the configuration and the tokenizer, without instantiating a model.
Invariants: weights are dequantised, never rounded; queries and keys are put back into the half-split
rotary order. Only what SmolLM2's file needs: byte-level BPE with pre-tokenizer ``smollm``, tied output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from trtllm_av.runtime.errors import MissingDependencyError


def convert(gguf: Path, folder: Path) -> None:
    """Write model.safetensors (float32), config.json and the tokenizer of ``gguf`` into ``folder``.

    Raises MissingDependencyError without the package ``gguf``, OSError if the folder cannot be written.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise MissingDependencyError(
            f"reading {gguf.name} needs the package gguf; install it with: pip install gguf"
        ) from None
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _hf_config(fields)
    tensors = {}
    for tensor in reader.tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = torch.from_numpy(array)
        name = _hf_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _split_half(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _split_half(values, config["num_key_value_heads"])
        tensors[name] = values.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _save_tokenizer(fields, folder)


def _hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` that the GGUF's metadata stands for."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_GGUF_PARTS[part]}.{kind}"


def _split_half(weight: Tensor, num_heads: int) -> Tensor:
    """Undo GGUF's row order: it interleaves the two halves of each head for its own rotary form."""
    interleaved = weight.view(num_heads, -1, 2, weight.shape[1])
    return interleaved.transpose(1, 2).reshape(weight.shape)


def _save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE with single digits, as the GGUF's pre-tokenizer name ``smollm`` stands for.

    ``transformers``' own GGUF reader leaves the splitting of digits out, which changes how spaces in
    front of a number are cut.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's type of special tokens
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for role, name in names.items()
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **special,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
