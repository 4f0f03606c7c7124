"""Distillation of a drafting head over all its depths, in runs that stop and resume.

Invariants: seeds and the batch of a step depend on the settings and the step number only, so a run that
stopped resumes with what it would have done; the schedule is a function of step / num_steps.
First cross entropy at every start position; then, ramped in, total variation weighted by the
probability that the prefix was accepted, which is the quantity that drafting wants. A confidence head
learns that chance of acceptance, Σ min(p, q), behind accepted prefixes from the first step on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.drafters.dspark_head import draft_figures

from .families import Family
from .loss import RowFigures, Shares, TargetRows, distil
from .target import FrozenTarget
from .text import TrainingText

_UNTIMED_STEPS = 40  # spent on compilation
_TIME_MARGIN = 0.97
_SAVE_SECONDS = 45.0


@dataclass(slots=True, frozen=True)
class TrainingSettings:
    """``learning_rate`` is AdamW's; Muon's updates are scaled to the same size. ``confidence_share`` is
    small only to keep the clipping of gradients to the drafts': AdamW's updates do not depend on it."""

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
    confidence_share: float = 0.1
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


class Trainer:
    """Owns the head, its optimisers and the step counter; see the module docstring."""

    def __init__(
        self,
        family: Family,
        head: nn.Module,
        target: FrozenTarget,
        text: TrainingText,
        draft_to_target: Tensor,
        counted: Tensor,
        settings: TrainingSettings,
    ) -> None:
        """``counted`` [N, S] is each token's weight in the loss (0 where it was forced)."""
        self.family, self.head, self.settings, self.step = family, head, settings, 0
        self.draft_to_target = draft_to_target
        self._embedding, self._text, self._counted = target.embedding, text, counted
        self._rows = target.output_rows[draft_to_target].contiguous()
        self._column = torch.full((target.config.vocab_size,), -1, device=target.device)
        self._column[draft_to_target] = torch.arange(len(draft_to_target), device=target.device)
        matrices = [p for name, p in head.named_parameters() if _is_matrix(name, p)]
        others = [p for name, p in head.named_parameters() if not _is_matrix(name, p)]
        rate = settings.learning_rate
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices,
                lr=rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        if target.device.type == "cuda":
            family.compile()
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
        proposals = self.family.unroll(
            self.head, self._embedding, tokens, hidden, settings.chain_steps
        )
        for k, proposal in enumerate(proposals):
            ahead = slice(2 + k, 2 + k + length)
            mine = counted[:, ahead].flatten()
            weight = _shares_of(mine * (1 + share * (reach - 1))) * settings.step_decay**k
            part, figures = distil(
                proposal.state,
                self._rows,
                target,
                shift=1 + k,
                next_column=columns[:, ahead].flatten(),
                weight=weight,
                shares=Shares(entropy=1 - 0.9 * share, overlap=2 * share),
            )
            loss = loss + part
            if proposal.confidence is not None:
                logit = proposal.confidence(_confidence_inputs(figures, len(rows)))
                surprise = F.binary_cross_entropy_with_logits(
                    logit.flatten(), figures.overlap.clamp(0, 1), reduction="none"
                )
                loss = (
                    loss + settings.confidence_share * (_shares_of(mine * reach) * surprise).sum()
                )
            overlaps.append((weight * figures.overlap).sum() / settings.step_decay**k)
            reach = reach * figures.ratio
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
            "num_steps": self.settings.num_steps,
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
        self.settings = replace(self.settings, num_steps=state["num_steps"])
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """True for what Muon updates: matrices between wide layers, not the masks or a confidence head."""
    return parameter.ndim == 2 and name != "masks" and not name.startswith("confidence.")


def _shares_of(weight: Tensor) -> Tensor:
    return weight / weight.sum().clamp(min=1e-6)


def _confidence_inputs(figures: RowFigures, batch: int) -> Tensor:
    return draft_figures(figures.log_top, figures.spread).unflatten(0, (batch, -1))


def train(
    trainer: Trainer,
    checkpoint: Path,
    *,
    seconds: float,
    report: Callable[[str], None],
    fits_time: bool = False,
    snapshot: Path | None = None,
) -> bool:
    """Train until the last step (True) or until ``seconds`` have passed (False); both save.

    ``fits_time`` sets the last step of a run that just began to what ``seconds`` will allow, from the
    pace behind the first ``_UNTIMED_STEPS``; ``snapshot`` gets the weights with every checkpoint.
    """
    began = saved = paced = time.monotonic()
    first = trainer.step

    def save() -> None:
        trainer.save(checkpoint)
        if snapshot is not None:
            trainer.family.save(snapshot, trainer.head, trainer.draft_to_target)

    while trainer.step < trainer.settings.num_steps:
        overlaps = trainer.train_step()
        is_last = trainer.step == trainer.settings.num_steps
        if trainer.step - first == _UNTIMED_STEPS:
            overlaps[0].item()  # wait for the device
            paced = time.monotonic()
        if trainer.step % 100 == 0 or is_last:
            shown = " ".join(f"{value:.3f}" for value in torch.stack(overlaps).tolist())
            now = time.monotonic()
            pace = (trainer.step - first - _UNTIMED_STEPS) / max(now - paced, 1e-9)
            if fits_time and trainer.step == 100:
                left = int(_TIME_MARGIN * pace * (seconds - (now - began)))
                trainer.settings = replace(trainer.settings, num_steps=trainer.step + max(left, 1))
            last = trainer.settings.num_steps
            report(f"step {trainer.step}/{last} overlap {shown} {pace:.2f} steps/s")
            if now - began > seconds:
                break
            if now - saved > _SAVE_SECONDS:
                save()
                saved = now
    save()
    return trainer.step >= trainer.settings.num_steps
