"""Distillation of an autoregressive head with chained steps, in runs that stop and resume.

Invariants: seeds and the batch of a step depend on the settings and the step number only, so a run that
stopped resumes with what it would have done; the schedule is a function of step / num_steps.
First cross entropy at every start position; then, ramped in, total variation weighted by the
probability that the prefix was accepted, which is the quantity that drafting wants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.drafters.eagle_head import (
    EagleHead,
    EagleHeadConfig,
    target_fingerprint,
)

from .chain import chain_step, run_chain
from .loss import Shares, TargetRows, distil
from .target import FrozenTarget
from .text import TrainingText


@dataclass(slots=True, frozen=True)
class TrainingSettings:
    """``learning_rate`` is AdamW's; Muon's updates are scaled to the same size."""

    num_steps: int
    batch: int
    chain_steps: int = 5
    step_decay: float = 0.85
    learning_rate: float = 2e-3
    final_rate: float = 0.01
    warmup_steps: int = 150
    weight_decay: float = 0.01
    ramp: tuple[float, float] = (0.5, 0.65)
    user_weight: float = 0.25
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of ``step``: linear warm-up, then cosine down to ``final_rate`` of the peak."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_steps)))
        return self.learning_rate * warm * (self.final_rate + (1 - self.final_rate) * cosine)

    def overlap_share(self, step: int) -> float:
        """0 while cross entropy trains alone, 1 once total variation has taken over."""
        begin, end = self.ramp
        return min(1.0, max(0.0, (step / self.num_steps - begin) / (end - begin)))


def new_head(target: FrozenTarget, wide: int, seed: int) -> EagleHead:
    """A head that starts as the target's last layer, reading the hidden state and little of the token.

    MLP units beyond the target's start at random with no output yet.
    """
    config, last = target.config, target.layers[-1]
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=wide,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            target_fingerprint=target_fingerprint(target.embed, config.vocab_size),
        )
    ).to(target.device)
    generator = torch.Generator().manual_seed(seed)

    def noise(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(target.device) * columns**-0.5

    size, own = config.hidden_size, config.intermediate_size
    kept = min(own, wide)
    gate, up = last.gate_up.float().chunk(2)
    with torch.no_grad():
        head.fuse.copy_(torch.cat([0.1 * noise(size, size), torch.eye(size).to(target.device)], 1))
        head.qkv.copy_(last.qkv)
        head.output.copy_(last.output)
        head.gate_up.copy_(noise(2 * wide, size))
        head.gate_up[:kept] = gate[:kept]
        head.gate_up[wide : wide + kept] = up[:kept]
        head.down.zero_()
        head.down[:, :kept] = last.down[:, :kept].float()
        head.final_norm.copy_(target.final_norm)
    return head


class Trainer:
    """Owns the head, its optimisers and the step counter; see the module docstring."""

    def __init__(
        self,
        head: EagleHead,
        target: FrozenTarget,
        text: TrainingText,
        draft_to_target: Tensor,
        counted: Tensor,
        settings: TrainingSettings,
    ) -> None:
        """``counted`` [N, S] is each token's weight in the loss (0 where it was forced)."""
        self.head, self.settings, self.step = head, settings, 0
        self.draft_to_target = draft_to_target
        self._embedding, self._text, self._counted = target.embedding, text, counted
        self._rows = target.output_rows[draft_to_target].contiguous()
        self._column = torch.full((target.config.vocab_size,), -1, device=target.device)
        self._column[draft_to_target] = torch.arange(len(draft_to_target), device=target.device)
        matrices = [p for p in head.parameters() if p.ndim == 2]
        norms = [p for p in head.parameters() if p.ndim != 2]
        rate = settings.learning_rate
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices,
                lr=rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(norms, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        # Triton 3.6 cannot compile the persistent reduction that attention is fused into.
        options: dict[str, str | int | bool | Callable[..., Any]] = {
            "triton.persistent_reductions": False
        }
        is_cuda = target.device.type == "cuda"
        self._chain_step = torch.compile(chain_step, options=options) if is_cuda else chain_step
        self._epoch, self._order = -1, torch.empty(0)

    def _batch(self) -> Tensor:
        """Sequences of the current step: a fresh seeded permutation per epoch."""
        size, per_epoch = self.settings.batch, len(self._text.tokens) // self.settings.batch
        epoch, index = divmod(self.step, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.settings.seed * 1000 + epoch)
            order = torch.randperm(len(self._text.tokens), generator=generator)
            self._epoch, self._order = epoch, order.to(self._text.tokens.device)
        return self._order[index * size : (index + 1) * size]

    def _loss(self) -> tuple[Tensor, list[Tensor]]:
        """Loss of the current step, and mean overlap per depth (detached)."""
        settings, text, rows = self.settings, self._text, self._batch()
        share = settings.overlap_share(self.step)
        tokens, hidden, counted = text.tokens[rows], text.hidden[rows], self._counted[rows]
        target = TargetRows(hidden @ self._rows.T, text.log_total[rows])
        length = tokens.shape[1] - settings.chain_steps - 1
        columns = self._column[tokens.long()]
        reach = torch.ones(len(rows) * length, device=tokens.device)
        loss = torch.zeros((), device=tokens.device)
        overlaps = []
        states = run_chain(
            self.head, self._embedding, tokens, hidden, settings.chain_steps, self._chain_step
        )
        for k, state in enumerate(states):
            ahead = slice(2 + k, 2 + k + length)
            weight = counted[:, ahead].flatten() * (1 + share * (reach - 1))
            weight = weight / weight.sum().clamp(min=1e-6) * settings.step_decay**k
            part, overlap, ratio = distil(
                state,
                self._rows,
                target,
                shift=1 + k,
                next_column=columns[:, ahead].flatten(),
                weight=weight,
                shares=Shares(entropy=1 - 0.9 * share, overlap=2 * share),
            )
            loss = loss + part
            overlaps.append((weight * overlap).sum() / settings.step_decay**k)
            reach = reach * ratio
        return loss, overlaps

    def train_step(self) -> list[Tensor]:
        """One update; returns the batch's mean overlap per depth (on the device)."""
        rate = self.settings.rate(self.step)
        loss, overlaps = self._loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return overlaps

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        state = {
            "step": self.step,
            "draft_to_target": self.draft_to_target,
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of :meth:`save`."""
        state = torch.load(path, map_location=self._rows.device)
        if not torch.equal(state["draft_to_target"], self.draft_to_target):
            raise UsageError(f"{path} was trained on another text; use an empty --work folder")
        self.step = state["step"]
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(
    trainer: Trainer, checkpoint: Path, *, seconds: float, report: Callable[[str], None]
) -> bool:
    """Train until the last step (True) or until ``seconds`` have passed (False); both save."""
    began = saved = time.monotonic()
    first, last = trainer.step, trainer.settings.num_steps
    while trainer.step < last:
        overlaps = trainer.train_step()
        if trainer.step % 100 == 0 or trainer.step == last:
            shown = " ".join(f"{value:.3f}" for value in torch.stack(overlaps).tolist())
            now = time.monotonic()
            pace = (trainer.step - first) / (now - began)
            report(f"step {trainer.step}/{last} overlap {shown} {pace:.2f} steps/s")
            if now - began > seconds:
                break
            if now - saved > 45:
                trainer.save(checkpoint)
                saved = now
    trainer.save(checkpoint)
    return trainer.step >= last
