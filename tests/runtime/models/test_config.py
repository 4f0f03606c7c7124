"""What of a config.json is understood, and that nothing else slips through."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.models.tiny_checkpoints import LLAMA3_ROPE
from trtllm_av.runtime.errors import CheckpointError
from trtllm_av.runtime.models.config import Llama3Rope, LlamaConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": None}


def parse(**changes: Any) -> LlamaConfig:
    return LlamaConfig.from_hf(BASE | changes)


def test_rope_of_both_transformers_versions() -> None:
    """A rope base or scaling read from one spelling only: positions would be silently wrong."""
    old = parse(
        rope_theta=5e5, rope_scaling={k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    )
    new = parse(rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    assert old == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == Llama3Rope(4.0, 1.0, 4.0, 64)
    assert parse(rope_theta=5e5, rope_scaling=None).rope_scaling is None
    assert parse(rope_scaling={"type": "default"}).rope_theta == 10000.0


def test_biases_belong_to_the_architecture() -> None:
    """Qwen2's biases have no field, Llama's have one, and Mistral has none."""
    assert parse(**QWEN2).qkv_bias and not parse(**QWEN2).output_bias
    biased = parse(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.output_bias and biased.mlp_bias
    assert not parse(**MISTRAL).qkv_bias


def test_sliding_windows_that_do_not_matter() -> None:
    """Refusing models whose window is off or as long as the context."""
    assert parse(**QWEN2, use_sliding_window=False, sliding_window=32).num_layers == 2
    assert parse(**MISTRAL | {"sliding_window": 512}).num_layers == 2
    assert parse(**QWEN2, layer_types=["full_attention"] * 2).num_layers == 2


def test_head_defaults() -> None:
    """Head counts guessed for a family that defines other defaults."""
    llama = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert LlamaConfig.from_hf(llama).num_kv_heads == 4
    assert LlamaConfig.from_hf(llama).head_dim == 16
    with pytest.raises(CheckpointError, match="lacks num_key_value_heads"):
        LlamaConfig.from_hf(llama | QWEN2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": "gemma"}, "model_type 'gemma' is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "x"}}}, "rope_parameters"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] must be an object"),
        (LLAMA3_ROPE | {"rope_scaling": {"rope_type": "llama3"}}, "lacks factor"),
        (MISTRAL | {"sliding_window": 128}, "sliding_window=128"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": "many"}, "vocab_size='many' must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
    ],
)
def test_unsupported_is_named(changes: dict[str, Any], message: str) -> None:
    """Running a model whose configuration means something else, with plausible but wrong tokens."""
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)
