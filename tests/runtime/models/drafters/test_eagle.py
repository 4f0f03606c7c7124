"""Drafting with a head on the target's hidden state, against its training-time definition."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.runtime.models.drafters.rounds import Requests, draft, random_tokens
from tests.runtime.models.tiny_checkpoints import VOCAB_SIZE, save_tiny
from trtllm_av.runtime.errors import CheckpointError, MissingDependencyError, UsageError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import create_drafter, eagle
from trtllm_av.runtime.models.drafters.base import DraftContext
from trtllm_av.runtime.models.drafters.eagle import EagleDrafter
from trtllm_av.runtime.models.drafters.eagle_head import (
    EagleHead,
    EagleHeadConfig,
    load_head,
    save_head,
    target_fingerprint,
)
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig

K = 4
NUM_SLOTS, MAX_LEN = 4, 96
NUM_DRAFT_IDS = 41


def random_head(target: LoadedModel) -> tuple[EagleHead, Tensor]:
    """A head of random weights, large enough that every input matters, and its draft ids."""
    config = EagleHeadConfig(
        hidden_size=target.config.hidden_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=40,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        target_fingerprint=target_fingerprint(target.model.embed, target.config.vocab_size),
    )
    head = EagleHead(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_DRAFT_IDS].sort().values
    return head, ids


@pytest.fixture(scope="module", params=["llama", "qwen2"], ids=["untied", "tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("target"), request.param, seed=5))


@pytest.fixture
def drafter(target: LoadedModel) -> EagleDrafter:
    head, ids = random_head(target)
    head.prepack()
    return EagleDrafter(head, ids, target, num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=K)


class ObservedRequests(Requests):
    """Requests whose hidden states the drafter is shown, as the engine shows them."""

    def __init__(self, target: LoadedModel, drafter: EagleDrafter) -> None:
        super().__init__(target, num_slots=NUM_SLOTS, max_len=MAX_LEN)
        self._drafter = drafter

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = list(tokens)
        half = len(tokens) // 2
        for begin, end in ((0, half), (half, len(tokens) - 1)):  # a prompt in two chunks
            batch = PackedBatch.from_lists([tokens[begin:end]], [slot], [begin])
            hidden = self.target.model(batch, self.cache).hidden
            self._drafter.observe(batch.slots, batch.kv_lens, batch.cu_seqlens, hidden)

    def verify(
        self, drafts: dict[int, list[int]], accepted: dict[int, int], next_token: int
    ) -> None:
        slots = list(drafts)
        rows = [[self.tokens[slot][-1], *drafts[slot]] for slot in slots]
        kv_lens = [len(self.tokens[slot]) - 1 for slot in slots]
        batch = PackedBatch.from_lists(rows, slots, kv_lens)
        hidden = self.target.model(batch, self.cache).hidden
        kept = [
            hidden[start : start + accepted[slot] + 1]
            for start, slot in zip(batch.cu_seqlens.tolist(), slots, strict=False)
        ]
        bounds = torch.tensor([0, *(len(part) for part in kept)]).cumsum(0)
        self._drafter.observe(batch.slots, batch.kv_lens, bounds, torch.cat(kept))
        for slot in slots:
            self.tokens[slot] += [*drafts[slot][: accepted[slot]], next_token]


@pytest.fixture
def requests(target: LoadedModel, drafter: EagleDrafter) -> ObservedRequests:
    return ObservedRequests(target, drafter)


def recomputed_logits(target: LoadedModel, committed: list[int], drafts: list[int]) -> list[Tensor]:
    """Logits [V_d] of positions 0 … len(drafts), entry by entry, from nothing but the definition."""
    head, ids = random_head(target)
    model, count = target.model, len(committed)
    cache = KVCache(target.config, 1, count)
    states = model(PackedBatch.from_lists([committed], [0], [0]), cache).hidden[: count - 1]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    state, logits = torch.empty(0), []
    for entry, token in enumerate(committed[1:] + drafts):
        hidden = states[entry] if entry < count - 1 else state
        residual, q, k, v = head.before_attention(
            model.embed(torch.tensor([token])), hidden[None], torch.tensor([entry])
        )
        keys.append(k[0].repeat_interleave(2, 0))
        values.append(v[0].repeat_interleave(2, 0))
        score = torch.einsum("hd,thd->ht", q[0], torch.stack(keys)) / 8**0.5
        mixed = torch.einsum("ht,thd->hd", score.softmax(-1), torch.stack(values))
        state = head.after_attention(residual, mixed.reshape(1, -1))[0]
        if entry >= count - 2:
            logits.append(model.logits(state[None])[0, ids])
    return logits


def assert_drafts_equal_definition(
    drafter: EagleDrafter, requests: ObservedRequests, slots: list[int], tokens: Tensor
) -> None:
    logits = draft(drafter, requests.context(slots), tokens[:, : K - 1])
    for row, slot in enumerate(slots):
        expected = recomputed_logits(
            requests.target, requests.tokens[slot], tokens[row, : K - 1].tolist()
        )
        for position in range(K):
            torch.testing.assert_close(
                logits[position][row], expected[position], atol=1e-4, rtol=1e-4
            )


def test_logits_equal_the_training_definition_over_rounds(
    requests: ObservedRequests, drafter: EagleDrafter
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
        assert_drafts_equal_definition(drafter, requests, slots, tokens)
        verified = {slot: tokens[row].tolist() for row, slot in enumerate(slots)}
        verified.setdefault(3, [1])
        requests.verify(verified, {**dict.fromkeys(verified, accepted), 3: 1}, next_token=number)


def test_a_draft_reaches_later_positions_only(
    requests: ObservedRequests, drafter: EagleDrafter
) -> None:
    """A confidence computed from the drawn token: lossless only as long as logits ≤ i ignore x_i."""
    for slot in (1, 2):
        requests.admit(slot, random_tokens((8 + slot,), slot).tolist())
    tokens = random_tokens((2, K - 1), 3)
    expected = draft(drafter, requests.context([1, 2]), tokens)
    for changed in range(K - 1):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCAB_SIZE
        logits = draft(drafter, requests.context([1, 2]), other)
        for position in range(K):
            is_same = torch.equal(logits[position][0], expected[position][0])
            assert is_same == (position <= changed), (changed, position)
            assert torch.equal(logits[position][1], expected[position][1])


def test_refresh_catches_up(requests: ObservedRequests, drafter: EagleDrafter) -> None:
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
    assert_drafts_equal_definition(drafter, requests, [1, 2], random_tokens((2, K), 5))


def test_long_prompts_are_fed_in_chunks(
    requests: ObservedRequests, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is skipped or fed twice when a prompt is longer than one pass."""
    monkeypatch.setattr(eagle, "_CHUNK", 16)
    requests.admit(0, random_tokens((50,), 1).tolist())
    requests.admit(3, random_tokens((5,), 2).tolist())
    assert_drafts_equal_definition(drafter, requests, [3, 0], random_tokens((2, K), 3))


def test_bfloat16_keeps_its_dtype(tmp_path: Path) -> None:
    """Float32 caches or logits beside a bfloat16 target, which would double the memory unseen."""
    target = load_checkpoint(save_tiny(tmp_path, seed=5), torch.bfloat16)
    head, ids = random_head(target)
    small = EagleDrafter(
        head.to(torch.bfloat16), ids, target, num_slots=NUM_SLOTS, max_len=MAX_LEN, max_draft_len=K
    )
    requests = ObservedRequests(target, small)
    requests.cache = KVCache(target.config, NUM_SLOTS, MAX_LEN, torch.bfloat16)
    requests.admit(0, random_tokens((9,), 0).tolist())
    logits = draft(small, requests.context([0]), random_tokens((1, 2), 1))
    assert [row.dtype for row in logits] == [torch.bfloat16] * 3
    assert all(row.isfinite().all() for row in logits)


def test_weights_survive_the_file(target: LoadedModel, tmp_path: Path) -> None:
    """A tensor that is left out of the file, or a map that comes back in another order."""
    head, ids = random_head(target)
    save_head(tmp_path / "head.safetensors", head, ids)
    loaded, loaded_ids = load_head(tmp_path / "head.safetensors")
    assert loaded.config == head.config
    assert torch.equal(loaded_ids, ids)
    for name, parameter in head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.half().float()), name


def create(target: LoadedModel, **settings: object) -> object:
    config = SpeculativeConfig(method="eagle", num_speculative_tokens=K, **settings)
    return create_drafter(config, target, KVCache(target.config, NUM_SLOTS, MAX_LEN))


def test_a_head_of_another_target_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    """A head that reads states it was never trained on: still lossless, but nothing is accepted."""
    head, ids = random_head(target)
    save_head(tmp_path / "head.safetensors", head, ids)
    assert isinstance(create(target, model=str(tmp_path / "head.safetensors")), EagleDrafter)
    other = load_checkpoint(save_tiny(tmp_path / "other", seed=6))
    with pytest.raises(CheckpointError, match="another target"):
        create(other, model=str(tmp_path / "head.safetensors"))
    with pytest.raises(UsageError, match="no packaged head"):
        create(target)
    with pytest.raises(UsageError, match="skip_layers"):
        create(target, skip_layers=[1])


@pytest.mark.parametrize("damage", ["missing", "text", "no metadata", "tensor", "config"])
def test_damaged_weights_are_one_line(target: LoadedModel, tmp_path: Path, damage: str) -> None:
    """A traceback, or a head with random weights, for a file that is no head."""
    path = tmp_path / "head.safetensors"
    head, ids = random_head(target)
    tensors = dict(head.state_dict()) | {"draft_to_target": ids.int()}
    metadata = {"eagle_head": json.dumps({"hidden_size": 32})}
    if damage == "text":
        path.write_text("no weights")
    elif damage == "no metadata":
        save_file(tensors, path)
    elif damage == "config":
        save_file(tensors, path, metadata)
    elif damage == "tensor":
        save_head(path, head, ids)
        whole = load_head(path)[0].config
        del tensors["down"]
        save_file(tensors, path, {"eagle_head": json.dumps(vars(whole))})
    with pytest.raises(CheckpointError, match=r"head\.safetensors") as caught:
        load_head(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_packaged_head_drafts_for_smollm2() -> None:
    """Weights that load and draft noise: another file, a map in another order, a changed definition."""
    try:
        loaded = load_checkpoint("smollm2")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert loaded.tokenizer is not None
    text = (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        "The capital of France is Paris. It is one of the most popular tourist destinations in the "
        "world, and it is known for its beautiful architecture, its museums, and its food.<|im_end|>"
    )
    ids = torch.tensor([loaded.tokenizer.encode(text, add_special_tokens=False)])
    count = ids.shape[1]
    cache = KVCache(loaded.config, 1, count)
    output = loaded.model(PackedBatch.from_lists(ids.tolist(), [0], [0]), cache)
    drafter = create_drafter(SpeculativeConfig(method="eagle"), loaded, cache)
    assert drafter.draft_to_target is not None
    slot = torch.tensor([0])
    drafter.observe(slot, slot, torch.tensor([0, count]), output.hidden)
    p = output.logits.softmax(-1)[:, drafter.draft_to_target]
    overlaps = []
    for row in range(20, count - 2):
        first = drafter.start(DraftContext(slot, torch.tensor([row + 2]), ids)).softmax(-1)
        second = drafter.step(1, ids[:, row + 2]).softmax(-1)
        overlaps.append(
            [
                float(torch.minimum(p[row + 1 + k], q[0]).sum())
                for k, q in enumerate((first, second))
            ]
        )
    assert torch.tensor(overlaps).mean(0).min() > 0.5
