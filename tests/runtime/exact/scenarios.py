"""Engines small enough to enumerate, and the law that their outputs must have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.runtime.exact.enumerate_rounds import (
    EnumeratingSource,
    Enumeration,
    Outputs,
    enumerate_engine,
    product_law,
)
from tests.runtime.exact.tiny_models import (
    HeadedTableDrafter,
    TableDrafter,
    TableExecutor,
    random_table,
)
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.scheduler import Engine

CHEAP_DRAFTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [2, 1.1], [3, 1.3], [4, 1.7], [5, 2.2], [6, 2.8], [8, 4.2]],
    "draft_ms_by_requests": [[1, 0.1], [2, 0.12]],
}


def two_level_table(vocab_size: int, seed: int) -> Tensor:
    """Drafter logits [2,2,2] whose confidence takes two values, so that states merge well."""
    assert vocab_size == 2
    generator = torch.Generator().manual_seed(seed)
    sign = torch.sign(torch.randn(2, 2, generator=generator, dtype=torch.float64))
    gap = torch.where(torch.rand(2, 2, generator=generator) < 0.5, 0.4, 3.0).double()
    return torch.stack([sign * gap / 2, -sign * gap / 2], -1)


@dataclass
class Scenario:
    """``params`` and ``prompts``: one per request; ``slope`` and ``intercept`` start the estimator;
    ``is_probing`` False leaves probe rounds out, so that the first round already trims;
    ``is_greedy_draft``: drafts are the drafter's likeliest tokens, q is one-hot; ``head``: logits [V,V] of
    a confidence head; ``prepare`` edits the engine before its requests come."""

    target: Tensor
    draft: Tensor
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    num_draft_tokens: int = 3
    costs: dict[str, object] = field(default_factory=lambda: dict(CHEAP_DRAFTS))
    is_block: bool = False
    refit_interval: int = 2
    slope: float | None = None
    intercept: float = -0.2
    is_probing: bool = True
    is_greedy_draft: bool = False
    head: Tensor | None = None
    options: AdaptiveOptions = field(default_factory=AdaptiveOptions)
    prepare: Callable[[Engine], None] | None = None

    def drafter(self) -> TableDrafter:
        if self.head is None:
            return TableDrafter(self.draft, self.num_draft_tokens, is_block=self.is_block)
        return HeadedTableDrafter(
            self.draft, self.head, self.num_draft_tokens, is_block=self.is_block
        )

    def cost_model(self) -> CostModel:
        return CostModel.from_table(
            self.costs, num_positions=self.num_draft_tokens, is_block=self.is_block
        )

    def engine(self) -> Engine:
        num_slots = len(self.prompts)
        controller = AdaptiveController(
            "adaptive",
            self.num_draft_tokens,
            num_slots,
            self.cost_model(),
            refit_interval=self.refit_interval,
            dtype=np.float64,
            options=self.options,
        )
        if self.slope is not None:
            state = controller.estimator.state_dict()
            extra = [0.0] * (self.options.num_features - 1)
            intercepts = [self.intercept] * self.num_draft_tokens
            state["coefficients"] = [self.slope, *extra, *intercepts]
            controller.estimator.load_state_dict(state)
            controller.history.set_coefficients(controller.estimator.coefficients)
        if not self.is_probing:
            assert controller.depth is not None
            controller.depth._rounds_to_probe = 1000
        engine = Engine(
            TableExecutor(self.target, num_slots, 32),
            self.drafter(),
            controller,
            EnumeratingSource(),
            max_seq_len=24,
            is_greedy_draft=self.is_greedy_draft,
            dtype=torch.float64,
        )
        if self.prepare is not None:
            self.prepare(engine)
        for prompt, params in zip(self.prompts, self.params, strict=True):
            engine.submit(prompt, params)
        return engine

    def enumerate(self) -> Enumeration:
        return enumerate_engine(self.engine(), len(self.prompts))

    def expected_law(self) -> dict[Outputs, float]:
        """Product of the requests' own laws, computed from the table alone."""
        laws = [
            product_law(self._next_law(prompt, params), params.max_tokens)
            for prompt, params in zip(self.prompts, self.params, strict=True)
        ]
        joint: dict[Outputs, float] = {}
        for combination in itertools.product(*(law.items() for law in laws)):
            weight = 1.0
            for _, p in combination:
                weight *= p
            joint[tuple(output for output, _ in combination)] = weight
        return joint

    def _next_law(self, prompt: list[int], params: SamplingParams):  # type: ignore[no-untyped-def]
        def law(output: tuple[int, ...]) -> list[float]:
            history = [*prompt, *output]
            logits = self.target[history[-2], history[-1]].tolist()
            for token, count in ((t, output.count(t)) for t in set(output)):
                logits[token] -= params.presence_penalty + params.frequency_penalty * count
            weights = [np.exp(value / params.temperature) for value in logits]
            return [float(weight / sum(weights)) for weight in weights]

        return law


def largest_error(scenario: Scenario) -> tuple[float, Enumeration]:
    """Largest difference between enumerated and expected probability over all outputs."""
    result, expected = scenario.enumerate(), scenario.expected_law()
    outputs = set(result.law) | set(expected)
    error = max(abs(result.law.get(key, 0.0) - expected.get(key, 0.0)) for key in outputs)
    return error, result


def two_requests(max_tokens: int = 5, **options: object) -> Scenario:
    """V=2, K=3, R=2: an autoregressive drafter under a shared budget; one request has penalties."""
    return Scenario(
        target=random_table(2, 1.0, seed=3),
        draft=two_level_table(2, seed=5),
        prompts=[[0, 1], [1, 0]],
        params=[
            SamplingParams(max_tokens=max_tokens, temperature=0.75, seed=1),
            SamplingParams(
                max_tokens=max_tokens, seed=1, presence_penalty=0.4, frequency_penalty=0.3
            ),
        ],
        **options,  # type: ignore[arg-type]
    )


def one_request(max_tokens: int = 5, *, is_penalised: bool = True, **options: object) -> Scenario:
    """V=4, K=3, R=1: a drafter with the costs of a block drafter, trimmed by a steep table.

    Without the penalty the request trains the estimator, so that refits come in between.
    """
    return Scenario(
        target=random_table(4, 1.0, seed=7),
        draft=random_table(4, 1.5, seed=8),
        prompts=[[0, 1]],
        params=[
            SamplingParams(
                max_tokens=max_tokens, seed=1, frequency_penalty=0.25 if is_penalised else 0.0
            )
        ],
        is_block=True,
        **options,  # type: ignore[arg-type]
    )
