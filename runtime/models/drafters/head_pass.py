"""One pass of a head's layer over a ragged batch of entries, on a KV cache of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.models.attention import plan_attention
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.config import LlamaConfig
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead
from trtllm_av.runtime.models.kv_cache import KVCache


@torch.inference_mode()
def head_pass(
    head: EagleHead,
    layer: LlamaConfig,
    cache: KVCache,
    batch: PackedBatch,
    embedding: Tensor,
    hidden: Tensor,
) -> Tensor:
    """States [T, H] of the T entries of ``batch``; keys and values go into ``cache``.

    ``layer`` is the head's ``as_layer()``; ``embedding`` and ``hidden`` [T, H] are what each entry takes;
    an entry sees the cache up to itself.
    """
    plan = plan_attention(batch, layer, cache)
    residual, q, k, v = head.before_attention(embedding, hidden, batch.positions)
    cache.write(0, plan.token_slots, batch.positions, k, v)
    keys, values = cache.read(0, plan.rows, plan.reach)
    return head.after_attention(residual, plan.attend(q, keys, values))
