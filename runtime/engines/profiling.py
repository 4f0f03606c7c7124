"""Dummy rounds on an executor and its drafter, for measuring what steps cost before serving starts.

Invariants: only shapes that the scheduler can produce are run; the slots are reset afterwards, and what
the passes wrote into caches lies behind every later request's length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.engines.base import Executor
from trtllm_av.runtime.estimator import cold_coefficients
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.base import DraftContext, Drafter
from trtllm_av.runtime.operations import DraftOperations, TorchOperations
from trtllm_av.runtime.sampling import distribution


class ExecutorProbe:
    """Runs verify passes and drafts over ``context_len`` committed tokens per slot."""

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        *,
        context_len: int = 128,
        operations: DraftOperations | None = None,
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._operations = operations or TorchOperations()
        self._coefficients = torch.from_numpy(cold_coefficients(drafter.max_draft_len))
        self._context_len = min(context_len, executor.max_len // 2)
        generator = torch.Generator().manual_seed(0)
        self._history = torch.randint(
            executor.vocab_size, (executor.num_slots, executor.max_len), generator=generator
        )

    def verify(self, tokens: int, requests: int) -> None:
        """One verify pass of ``tokens`` tokens, spread evenly over ``requests`` rows."""
        lengths = torch.full((requests,), tokens // requests, dtype=torch.int64)
        lengths[: tokens % requests] += 1
        batch = PackedBatch.pack(
            self._history[0, :1].repeat(tokens),
            torch.arange(requests),
            torch.full((requests,), self._context_len),
            lengths,
        )
        logits, _ = self._executor.verify(batch)
        zeros = torch.zeros(tokens)
        distribution(logits, zeros, zeros.long(), zeros + 1.0, vocab_size=self._executor.vocab_size)

    def draft(self, requests: int, depth: int) -> None:
        """Draft ``depth`` tokens for each of ``requests`` rows, scored and drawn as in a round."""
        context = DraftContext(
            torch.arange(requests), torch.full((requests,), self._context_len), self._history
        )
        tokens = self._draw(self._drafter.start(context), 0)
        for position in range(1, depth):
            tokens = self._draw(self._drafter.step(position, tokens), position)

    def _draw(self, logits: Tensor, position: int) -> Tensor:
        """[R] greedy draft tokens of ``logits`` [R, V_d], after scoring them."""
        vocab_map = self._drafter.draft_to_target
        vocab_size = self._executor.vocab_size if vocab_map is None else vocab_map.numel()
        zeros = torch.zeros(logits.shape[0])
        self._operations.score_drafts(
            logits[:, None],
            zeros,
            self._coefficients,
            torch.tensor([position], dtype=torch.int32),
            vocab_size=vocab_size,
        )
        law = distribution(logits, zeros, zeros.long(), zeros + 1.0, vocab_size=vocab_size)
        return law.point if vocab_map is None else vocab_map[law.point]

    def reset(self) -> None:
        """Make the drafter forget the dummy rounds."""
        for slot in range(self._executor.num_slots):
            self._drafter.reset(slot)
