"""Drafts verified by a ``draft_tokens_external`` engine, on a double of the executor and toy models."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.builder.toy_models import PADDED_VOCAB, VOCAB, draft_logits, greedy, target_token
from tests.builder.trtllm_double import TrtllmDouble
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.engines.trtllm_external import ExternalDrafts, ExternalDraftVerifier
from trtllm_av.runtime.errors import RequestError

K = 5
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]
STEEP = [[1, 1.0], [4, 4.0], [64, 64.0]]
CHEAP = [[1, 1.0], [4, 1.01], [64, 1.2]]


class TargetDouble:
    """An executor whose requests take one step: drafts are accepted by equality."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: str | None = None
        self._waiting: list[tuple[int, Any]] = []
        self._numbers = itertools.count(1)

    def enqueue_request(self, request: Any) -> int:
        number = next(self._numbers)
        self.requests.append(request)
        self._waiting.append((number, request))
        return number

    def await_responses(self, timeout: Any = None) -> list[Any]:
        responses = []
        for number, request in reversed(self._waiting):  # in no particular order
            config = request.external_draft_tokens_config
            drafts = [] if config is None else list(config.tokens)
            tokens: list[int] = []
            for draft in [*drafts, None]:
                tokens.append(target_token([*request.input_token_ids, *tokens]))
                if tokens[-1] != draft:
                    break
            assert len(tokens) <= request.max_tokens
            result = SimpleNamespace(output_token_ids=[tokens], is_final=True)
            response = SimpleNamespace(
                request_id=number,
                result=result,
                error_msg=self.error,
                has_error=lambda: self.error is not None,
            )
            responses.append(response)
        self._waiting.clear()
        return responses


def setup(points: list[list[float]]) -> tuple[ExternalDraftVerifier, TargetDouble, Any]:
    table = {
        "unit": "ms",
        "graph_limit_tokens": 0,
        "verify_ms_by_tokens": points,
        "draft_ms_by_requests": [[1, 0.1]],
    }
    controller = AdaptiveController(
        "adaptive", K, len(PROMPTS), CostModel.from_table(table, num_positions=K)
    )
    bindings = TrtllmDouble().modules["tensorrt_llm.bindings.executor"]
    executor = TargetDouble()
    verifier = ExternalDraftVerifier(executor, bindings, controller, vocab_size=VOCAB)
    return verifier, executor, controller


def draft(contexts: list[list[int]], lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(len(contexts), K, dtype=torch.int64)
    logits = torch.zeros(len(contexts), K, PADDED_VOCAB)
    for row, length in enumerate(lens):
        prefix = list(contexts[row])
        for i in range(length):
            values = draft_logits(prefix)
            logits[row, i] = torch.from_numpy(values)
            tokens[row, i] = int(values[:VOCAB].argmax())
            prefix.append(int(tokens[row, i]))
    return tokens, logits


def decode(
    points: list[list[float]], length: int, drafted: list[int] | None = None
) -> tuple[list[list[int]], TargetDouble, Any]:
    """Outputs of all prompts; ``drafted`` takes the drafts that were made for every request of the executor."""
    verifier, executor, controller = setup(points)
    slots = np.arange(len(PROMPTS))
    for slot in slots:
        controller.admit(slot)
    contexts = [list(prompt) for prompt in PROMPTS]
    while any(len(c) - len(p) < length for c, p in zip(contexts, PROMPTS, strict=True)):
        plan = verifier.plan(slots, [K] * len(PROMPTS))
        tokens, logits = draft(contexts, plan.draft_lens.tolist())
        if drafted is not None:
            drafted += plan.draft_lens.tolist()
        gained = verifier.verify(plan, ExternalDrafts(slots, contexts, tokens, logits))
        contexts = [c + g for c, g in zip(contexts, gained, strict=True)]
    outputs = [c[len(p) : len(p) + length] for c, p in zip(contexts, PROMPTS, strict=True)]
    return outputs, executor, controller


@pytest.mark.parametrize("points", [STEEP, CHEAP], ids=["steep", "cheap"])
def test_tokens_are_those_of_plain_decoding(points: list[list[float]]) -> None:
    """Guards against a truncation that changes what is generated."""
    outputs, _, _ = decode(points, 60)
    assert outputs == [greedy(prompt, 60) for prompt in PROMPTS]


def test_costs_decide_how_much_is_verified() -> None:
    """Guards against drafts that are all sent, or none, whatever a step costs."""

    def sent(executor: TargetDouble) -> list[int]:
        return [request.max_tokens - 1 for request in executor.requests]

    _, steep, _ = decode(STEEP, 120)
    _, cheap, _ = decode(CHEAP, 120)
    assert np.mean(sent(steep)) < 0.8 * np.mean(sent(cheap))
    # Zero drafts are a request without them, not with an empty list that the executor refuses.
    without = [r for r in steep.requests if r.external_draft_tokens_config is None]
    assert without and all(request.max_tokens == 1 for request in without)


def test_what_was_drafted_is_cut_by_its_confidence() -> None:
    """Guards against a trim that is decided, counted and not sent."""
    middle = [[1, 1.0], [4, 1.1], [8, 1.6], [16, 4.0], [32, 12.0]]
    drafted: list[int] = []
    _, executor, _ = decode(middle, 200, drafted)
    sent = [request.max_tokens - 1 for request in executor.requests]
    assert len(sent) == len(drafted)
    assert all(s <= d for s, d in zip(sent, drafted, strict=True))
    assert sum(s < d for s, d in zip(sent, drafted, strict=True)) > len(sent) / 10


def test_acceptance_reaches_the_estimator() -> None:
    """Guards against drafts that were accepted and are learnt as rejected."""
    _, _, controller = decode(CHEAP, 600)
    feedback = controller.feedback
    assert feedback is not None and feedback.actual_accepted > 300
    assert controller.estimator.num_refits >= 1
    assert feedback.expected_accepted == pytest.approx(feedback.actual_accepted, rel=0.3)


def test_failed_verification_is_an_error_of_the_request() -> None:
    """Guards against a wait without end for a request that has failed."""
    verifier, executor, _ = setup(CHEAP)
    executor.error = "out of memory"
    slots = np.arange(1)
    plan = verifier.plan(slots, [K])
    tokens, logits = draft([[1, 2]], plan.draft_lens.tolist())
    with pytest.raises(RequestError, match="out of memory"):
        verifier.verify(plan, ExternalDrafts(slots, [[1, 2]], tokens, logits))
