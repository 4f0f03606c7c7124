"""Drafting with heads on the target's hidden state: every family against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.models.drafters.rounds import ObservedRequests, draft, random_tokens
from tests.runtime.models.drafters.tiny_heads import FAMILIES, NUM_POSITIONS, Family, draft_ids
from tests.runtime.models.tiny_checkpoints import VOCAB_SIZE, save_tiny
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import catch_up, dflash
from trtllm_av.runtime.models.drafters.base import DraftContext, Drafter
from trtllm_av.runtime.models.drafters.dspark_head import ODDS_BOUND, figures_of_logits
from trtllm_av.runtime.models.kv_cache import KVCache

K = NUM_POSITIONS
NUM_SLOTS, MAX_LEN = 4, 96
IDS = draft_ids(VOCAB_SIZE)


@pytest.fixture(scope="module", params=["llama", "qwen2"], ids=["untied", "tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("target"), request.param, seed=5))


@pytest.fixture(params=FAMILIES, ids=[family.name for family in FAMILIES])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


def new_drafter(family: Family, target: LoadedModel, width: int = K) -> Any:
    head = family.head(target).to(target.dtype)
    head.prepack()
    return family.drafter(
        head, IDS, target, num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=width
    )


@pytest.fixture
def drafter(family: Family, target: LoadedModel) -> Any:
    return new_drafter(family, target)


@pytest.fixture
def requests(target: LoadedModel, drafter: Any) -> ObservedRequests:
    return ObservedRequests(target, drafter, num_slots=NUM_SLOTS, max_len=MAX_LEN)


def confidences(drafter: Drafter, context: DraftContext, tokens: Tensor) -> list[Tensor]:
    """Confidence logits [R] of positions 0 … d; empty without a head."""
    if not drafter.has_confidence_head:
        return []
    drafter.start(context)
    logits = [drafter.confidence_logit().clone()]
    for position in range(1, tokens.shape[1] + 1):
        drafter.step(position, tokens[:, position - 1])
        logits.append(drafter.confidence_logit().clone())
    return logits


def assert_drafts_equal_definition(
    family: Family, drafter: Any, requests: ObservedRequests, slots: list[int], tokens: Tensor
) -> None:
    width = tokens.shape[1]
    tokens = tokens[:, : width - 1]
    logits = draft(drafter, requests.context(slots), tokens)
    confidence = confidences(drafter, requests.context(slots), tokens)
    assert bool(confidence) == (family.name == "dspark")
    for row, slot in enumerate(slots):
        expected = family.definition(
            requests.target,
            family.head(requests.target),
            IDS,
            requests.tokens[slot],
            tokens[row].tolist(),
        )
        for position in range(width):
            torch.testing.assert_close(
                logits[position][row], expected[position].logits, atol=1e-4, rtol=1e-4
            )
            if confidence:
                torch.testing.assert_close(
                    confidence[position][row], expected[position].confidence, atol=1e-4, rtol=1e-4
                )


def test_logits_equal_the_definition_over_rounds(
    family: Family, requests: ObservedRequests, drafter: Any
) -> None:
    """Entries of accepted drafts kept from the head's own states, stale entries after a rejection, rows
    of unequal gaps, a reused slot that still sees the last request."""
    for slot, length in ((3, 9), (0, 4), (2, 50)):
        requests.admit(slot, random_tokens((length,), slot).tolist())
    # Slot 3 misses every other round, so that its gap is longer than its neighbours'.
    for number, accepted in enumerate((1, 0, K, 2, K - 1, 0, K)):
        if number == 3:
            drafter.reset(0)
            requests.admit(0, random_tokens((12,), 99).tolist())
        slots = [0, 2] if number % 2 else [3, 0, 2]
        tokens = random_tokens((len(slots), K), 20 + number)
        # Deep modules wait for rounds that reach them.
        width = 2 if number == 4 else K
        assert_drafts_equal_definition(family, drafter, requests, slots, tokens[:, :width])
        verified = {slot: tokens[row].tolist() for row, slot in enumerate(slots)}
        verified.setdefault(3, [1])
        requests.verify(verified, {**dict.fromkeys(verified, accepted), 3: 1}, next_token=number)


def test_a_short_prompt(family: Family, requests: ObservedRequests, drafter: Any) -> None:
    """A prompt of one token leaves a deep module without any entry of committed tokens."""
    requests.admit(1, random_tokens((2,), 1).tolist())
    assert_drafts_equal_definition(family, drafter, requests, [1], random_tokens((1, K), 2))
    requests.verify({1: [5, 6]}, {1: 0}, next_token=7)
    assert_drafts_equal_definition(family, drafter, requests, [1], random_tokens((1, K), 3))


def test_one_position(family: Family, target: LoadedModel) -> None:
    """K = 1: no mask, no second module, no step."""
    drafter = new_drafter(family, target, width=1)
    requests = ObservedRequests(target, drafter, num_slots=NUM_SLOTS, max_len=MAX_LEN)
    requests.admit(2, random_tokens((9,), 1).tolist())
    for number in range(3):
        tokens = random_tokens((1, 1), number)
        assert_drafts_equal_definition(family, drafter, requests, [2], tokens)
        requests.verify({2: tokens[0].tolist()}, {2: number % 2}, next_token=number)


def test_a_draft_reaches_later_positions_only(
    family: Family, requests: ObservedRequests, drafter: Any
) -> None:
    """A confidence computed from the drawn token, or from another row: lossless only as long as logits
    and confidences ≤ i ignore x_i, bit for bit."""
    for slot in (1, 2):
        requests.admit(slot, random_tokens((8 + slot,), slot).tolist())
    tokens = random_tokens((2, K - 1), 3)

    def positions(drawn: Tensor) -> list[list[Tensor]]:
        context = requests.context([1, 2])
        parts = [draft(drafter, context, drawn), confidences(drafter, context, drawn)]
        return [part for part in parts if part]

    positions(tokens)  # the caches catch up, in passes of other shapes than those compared here
    expected = positions(tokens)
    for changed in range(K - 1):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCAB_SIZE
        for mine, theirs in zip(positions(other), expected, strict=True):
            for position in range(K):
                is_same = torch.equal(mine[position][0], theirs[position][0])
                reaches = position > changed and family.name != "dflash"
                assert is_same != reaches, (changed, position)
                assert torch.equal(mine[position][1], theirs[position][1])


def test_refresh_catches_up(family: Family, requests: ObservedRequests, drafter: Any) -> None:
    """Rounds without drafting leaving gaps in the cache, or a lag that is not reported."""
    requests.admit(1, random_tokens((20,), 1).tolist())
    requests.admit(2, random_tokens((3,), 2).tolist())
    assert drafter.lag(requests.context([1, 2])).tolist() == [19, 2]
    drafter.refresh(requests.context([1]))
    assert drafter.lag(requests.context([1, 2])).tolist() == [0, 2]
    for token in range(5):  # plain decoding
        requests.verify({1: []}, {1: 0}, next_token=token)
    assert drafter.lag(requests.context([1, 2])).tolist() == [5, 2]
    drafter.refresh(requests.context([2, 1]))
    drafter.refresh(requests.context([2, 1]))  # nothing left to do
    assert drafter.lag(requests.context([1, 2])).tolist() == [0, 0]
    assert_drafts_equal_definition(family, drafter, requests, [1, 2], random_tokens((2, K), 5))


def test_long_prompts_are_fed_in_chunks(
    family: Family, requests: ObservedRequests, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is skipped or fed twice when a prompt is longer than one pass."""
    monkeypatch.setattr(catch_up, "CHUNK", 16)
    monkeypatch.setattr(dflash, "CHUNK", 16)
    requests.admit(0, random_tokens((50,), 1).tolist())
    requests.admit(3, random_tokens((5,), 2).tolist())
    assert_drafts_equal_definition(family, drafter, requests, [3, 0], random_tokens((2, K), 3))


@pytest.mark.parametrize("lead", [0.0, 10.0, 18.0])
def test_log_odds_keep_their_digits_near_certainty(lead: float) -> None:
    """Log-odds from 1 − q_max, of which float32 leaves two digits where q_max is nearly 1."""
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(0))
    logits[:, 3] += lead
    exact = logits.double().log_softmax(-1)
    log_top = exact.amax(-1)
    expected = log_top - (-log_top.expm1()).log()
    assert bool((expected.abs() < ODDS_BOUND).any())
    expected = expected.clamp(-ODDS_BOUND, ODDS_BOUND)
    odds = figures_of_logits(logits)[:, 0].double()
    torch.testing.assert_close(odds, expected, rtol=0.0, atol=1e-5)


def test_bfloat16_keeps_its_dtype(family: Family, tmp_path: Path) -> None:
    """Float32 caches or logits beside a bfloat16 target, which would double the memory unseen."""
    target = load_checkpoint(save_tiny(tmp_path, seed=5), torch.bfloat16)
    small = new_drafter(family, target)
    requests = ObservedRequests(target, small, num_slots=NUM_SLOTS, max_len=MAX_LEN)
    requests.cache = KVCache(target.config, NUM_SLOTS, MAX_LEN, torch.bfloat16)
    requests.admit(0, random_tokens((9,), 0).tolist())
    logits = draft(small, requests.context([0]), random_tokens((1, 2), 1))
    assert [row.dtype for row in logits] == [torch.bfloat16] * 3
    assert all(row.isfinite().all() for row in logits)
    for logit in confidences(small, requests.context([0]), random_tokens((1, 2), 1)):
        assert logit.dtype == torch.float32 and bool(logit.isfinite().all())
