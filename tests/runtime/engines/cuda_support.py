"""Engines over one tiny model with a random head: the host's own, and the device path on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.runtime.models.drafters.tiny_heads import layer_config, randomise
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.engines.cuda.create import DraftHead, create_executor
from trtllm_av.runtime.engines.cuda.engine import CudaEngine
from trtllm_av.runtime.engines.torch_executor import TorchExecutor
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.drafters.eagle import EagleDrafter
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead
from trtllm_av.runtime.models.llama import LlamaModel
from trtllm_av.runtime.params import AvMode, SamplingParams
from trtllm_av.runtime.random_source import KeyedSource
from trtllm_av.runtime.scheduler import Engine

VOCAB_SIZE = 97
K = 4
NUM_SLOTS = 4
MAX_LEN = 96
MAX_SEQ_LEN = MAX_LEN - 2 * (K + 1)
COSTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [4, 1.1], [8, 1.6], [12, 2.4], [16, 3.6], [32, 9.0]],
    "draft_ms_by_requests": [[1, 0.2], [4, 0.3]],
}
LENGTHS = (20, 3, 11, 40, 1, 7, 16)


def tiny_model(*, is_tied: bool = False) -> LoadedModel:
    """Three layers of random weights, large enough that wrong attention changes the tokens."""
    config = LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        rope_scaling=None,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
    )
    generator = torch.Generator().manual_seed(5)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, 32),
        "model.norm.weight": 1.0 + matrix(32),
    }
    if not is_tied:
        tensors["lm_head.weight"] = matrix(VOCAB_SIZE, 32)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name, rows, columns in (
            ("self_attn.q_proj", 32, 32),
            ("self_attn.k_proj", 16, 32),
            ("self_attn.v_proj", 16, 32),
            ("self_attn.o_proj", 32, 32),
            ("mlp.gate_proj", 48, 32),
            ("mlp.up_proj", 48, 32),
            ("mlp.down_proj", 32, 48),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
            if name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}{name}.bias"] = matrix(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1.0 + matrix(32)
    model = LlamaModel(config, tensors)
    return LoadedModel(model, config, None, f"tiny tied={is_tied}", ())


def random_head(loaded: LoadedModel) -> tuple[EagleHead, torch.Tensor]:
    """A head of random weights and the 41 ids that it drafts."""
    head = EagleHead(layer_config(loaded))
    randomise(head)
    generator = torch.Generator().manual_seed(7)
    return head, torch.randperm(VOCAB_SIZE, generator=generator)[:41].sort().values


def controller(mode: AvMode) -> AdaptiveController:
    costs = CostModel.from_table(COSTS, num_positions=K) if mode in ("adaptive", "shadow") else None
    return AdaptiveController(mode, 0 if mode == "off" else K, NUM_SLOTS, costs, refit_interval=20)


def host_engine(loaded: LoadedModel, mode: AvMode, *, eos: Sequence[int] = ()) -> Engine:
    drafter = None
    if mode != "off":
        head, ids = random_head(loaded)
        head.prepack()
        drafter = EagleDrafter(
            head, ids, loaded, num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=K
        )
    return Engine(
        TorchExecutor(loaded, num_slots=NUM_SLOTS, max_len=MAX_LEN),
        drafter,
        controller(mode),
        KeyedSource(),
        max_seq_len=MAX_SEQ_LEN,
        eos_token_ids=eos,
    )


def device_engine(
    loaded: LoadedModel,
    mode: AvMode,
    *,
    device: str = "cpu",
    eos: Sequence[int] = (),
    prefill_chunk: int = 256,
    is_greedy_draft: bool = False,
    max_len: int = MAX_LEN,
) -> CudaEngine:
    executor = create_executor(
        loaded,
        None if mode == "off" else DraftHead(*random_head(loaded)),
        device=torch.device(device),
        num_slots=NUM_SLOTS,
        max_len=max_len,
        num_positions=0 if mode == "off" else K,
        is_greedy_draft=is_greedy_draft,
    )
    return CudaEngine(
        executor,
        controller(mode),
        max_seq_len=max_len - 2 * (K + 1),
        eos_token_ids=eos,
        prefill_chunk=prefill_chunk,
    )


def random_prompts(count: int = len(LENGTHS)) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCAB_SIZE, 3 + n).tolist() for n in range(count)]


def serve(engine: Engine, params: dict[str, Any]) -> list[tuple[list[int], str | None]]:
    """Tokens and finish reason of seven requests of different lengths, in order."""
    found: dict[int, tuple[list[int], str | None]] = {}
    for n, (prompt, length) in enumerate(zip(random_prompts(), LENGTHS, strict=True)):
        number = engine.submit(prompt, SamplingParams(max_tokens=length, seed=n, **params))
        found[number] = ([], None)
    for _ in range(1000):
        if not engine.has_work:
            return [found[number] for number in sorted(found)]
        for event in engine.step():
            tokens, reason = found[event.request_id]
            assert reason is None, "nothing may follow the end of a request"
            found[event.request_id] = (tokens + event.token_ids, event.finish_reason)
    raise AssertionError("the engine does not finish")
