"""The weights of a block drafter with a small sequential head and a confidence head.

Taken over from DSpark (Cheng et al., 2026): the block head's state of a position is corrected by a small
recurrent head that reads the token drawn before it, by a bias of low rank on the logits; a confidence
head tells from what is known before the draw how likely the target accepts it.
Not taken over: a table of previous tokens (the target's embedding is read instead), a bias matrix of its
own (the correction is lifted into the hidden state, so the target's output layer makes the bias), a
linear confidence head on the states alone (this one also reads two figures of the draft distribution and
has a hidden layer), the calibration of confidences by a temperature (the estimator does that online).

Invariants: the carried state before position i depends on x_0 … x_{i−1} of the block, never on x_i;
confidence is computed from it, from the position's own state and from its logits at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtllm_av.runtime.models.drafters.block_head import BlockHead, BlockHeadConfig
from trtllm_av.runtime.models.drafters.eagle_head import EagleHeadConfig
from trtllm_av.runtime.models.drafters.head_file import load_weights, save_weights
from trtllm_av.runtime.models.linear import Linear

_FAMILY = "dspark_head"
#: Log-odds of a draft distribution's top token are read within ± this.
ODDS_BOUND = 15.0


@dataclass(frozen=True)
class DSparkHeadConfig(BlockHeadConfig):
    """``state_size``: rank of the correction; ``sequential_size`` and ``confidence_size``: width of the
    sequential and of the confidence head's hidden layer."""

    state_size: int
    sequential_size: int
    confidence_size: int


def draft_figures(log_top: Tensor, entropy: Tensor) -> Tensor:
    """[..., 2] float32: log-odds of the top token and a quarter of the entropy of a draft distribution.

    ``log_top`` [...] is the log-probability of its top token, ``entropy`` [...] is in nats.
    """
    return _join_figures(log_top - torch.log(-torch.expm1(log_top)), entropy)


def figures_of_logits(logits: Tensor) -> Tensor:
    """:func:`draft_figures` of ``logits`` [..., V_d] at temperature 1.

    The other tokens are summed, because what a top token near 1 leaves of it cancels in float32.
    """
    log_q = logits.float().log_softmax(-1)
    q = log_q.exp()
    log_top, top = log_q.max(-1, keepdim=True)
    is_top = torch.arange(q.shape[-1], device=q.device) == top
    odds = log_top[..., 0] - q.masked_fill(is_top, 0.0).sum(-1).log()
    return _join_figures(odds, -(q * log_q).sum(-1))


def _join_figures(odds: Tensor, entropy: Tensor) -> Tensor:
    return torch.stack([odds.clamp(-ODDS_BOUND, ODDS_BOUND), 0.25 * entropy], -1)


class SequentialHead(nn.Module):
    """Carries a state [..., state_size] along the block; it starts at zero.

    u_i = u_{i−1} + W_d (silu(g) ⊙ v), (g, v) = W_b·norm(h_i) + W_e·norm(e_i) + W_s·norm(u_{i−1}), with
    h_i the block head's state and e_i the embedding of the token before position i.
    """

    def __init__(self, config: DSparkHeadConfig) -> None:
        super().__init__()
        hidden, size, wide = config.layer.hidden_size, config.state_size, config.sequential_size
        self._eps = config.layer.rms_norm_eps
        self.block_norm = nn.Parameter(torch.ones(hidden))
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.state_norm = nn.Parameter(torch.ones(size))
        self.from_block = nn.Parameter(torch.empty(2 * wide, hidden))
        self.from_embedding = nn.Parameter(torch.empty(2 * wide, hidden))
        self.from_state = nn.Parameter(torch.empty(2 * wide, size))
        self.down = nn.Parameter(torch.empty(size, wide))
        self.lift = nn.Parameter(torch.empty(hidden, size))
        self._packed: dict[str, Linear] = {}

    def prepack(self) -> None:
        """Lay the matrices out for small batches; packed [N, ·] inputs only from here on."""
        matrices = {name: p.detach() for name, p in self.named_parameters() if p.ndim == 2}
        self._packed = {name: Linear(matrix) for name, matrix in matrices.items()}

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        if name in self._packed:
            return self._packed[name](x)
        matrix: Tensor = getattr(self, name)
        return F.linear(x, matrix.to(x.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self._eps)

    def read_block(self, block: Tensor) -> Tensor:
        """[..., 2·sequential_size] from states [..., H]: what does not wait for a token."""
        return self._multiply(self._norm(block, self.block_norm), "from_block")

    def advance(self, read: Tensor, embedding: Tensor, state: Tensor | None) -> Tensor:
        """State [..., state_size] of a position; ``read`` is its :meth:`read_block`, ``state`` the one
        before (None at the first)."""
        joined = read + self._multiply(self._norm(embedding, self.embedding_norm), "from_embedding")
        if state is not None:
            joined = joined + self._multiply(self._norm(state, self.state_norm), "from_state")
        gate, value = joined.chunk(2, -1)
        change = self._multiply(F.silu(gate) * value, "down")
        return change if state is None else state + change

    def lifted(self, state: Tensor) -> Tensor:
        """The correction [..., H] of the block head's state."""
        return self._multiply(state, "lift")


class ConfidenceHead(nn.Module):
    """Logit that the target accepts the token about to be drawn, given that it accepted all before."""

    def __init__(self, config: DSparkHeadConfig) -> None:
        super().__init__()
        inputs, wide = config.layer.hidden_size + config.state_size + 2, config.confidence_size
        self.inputs = nn.Parameter(torch.empty(wide, inputs))
        self.input_bias = nn.Parameter(torch.zeros(wide))
        self.output = nn.Parameter(torch.zeros(wide))
        self.skip = nn.Parameter(torch.tensor([0.5, 0.0]))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, block: Tensor, state: Tensor, figures: Tensor) -> Tensor:
        """[...] float32 from states [..., H], [..., state_size] and ``draft_figures`` [..., 2]."""
        parts = [F.rms_norm(x.float(), x.shape[-1:]) for x in (block, state)]
        joined = torch.cat([*parts, figures.float()], -1)
        inner = F.silu(F.linear(joined, self.inputs.float(), self.input_bias.float()))
        logit = inner @ self.output.float() + figures.float() @ self.skip.float()
        return logit + self.offset.float()


class DSparkHead(BlockHead):
    """See the module docstring."""

    config: DSparkHeadConfig

    def __init__(self, config: DSparkHeadConfig) -> None:
        super().__init__(config)
        self.sequential = SequentialHead(config)
        self.confidence = ConfidenceHead(config)

    def prepack(self) -> None:
        super().prepack()
        self.sequential.prepack()


def save_dspark_head(path: Path, head: DSparkHead, draft_to_target: Tensor) -> None:
    """Write weights and the map of draft ids [V_d]."""
    save_weights(path, _FAMILY, head.config, head, draft_to_target)


def load_dspark_head(path: Path, dtype: torch.dtype = torch.float32) -> tuple[DSparkHead, Tensor]:
    """A head, frozen, and its map of draft ids (int64 [V_d]); raises as ``load_weights`` does."""

    def build(config: dict[str, Any]) -> DSparkHead:
        layer = EagleHeadConfig(**config["layer"])
        return DSparkHead(DSparkHeadConfig(**config | {"layer": layer}))

    return load_weights(path, _FAMILY, build, dtype)
