"""The drafters that can be trained: how a new one starts, how it is unrolled, how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trtllm_av.runtime.models.drafters.dspark_head import (
    DSparkHead,
    DSparkHeadConfig,
    load_dspark_head,
    save_dspark_head,
)
from trtllm_av.runtime.models.drafters.eagle_head import (
    EagleHead,
    EagleHeadConfig,
    load_head,
    save_head,
)
from trtllm_av.runtime.models.drafters.head_file import target_fingerprint

from .block import Proposal, advance, run_block
from .chain import chain_step, run_chain
from .target import FrozenTarget


class Family(Protocol):
    """One family; ``num_steps``: positions it is usually trained for; ``compile`` makes its unrolling fast
    on CUDA, for runs long enough to pay for it."""

    name: str
    num_steps: int

    def new_head(self, target: FrozenTarget, num_steps: int, seed: int) -> nn.Module:
        """A head to be trained for ``num_steps`` positions."""
        ...

    def compile(self) -> None: ...

    def unroll(
        self, head: Any, embedding_rows: Tensor, token_ids: Tensor, hidden: Tensor, num_steps: int
    ) -> Iterator[Proposal]:
        """See ``run_chain`` and ``run_block``."""
        ...

    def save(self, path: Path, head: Any, draft_to_target: Tensor) -> None: ...

    def load(self, path: Path) -> tuple[nn.Module, Tensor]:
        """A head and its map of draft ids."""
        ...


def _compiled_chain_step() -> Any:
    # Triton 3.6 cannot compile the persistent reduction that attention is fused into.
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "triton.persistent_reductions": False
    }
    return torch.compile(chain_step, options=options)


class EagleFamily:
    """The autoregressive head; ``wide`` is the width of its MLP."""

    name = "eagle"
    num_steps = 5

    def __init__(self, wide: int = 2304) -> None:
        self._wide = wide
        self._step = chain_step

    def new_head(self, target: FrozenTarget, num_steps: int, seed: int) -> EagleHead:
        head = EagleHead(_layer_config(target, self._wide)).to(target.device)
        _start_as_last_layer(head, target, torch.Generator().manual_seed(seed))
        return head

    def compile(self) -> None:
        self._step = _compiled_chain_step()

    def unroll(
        self, head: Any, embedding_rows: Tensor, token_ids: Tensor, hidden: Tensor, num_steps: int
    ) -> Iterator[Proposal]:
        states = run_chain(head, embedding_rows, token_ids, hidden, num_steps, self._step)
        return (Proposal(state) for state in states)

    def save(self, path: Path, head: Any, draft_to_target: Tensor) -> None:
        save_head(path, head, draft_to_target)

    def load(self, path: Path) -> tuple[EagleHead, Tensor]:
        return load_head(path)


class DSparkFamily:
    """The block drafter with a sequential and a confidence head; widths as in ``DSparkHeadConfig``."""

    name = "dspark"
    num_steps = 7

    def __init__(
        self,
        wide: int = 1472,
        state_size: int = 256,
        sequential_size: int = 512,
        confidence_size: int = 64,
    ) -> None:
        self._wide = wide
        self._sizes = (state_size, sequential_size, confidence_size)
        self._step, self._advance = chain_step, advance

    def new_head(self, target: FrozenTarget, num_steps: int, seed: int) -> DSparkHead:
        """The layer starts as the target's last one, the corrections small, the confidence at half the
        log-odds of the draft's top token."""
        config = DSparkHeadConfig(_layer_config(target, self._wide), num_steps, *self._sizes)
        head = DSparkHead(config).to(target.device)
        generator = torch.Generator().manual_seed(seed)
        _start_as_last_layer(head.layer, target, generator)
        with torch.no_grad():
            head.masks.copy_(_noise(*head.masks.shape, generator, 0.1))
            sequential = head.sequential
            for part in (sequential.from_block, sequential.from_embedding, sequential.from_state):
                part.copy_(_noise(*part.shape, generator, part.shape[1] ** -0.5))
            # Not zero: the norm of a carried state at rest would have no bounded slope.
            sequential.down.copy_(_noise(*sequential.down.shape, generator, 0.02))
            sequential.lift.copy_(_noise(*sequential.lift.shape, generator, 0.02))
            inputs = head.confidence.inputs
            inputs.copy_(_noise(*inputs.shape, generator, inputs.shape[1] ** -0.5))
        return head

    def compile(self) -> None:
        self._step, self._advance = _compiled_chain_step(), torch.compile(advance)

    def unroll(
        self, head: Any, embedding_rows: Tensor, token_ids: Tensor, hidden: Tensor, num_steps: int
    ) -> Iterator[Proposal]:
        return run_block(
            head, embedding_rows, token_ids, hidden, num_steps, self._step, self._advance
        )

    def save(self, path: Path, head: Any, draft_to_target: Tensor) -> None:
        save_dspark_head(path, head, draft_to_target)

    def load(self, path: Path) -> tuple[DSparkHead, Tensor]:
        return load_dspark_head(path)


def new_family(name: str) -> Family:
    """The family called ``name``, one of FAMILIES, in its shipped size."""
    return EagleFamily() if name == EagleFamily.name else DSparkFamily()


FAMILIES = (EagleFamily.name, DSparkFamily.name)


def _layer_config(target: FrozenTarget, wide: int) -> EagleHeadConfig:
    config = target.config
    return EagleHeadConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=wide,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        target_fingerprint=target_fingerprint(target.embed, config.vocab_size),
    )


def _noise(rows: int, columns: int, generator: torch.Generator, scale: float) -> Tensor:
    return torch.randn(rows, columns, generator=generator) * scale


def _start_as_last_layer(head: EagleHead, target: FrozenTarget, generator: torch.Generator) -> None:
    """Make ``head`` the target's last layer, reading the hidden state and little of the token.

    MLP units beyond the target's start at random with no output yet.
    """
    last, size = target.layers[-1], target.config.hidden_size
    wide, own = head.config.intermediate_size, target.config.intermediate_size
    kept = min(own, wide)
    gate, up = last.gate_up.float().chunk(2)
    with torch.no_grad():
        head.fuse[:, :size] = _noise(size, size, generator, 0.1 * size**-0.5).to(target.device)
        head.fuse[:, size:] = torch.eye(size, device=target.device)
        head.qkv.copy_(last.qkv)
        head.output.copy_(last.output)
        head.gate_up.copy_(_noise(2 * wide, size, generator, size**-0.5))
        head.gate_up[:kept] = gate[:kept]
        head.gate_up[wide : wide + kept] = up[:kept]
        head.down.zero_()
        head.down[:, :kept] = last.down[:, :kept].float()
        head.final_norm.copy_(target.final_norm)
