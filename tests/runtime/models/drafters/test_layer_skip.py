"""Drafting with some layers of the target, over the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.runtime.models.drafters.rounds import Requests, draft, random_tokens
from tests.runtime.models.tiny_checkpoints import save_tiny
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters.layer_skip import (
    LayerSkipDrafter,
    default_skip_layers,
    kept_layers,
)
from trtllm_av.runtime.models.kv_cache import KVCache

K = 5
KEPT = [0, 2, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=4))


def from_scratch(target: LoadedModel, committed: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Draft logits [V] after ``drafts``: the whole target on all but the last token, then KEPT layers."""
    cache = KVCache(target.config, num_slots=1, max_len=64)
    target.model.forward(PackedBatch.from_lists([committed[:-1]], [0], [0]), cache)
    tail = [committed[-1], *drafts]
    batch = PackedBatch.from_lists([tail], [0], [len(committed) - 1])
    return target.model.forward(batch, cache, layers=KEPT).logits[-1]


def test_default_layers() -> None:
    """The stated rule (first 14 and last 14 of 30) drifting, or leaving nothing to skip or to run."""
    assert default_skip_layers(30) == [14, 15]
    assert kept_layers(30, None) == [*range(14), *range(16, 30)]
    assert default_skip_layers(32) == [15, 16]
    assert default_skip_layers(2) == [0]
    assert kept_layers(4, [1]) == KEPT


def test_logits_equal_recomputation_over_rounds(target: LoadedModel) -> None:
    """Draft KV of an earlier round, a rejected draft or an earlier request leaking into a draft."""
    requests = Requests(target, num_slots=4, max_len=64)
    drafter = LayerSkipDrafter(target, requests.cache, KEPT, K)
    for slot, length in ((3, 9), (0, 4), (2, 17)):
        requests.admit(slot, random_tokens((length,), slot).tolist())
    for number, accepted in enumerate((2, 0, K - 1, 1)):
        if number == 2:  # another request takes a slot in the middle
            requests.admit(0, random_tokens((6,), 99).tolist())
            drafter.reset(0)
        slots = [3, 0, 2] if number % 2 else [0, 2]
        context = requests.context(slots)
        assert drafter.lag(context).tolist() == [0] * len(slots)
        tokens = random_tokens((len(slots), K), 10 + number)
        logits = draft(drafter, context, tokens[:, : K - 1])
        for row, slot in enumerate(slots):
            for position in range(K):
                expected = from_scratch(
                    target, requests.tokens[slot], tokens[row, :position].tolist()
                )
                torch.testing.assert_close(logits[position][row], expected, atol=1e-4, rtol=0)
        requests.verify(
            {slot: tokens[row].tolist() for row, slot in enumerate(slots)},
            dict.fromkeys(slots, accepted),
            next_token=number,
        )


def test_drafting_leaves_the_target_untouched(target: LoadedModel) -> None:
    """Draft KV surviving in what the target reads: greedy output would no longer be the target's."""
    requests = Requests(target, num_slots=1, max_len=32)
    requests.admit(0, random_tokens((8,), 1).tolist())
    held = requests.cache.keys[0][0, :, :7].clone()
    drafter = LayerSkipDrafter(target, requests.cache, KEPT, K)
    draft(drafter, requests.context([0]), random_tokens((1, K - 1), 2))
    assert torch.equal(requests.cache.keys[0][0, :, :7], held)
    verified = PackedBatch.from_lists([[requests.tokens[0][-1], 5]], [0], [7])
    actual = target.model.forward(verified, requests.cache).logits
    clean = KVCache(target.config, num_slots=1, max_len=32)
    whole = PackedBatch.from_lists([[*requests.tokens[0], 5]], [0], [0])
    expected = target.model.forward(whole, clean).logits[-2:]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_logits_never_see_the_drawn_token(target: LoadedModel) -> None:
    """Lookahead: a trimming decision at position i could depend on x_i, which is lossy."""
    requests = Requests(target, num_slots=2, max_len=32)
    for slot in (0, 1):
        requests.admit(slot, random_tokens((5 + slot,), slot).tolist())
    drafter = LayerSkipDrafter(target, requests.cache, KEPT, K)
    tokens = random_tokens((2, K - 1), 3)
    before = draft(drafter, requests.context([0, 1]), tokens)
    for changed in range(K - 1):
        perturbed = tokens.clone()
        perturbed[:, changed] = (perturbed[:, changed] + 1) % target.config.vocab_size
        after = draft(drafter, requests.context([0, 1]), perturbed)
        assert all(torch.equal(before[i], after[i]) for i in range(changed + 1))
        assert not torch.equal(before[changed + 1], after[changed + 1])


def test_rows_do_not_depend_on_each_other(target: LoadedModel) -> None:
    """A row's confidence changing with the other requests of the batch."""
    requests = Requests(target, num_slots=3, max_len=48)
    for slot, length in enumerate((4, 30, 11)):
        requests.admit(slot, random_tokens((length,), slot).tolist())
    drafter = LayerSkipDrafter(target, requests.cache, KEPT, K)
    tokens = random_tokens((3, K - 1), 4)
    together = draft(drafter, requests.context([0, 1, 2]), tokens)
    for slot in range(3):
        alone = draft(drafter, requests.context([slot]), tokens[slot : slot + 1])
        for joint, single in zip(together, alone, strict=True):
            torch.testing.assert_close(joint[slot], single[0], atol=1e-4, rtol=0)
