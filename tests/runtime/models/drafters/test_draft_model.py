"""Drafting with a second checkpoint that keeps its own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.runtime.models.drafters.rounds import Requests, draft, random_tokens
from tests.runtime.models.tiny_checkpoints import reference, reference_logits, save_tiny
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters.draft_model import DraftModelDrafter

K = 4
NUM_SLOTS, MAX_LEN = 4, 96


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, PreTrainedModel]:
    folder = save_tiny(tmp_path_factory.mktemp("draft"), "qwen2", seed=3)
    return load_checkpoint(folder), reference(folder)


@pytest.fixture
def requests(models: tuple[LoadedModel, PreTrainedModel]) -> Requests:
    # The target only keeps the committed state here; any model of the vocabulary will do.
    return Requests(models[0], num_slots=NUM_SLOTS, max_len=MAX_LEN)


@pytest.fixture
def drafter(models: tuple[LoadedModel, PreTrainedModel]) -> DraftModelDrafter:
    return DraftModelDrafter(models[0], num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=K)


def assert_drafts_equal_reference(
    drafter: DraftModelDrafter,
    requests: Requests,
    model: PreTrainedModel,
    slots: list[int],
    tokens: torch.Tensor,
) -> None:
    logits = draft(drafter, requests.context(slots), tokens[:, : K - 1])
    for row, slot in enumerate(slots):
        drafts = tokens[row, : K - 1].tolist()
        expected = reference_logits(model, requests.tokens[slot] + drafts)[-K:]
        for position in range(K):
            torch.testing.assert_close(logits[position][row], expected[position], atol=1e-3, rtol=0)


def test_logits_equal_recomputation_over_rounds(
    models: tuple[LoadedModel, PreTrainedModel], requests: Requests, drafter: DraftModelDrafter
) -> None:
    """Stale KV after rejected, trimmed or all accepted drafts, missed rounds and reused slots."""
    for slot, length in ((3, 9), (0, 4), (2, 60)):
        requests.admit(slot, random_tokens((length,), slot).tolist())
    # Slot 3 misses every other round, so that its gap is longer than its neighbours'.
    for number, accepted in enumerate((1, 0, K, 2, K - 1, 0, K)):
        if number == 3:
            requests.admit(0, random_tokens((12,), 99).tolist())
            drafter.reset(0)
        slots = [0, 2] if number % 2 else [3, 0, 2]
        tokens = random_tokens((len(slots), K), 20 + number)
        assert_drafts_equal_reference(drafter, requests, models[1], slots, tokens)
        verified = {slot: tokens[row].tolist() for row, slot in enumerate(slots)}
        verified.setdefault(3, [1])
        requests.verify(verified, {**dict.fromkeys(verified, accepted), 3: 1}, next_token=number)


def test_refresh_catches_up(
    models: tuple[LoadedModel, PreTrainedModel], requests: Requests, drafter: DraftModelDrafter
) -> None:
    """Rounds without drafting leaving gaps in the cache, or a lag that is not reported."""
    requests.admit(1, random_tokens((20,), 1).tolist())
    requests.admit(2, random_tokens((3,), 2).tolist())
    assert drafter.lag(requests.context([1, 2])).tolist() == [20, 3]
    drafter.refresh(requests.context([1]))
    assert drafter.lag(requests.context([1, 2])).tolist() == [0, 3]
    for token in range(5):  # plain decoding
        requests.verify({1: []}, {1: 0}, next_token=token)
    assert drafter.lag(requests.context([1, 2])).tolist() == [5, 3]
    drafter.refresh(requests.context([2, 1]))
    drafter.refresh(requests.context([2, 1]))  # nothing left to do
    assert drafter.lag(requests.context([1, 2])).tolist() == [0, 0]
    tokens = random_tokens((2, K), 5)
    assert_drafts_equal_reference(drafter, requests, models[1], [1, 2], tokens)


def test_accepted_drafts_are_not_computed_twice(
    requests: Requests, drafter: DraftModelDrafter
) -> None:
    """Throwing away the KV of accepted drafts, or keeping that of a rejected one."""
    requests.admit(0, random_tokens((10,), 1).tolist())
    tokens = torch.tensor([[11, 12, 13, 14]])
    draft(drafter, requests.context([0]), tokens[:, : K - 1])
    requests.verify({0: tokens[0].tolist()}, {0: 2}, next_token=50)
    # Committed: 10, two drafts, one corrected token; only the last is missing.
    assert drafter.lag(requests.context([0])).tolist() == [1]
    draft(drafter, requests.context([0]), tokens[:, : K - 1])
    requests.verify({0: tokens[0].tolist()}, {0: K}, next_token=51)
    # The last draft was drawn but never fed, and the bonus token is new.
    assert drafter.lag(requests.context([0])).tolist() == [2]


def test_history_behind_the_committed_length_is_ignored(
    requests: Requests, drafter: DraftModelDrafter
) -> None:
    """Leftovers in the history that happen to equal the fed drafts counting as committed."""
    requests.admit(0, random_tokens((10,), 1).tolist())
    tokens = torch.tensor([[11, 12, 13]])
    draft(drafter, requests.context([0]), tokens)
    context = requests.context([0])
    context.history[0, 10:13] = tokens[0]
    assert drafter.lag(context).tolist() == [0]


def test_long_prompts_are_fed_in_chunks(
    models: tuple[LoadedModel, PreTrainedModel],
    requests: Requests,
    drafter: DraftModelDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A boundary between chunks that drops or repeats a token."""
    monkeypatch.setattr("trtllm_av.runtime.models.drafters.draft_model._CHUNK", 7)
    for slot, length in ((0, 1 + 14), (1, 1 + 15), (2, 2)):
        requests.admit(slot, random_tokens((length,), slot).tolist())
    tokens = random_tokens((3, K), 6)
    assert_drafts_equal_reference(drafter, requests, models[1], [0, 1, 2], tokens)


def test_logits_never_see_the_drawn_token(requests: Requests, drafter: DraftModelDrafter) -> None:
    """Lookahead: a trimming decision at position i could depend on x_i, which is lossy."""
    for slot in (0, 1):
        requests.admit(slot, random_tokens((6 + slot,), slot).tolist())
    tokens = random_tokens((2, K - 1), 3)
    drafter.refresh(requests.context([0, 1]))
    before = draft(drafter, requests.context([0, 1]), tokens)
    for changed in range(K - 1):
        perturbed = tokens.clone()
        perturbed[:, changed] = (perturbed[:, changed] + 1) % 97
        after = draft(drafter, requests.context([0, 1]), perturbed)
        assert all(torch.equal(before[i], after[i]) for i in range(changed + 1))
        assert not torch.equal(before[changed + 1], after[changed + 1])


def test_rows_do_not_depend_on_each_other(
    models: tuple[LoadedModel, PreTrainedModel], requests: Requests, drafter: DraftModelDrafter
) -> None:
    """A row's confidence changing with the other requests of the batch."""
    for slot, length in enumerate((4, 40, 11)):
        requests.admit(slot, random_tokens((length,), slot).tolist())
    tokens = random_tokens((3, K - 1), 4)
    together = draft(drafter, requests.context([0, 1, 2]), tokens)
    for slot in range(3):
        alone = DraftModelDrafter(models[0], num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=K)
        single = draft(alone, requests.context([slot]), tokens[slot : slot + 1])
        for joint, one in zip(together, single, strict=True):
            torch.testing.assert_close(joint[slot], one[0], atol=1e-4, rtol=0)
