"""What a Llama-family checkpoint's ``config.json`` says, in the form that the model needs.

Objective: accept Llama, Mistral and Qwen2 configurations as ``transformers`` 4 and 5 write them, and
refuse everything that would silently change the result (other architectures, activations, attention
windows, rope types, quantised weights) with an error that names the field and its value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_av.runtime.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """The frequency-dependent position interpolation of Llama 3.1 (rope type ``llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and options of one decoder; ``rope_scaling`` None is rope type ``default``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """Read a parsed ``config.json``.

        Raises CheckpointError naming the architecture or field that is missing, malformed or not
        supported.
        """
        architecture = _architecture(data)
        _refuse_unsupported(data, architecture)
        rope_theta, rope_scaling = _rope(data)
        num_heads = _positive_int(data, "num_attention_heads")
        is_llama = architecture == "LlamaForCausalLM"
        # Absent means "as many as heads" only to Llama; the other families have fixed defaults.
        is_multi_head = is_llama or "num_key_value_heads" in data
        num_kv_heads = _positive_int(
            data, "num_key_value_heads", default=num_heads if is_multi_head else None
        )
        hidden_size = _positive_int(data, "hidden_size")
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads={num_heads} is not a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        if data.get("head_dim") is None and hidden_size % num_heads:
            raise CheckpointError(
                f"config.json: hidden_size={hidden_size} is not a multiple of "
                f"num_attention_heads={num_heads} and head_dim is not given"
            )
        head_dim = _positive_int(data, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(
                f"config.json: head_dim={head_dim} must be even for rotary positions"
            )
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = is_llama and bool(data.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_positive_int(data, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(data, "intermediate_size"),
            num_layers=_positive_int(data, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float(data, "rms_norm_eps", default=1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_positive_int(data, "max_position_embeddings"),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias,
            mlp_bias=is_llama and bool(data.get("mlp_bias", False)),
        )


def _architecture(data: Mapping[str, Any]) -> str:
    listed = data.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"config.json: architectures={listed!r} must be a list of names")
    model_type = data.get("model_type")
    name = listed[0] if listed else _ARCHITECTURE_OF_MODEL_TYPE.get(str(model_type))
    if name not in ARCHITECTURES:
        shown = name or f"model_type {model_type!r}"
        raise CheckpointError(
            f"architecture {shown} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def _refuse_unsupported(data: Mapping[str, Any], architecture: str) -> None:
    if data.get("quantization_config") is not None:
        raise CheckpointError(
            f"{architecture} with quantization_config: quantised checkpoints are not supported; "
            "use the unquantised one"
        )
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            f"{architecture} with hidden_act={activation!r}: only 'silu' is supported"
        )
    partial = data.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise CheckpointError(
            f"{architecture} with partial_rotary_factor={partial!r}: only full rotation is supported"
        )
    window = data.get("sliding_window", 4096)  # what both families assume where it is absent
    reach = data.get("max_position_embeddings")
    is_windowed = architecture == "MistralForCausalLM" or (
        architecture == "Qwen2ForCausalLM" and bool(data.get("use_sliding_window", False))
    )
    is_shorter = isinstance(window, int) and isinstance(reach, int) and window < reach
    if is_windowed and is_shorter:
        raise CheckpointError(
            f"{architecture} with sliding_window={window} below max_position_embeddings={reach}: "
            "sliding-window attention is not supported"
        )
    kinds = data.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds) and (is_shorter or not is_windowed):
        raise CheckpointError(
            f"{architecture} with layer_types={sorted(set(kinds))}: only full attention is supported"
        )


def _rope(data: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Rope base and scaling from ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4)."""
    field = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
    rope = data.get(field) or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: {field}={rope!r} must be an object")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(
            f"config.json: {field} per layer type ({sorted(rope)}) is not supported"
        )
    theta_source = rope if "rope_theta" in rope else data
    theta = _positive_float(theta_source, "rope_theta", default=10000.0)
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise CheckpointError(
            f"config.json: {field}.partial_rotary_factor={partial!r} is not supported"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=_positive_float(rope, "factor"),
            low_freq_factor=_positive_float(rope, "low_freq_factor"),
            high_freq_factor=_positive_float(rope, "high_freq_factor"),
            original_max_position_embeddings=_positive_int(
                rope, "original_max_position_embeddings"
            ),
        )
    raise CheckpointError(
        f"config.json: {field} of type {kind!r} is not supported; supported are 'default' and 'llama3'"
    )


def _positive_int(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key}={value!r} must be a positive integer")
    return value


def _positive_float(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json lacks {key}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json: {key}={value!r} must be a positive number")
    return float(value)
