"""The packed forward pass against `transformers`, for every way that the scheduler calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.runtime.models.tiny_checkpoints import (
    KINDS,
    VOCAB_SIZE,
    reference,
    reference_logits,
    save_tiny,
)
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.kv_cache import KVCache

Pair = tuple[LoadedModel, PreTrainedModel]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = save_tiny(tmp_path_factory.mktemp(request.param), request.param)
    return load_checkpoint(folder), reference(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = save_tiny(tmp_path_factory.mktemp("llama"), "llama")
    return load_checkpoint(folder), reference(folder)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()
    return tokens


def run(
    loaded: LoadedModel,
    cache: KVCache,
    rows: list[list[int]],
    slots: list[int],
    kv_lens: list[int],
) -> list[Tensor]:
    """Logits [length, V] of each row."""
    batch = PackedBatch.from_lists(rows, slots, kv_lens)
    logits = loaded.model.forward(batch, cache).logits
    return list(logits.split([len(row) for row in rows]))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


def test_ragged_verification_equals_reference(pair: Pair) -> None:
    """A wrong rotary position, mask, head order, bias or padding column in rows of mixed lengths."""
    loaded, model = pair
    contexts = [random_tokens(length, length) for length in (1, 5, 40, 17, 23, 9, 31, 2)]
    cache = KVCache(loaded.config, num_slots=8, max_len=64)
    for slot, context in enumerate(contexts):
        (prefill,) = run(loaded, cache, [context], [slot], [0])
        assert_close(prefill, reference_logits(model, context))
    # Every length 1 … K+1 for K = 7, in one call.
    rows = [random_tokens(length, 100 + length) for length in (3, 8, 1, 5, 2, 7, 4, 6)]
    actual = run(loaded, cache, rows, list(range(8)), [len(context) for context in contexts])
    for context, row, logits in zip(contexts, rows, actual, strict=True):
        assert_close(logits, reference_logits(model, context + row)[len(context) :])


@pytest.mark.parametrize("length", range(1, 9))
def test_uniform_rows_equal_reference(llama: Pair, length: int) -> None:
    """The path without padding (all rows as long) disagreeing with the padded one."""
    loaded, model = llama
    contexts = [random_tokens(count, count) for count in (12, 3, 20)]
    cache = KVCache(loaded.config, num_slots=4, max_len=32)
    for slot, context in enumerate(contexts):
        run(loaded, cache, [context], [slot], [0])
    rows = [random_tokens(length, 50 + row) for row in range(3)]
    actual = run(loaded, cache, rows, [0, 1, 2], [len(context) for context in contexts])
    for context, row, logits in zip(contexts, rows, actual, strict=True):
        assert_close(logits, reference_logits(model, context + row)[len(context) :])


def test_equal_lengths_without_mask(llama: Pair) -> None:
    """Dropping the mask, allowed only if all rows have one token and equally long contexts."""
    loaded, model = llama
    contexts = [random_tokens(10, seed) for seed in (1, 2)]
    cache = KVCache(loaded.config, num_slots=2, max_len=32)
    # Garbage behind the contexts, as rejected drafts leave it.
    for slot, context in enumerate(contexts):
        run(loaded, cache, [context + random_tokens(6, 9)], [slot], [0])
    actual = run(loaded, cache, [[3], [4]], [0, 1], [10, 10])
    for context, token, logits in zip(contexts, (3, 4), actual, strict=True):
        assert_close(logits, reference_logits(model, [*context, token])[-1:])


@pytest.mark.parametrize("slots", [[4, 1, 3], [1, 2, 3], [3, 2, 1], [0, 2, 4]])
def test_slots_in_any_order(llama: Pair, slots: list[int]) -> None:
    """Taking slots as consecutive and ascending where they are not."""
    loaded, model = llama
    cache = KVCache(loaded.config, num_slots=5, max_len=32)
    contexts = [random_tokens(count, count) for count in (7, 11, 4)]
    for slot, context in zip(slots, contexts, strict=True):
        run(loaded, cache, [context], [slot], [0])
    rows = [random_tokens(count, 30 + count) for count in (2, 1, 3)]
    actual = run(loaded, cache, rows, slots, [7, 11, 4])
    for context, row, logits in zip(contexts, rows, actual, strict=True):
        assert_close(logits, reference_logits(model, context + row)[len(context) :])


def test_rejected_drafts_and_reused_slots_leave_nothing(llama: Pair) -> None:
    """Attention reading what an earlier request or a rejected draft left behind the row's length."""
    loaded, model = llama
    cache = KVCache(loaded.config, num_slots=2, max_len=48)
    run(loaded, cache, [random_tokens(45, 1)], [1], [0])
    context = random_tokens(9, 2)
    run(loaded, cache, [context], [1], [0])
    run(loaded, cache, [random_tokens(8, 3)], [1], [9])  # all rejected
    row = random_tokens(3, 4)
    (actual,) = run(loaded, cache, [row], [1], [9])
    assert_close(actual, reference_logits(model, context + row)[9:])


def test_chunked_prefill(llama: Pair) -> None:
    """Positions or masks that start anew in the second chunk of a prompt."""
    loaded, model = llama
    tokens = random_tokens(30, 5)
    cache = KVCache(loaded.config, num_slots=1, max_len=32)
    chunks = [tokens[:13], tokens[13:14], tokens[14:]]
    actual = [
        run(loaded, cache, [c], [0], [kv])[0] for c, kv in zip(chunks, (0, 13, 14), strict=True)
    ]
    assert_close(torch.cat(actual), reference_logits(model, tokens))


def test_dead_rows_change_nothing(llama: Pair) -> None:
    """A row without tokens shifting its neighbours or reading past the packed tokens."""
    loaded, model = llama
    cache = KVCache(loaded.config, num_slots=4, max_len=16)
    context = random_tokens(6, 6)
    run(loaded, cache, [context], [1], [0])
    actual = run(loaded, cache, [[], [5, 6], [], []], [0, 1, 2, 3], [0, 6, 16, 3])
    assert [logits.shape[0] for logits in actual] == [0, 2, 0, 0]
    assert_close(actual[1], reference_logits(model, [*context, 5, 6])[6:])


def test_empty_batch(llama: Pair) -> None:
    """A batch drained to nothing failing instead of yielding nothing."""
    loaded, _ = llama
    cache = KVCache(loaded.config, num_slots=1, max_len=4)
    output = loaded.model.forward(PackedBatch.from_lists([[]], [0], [0]), cache)
    assert output.logits.shape == (0, VOCAB_SIZE)
    assert output.hidden.shape == (0, loaded.config.hidden_size)


def test_logit_rows_and_hidden(llama: Pair) -> None:
    """Logits of other rows than asked for, or hidden states from before the final norm."""
    loaded, model = llama
    tokens = random_tokens(12, 7)
    batch = PackedBatch.from_lists([tokens], [0], [0])
    cache = KVCache(loaded.config, num_slots=1, max_len=16)
    output = loaded.model.forward(batch, cache, logit_rows=torch.tensor([11, 3]))
    assert_close(output.logits, reference_logits(model, tokens)[[11, 3]])
    with torch.inference_mode():
        expected = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    assert_close(output.hidden, expected)
    assert_close(loaded.model.logits(output.hidden[3:4]), output.logits[1:])


def test_layers_selects_layers(tmp_path: Path) -> None:
    """A subset running on the wrong weights or cache layers."""
    folder = save_tiny(tmp_path)
    loaded, model = load_checkpoint(folder), reference(folder)
    tokens = random_tokens(10, 8)
    cache = KVCache(loaded.config, num_slots=1, max_len=16)
    batch = PackedBatch.from_lists([tokens], [0], [0])
    actual = loaded.model.forward(batch, cache, layers=[0, 2]).logits
    del model.model.layers[1]
    assert_close(actual, reference_logits(model, tokens))
    assert cache.keys[1].abs().sum() == 0 and cache.keys[2].abs().sum() > 0


def test_row_logits_do_not_depend_on_other_rows(llama: Pair) -> None:
    """One request's tokens changing with the batch that it happens to be in."""
    loaded, _ = llama
    contexts = [random_tokens(count, count) for count in (9, 30, 4)]
    rows = [random_tokens(count, 60 + count) for count in (2, 8, 5)]
    together = KVCache(loaded.config, num_slots=3, max_len=48)
    for slot, context in enumerate(contexts):
        run(loaded, together, [context], [slot], [0])
    joint = run(loaded, together, rows, [0, 1, 2], [9, 30, 4])
    for slot, (context, row) in enumerate(zip(contexts, rows, strict=True)):
        alone = KVCache(loaded.config, num_slots=1, max_len=48)
        run(loaded, alone, [context], [0], [0])
        (single,) = run(loaded, alone, [row], [0], [len(context)])
        torch.testing.assert_close(joint[slot], single, atol=1e-4, rtol=0)


def test_bfloat16_stays_close(llama: Pair, tmp_path: Path) -> None:
    """A float32 constant silently promoting (or a cast breaking) the half-precision path."""
    folder = save_tiny(tmp_path)
    loaded = load_checkpoint(folder, torch.bfloat16)
    tokens = random_tokens(12, 9)
    cache = KVCache(loaded.config, num_slots=1, max_len=16, dtype=torch.bfloat16)
    (actual,) = run(loaded, cache, [tokens], [0], [0])
    assert actual.dtype == torch.bfloat16
    expected = reference_logits(reference(folder), tokens)
    assert (actual.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize(
    ("rows", "slots", "kv_lens", "message"),
    [
        ([[1, 2]], [0], [7], "reaches 9 tokens, but the KV cache holds 8"),
        ([[1], [2]], [1, 1], [0, 0], "must be distinct"),
        ([[1]], [2], [0], "below num_slots=2"),
    ],
)
def test_writes_outside_own_slot_are_refused(
    llama: Pair, rows: list[list[int]], slots: list[int], kv_lens: list[int], message: str
) -> None:
    """Overwriting another request's context without a word."""
    loaded, _ = llama
    cache = KVCache(loaded.config, num_slots=2, max_len=8)
    with pytest.raises(ValueError, match=message):
        run(loaded, cache, rows, slots, kv_lens)
