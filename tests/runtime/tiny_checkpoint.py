"""A model folder of a few kilobytes: byte-level tokenizer, chat template, random Llama weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 0
MAX_LEN = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2 style: EOS is 0, every byte is a token (ids 1…256), and four merged words follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS} | {letter: index for index, letter in enumerate(alphabet, 1)}
    merges = [("a", "b"), ("ab", "c"), ("E", "N"), ("EN", "D")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, num_layers: int = 4) -> Path:
    """Save model and tokenizer to ``folder``; weights are large enough that greedy tokens vary."""
    tokenizer = byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.3,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cheap_draft_costs() -> dict[str, object]:
    """Step costs under which drafting pays as soon as a fair share of drafts is accepted."""
    return {
        "unit": "ms",
        "graph_limit_tokens": 0,
        "verify_ms_by_tokens": [[1, 10.0], [8, 10.5], [64, 16.0]],
        "draft_ms_by_requests_and_depth": [[1, 1, 0.1], [1, 7, 0.7], [8, 1, 0.2], [8, 7, 1.4]],
    }
