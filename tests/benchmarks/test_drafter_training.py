"""Training of drafter heads: what is trained must be what is run, resumed and measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.drafter_training.chain import run_chain
from benchmarks.drafter_training.decode import ChatMarks, Decoder
from benchmarks.drafter_training.evaluate import acceptance_by_depth
from benchmarks.drafter_training.families import DSparkFamily, EagleFamily, Family
from benchmarks.drafter_training.generate import chat_marks, generate_text
from benchmarks.drafter_training.loss import Shares, TargetRows, distil
from benchmarks.drafter_training.source import load_source
from benchmarks.drafter_training.target import FrozenTarget
from benchmarks.drafter_training.text import (
    drop_overlaps,
    encode_text,
    frequent_tokens,
    is_assistant,
)
from benchmarks.drafter_training.train import Trainer, TrainingSettings, train
from tests.runtime.tiny_checkpoint import write_tiny_checkpoint
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters.base import DraftContext
from trtllm_av.runtime.models.drafters.dspark import DSparkDrafter
from trtllm_av.runtime.models.drafters.dspark_head import DSparkHead, figures_of_logits
from trtllm_av.runtime.models.drafters.eagle import EagleDrafter
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead
from trtllm_av.runtime.models.kv_cache import KVCache

CHAIN = 3
VOCAB = 261
EAGLE = EagleFamily(wide=80)
DSPARK = DSparkFamily(wide=48, state_size=12, sequential_size=20, confidence_size=8)
MARKS = ChatMarks(turn_start=10, turn_end=11, assistant=12, name_length=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_checkpoint(folder)


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    source = load_source(str(folder))
    cpu = torch.device("cpu")
    return FrozenTarget(source.weights, source.config, dtype=torch.float32, device=cpu)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def trained_head(target: FrozenTarget) -> EagleHead:
    """A head whose every weight matters (a new one ignores its extra MLP units)."""
    head = EAGLE.new_head(target, CHAIN, seed=0)
    with torch.no_grad():
        head.down.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    return head


def trained_block(target: FrozenTarget) -> DSparkHead:
    """The same of the block drafter: corrections and masks are as large as the states."""
    head = DSPARK.new_head(target, CHAIN, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in (head.masks, head.sequential.down, head.sequential.lift):
            part.normal_(std=0.5, generator=generator)
        for part in (head.confidence.output, head.confidence.input_bias, head.confidence.skip):
            part.normal_(generator=generator)
    return head


def test_frozen_target_equals_the_runtime(target: FrozenTarget, loaded: LoadedModel) -> None:
    """A head trained on other hidden states than it will be shown."""
    tokens = random_tokens(1, 20)
    cache = KVCache(loaded.config, 1, 20)
    hidden = loaded.model(PackedBatch.from_lists(tokens.tolist(), [0], [0]), cache).hidden
    torch.testing.assert_close(target.encode(tokens)[0], hidden, atol=1e-4, rtol=1e-4)


def test_chained_training_equals_drafting(target: FrozenTarget, loaded: LoadedModel) -> None:
    """Rows of the chain that attend to, or stand at, other positions than the drafter's cache has."""
    head, ids = trained_head(target), torch.arange(0, VOCAB, 3)
    tokens = random_tokens(1, 24, seed=3)
    hidden = target.encode(tokens)
    chain = [
        state @ target.output_rows[ids].T
        for state in run_chain(head, target.embedding, tokens, hidden, CHAIN)
    ]
    drafter = EagleDrafter(
        head.requires_grad_(False), ids, loaded, num_slots=1, max_len=40, max_draft_len=CHAIN
    )
    slot, zero = torch.tensor([0]), torch.tensor([0])
    drafter.observe(slot, zero, torch.tensor([0, 24]), hidden[0])
    for row in (0, 7, 19):  # row t drafts behind the tokens 0 … t + 1
        drafter.reset(0)
        logits = drafter.start(DraftContext(slot, torch.tensor([row + 2]), tokens))
        for depth in range(CHAIN):
            if depth:
                logits = drafter.step(depth, tokens[0, row + 1 + depth : row + 2 + depth])
            torch.testing.assert_close(logits[0], chain[depth][0, row], atol=1e-4, rtol=1e-4)


def test_block_training_equals_drafting(target: FrozenTarget, loaded: LoadedModel) -> None:
    """Masks, carried state or confidence of another position than the drafter's, or a correction that is
    not the one that was trained."""
    head, ids = trained_block(target), torch.arange(0, VOCAB, 3)
    tokens = random_tokens(1, 24, seed=3)
    hidden = target.encode(tokens)
    expected = []
    for proposal in DSPARK.unroll(head, target.embedding, tokens, hidden, CHAIN):
        logits = proposal.state @ target.output_rows[ids].T
        assert proposal.confidence is not None
        expected.append((logits, proposal.confidence(figures_of_logits(logits))))
    head.requires_grad_(False).prepack()
    drafter = DSparkDrafter(head, ids, loaded, num_slots=1, max_len=40, max_draft_len=CHAIN)
    slot, zero = torch.tensor([0]), torch.tensor([0])
    drafter.observe(slot, zero, torch.tensor([0, 24]), hidden[0])
    for row in (0, 7, 8, 19):  # row t drafts behind the tokens 0 … t + 1
        logits = drafter.start(DraftContext(slot, torch.tensor([row + 2]), tokens))
        for depth in range(CHAIN):
            if depth:
                logits = drafter.step(depth, tokens[0, row + 1 + depth : row + 2 + depth])
            for mine, theirs in zip(
                (logits, drafter.confidence_logit()), expected[depth], strict=True
            ):
                torch.testing.assert_close(mine[0], theirs[0, row], atol=1e-4, rtol=1e-4)


def test_distillation_gradient() -> None:
    """A fused gradient that is not the loss's: training would go somewhere, just not there."""
    generator = torch.Generator().manual_seed(2)
    batch, length, shift, width = 2, 3, 2, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    rows, logits = normal(7, width), normal(batch, length + shift, 9)
    target = TargetRows(logits[..., :7], logits.logsumexp(-1))
    column = torch.tensor([0, 3, -1, 6, 2, 1])
    weight, shares = torch.rand(batch * length, generator=generator), Shares(0.7, 0.6)
    hidden = normal(batch, length, width).requires_grad_()
    loss, figures = distil(
        hidden, rows, target, shift=shift, next_column=column, weight=weight, shares=shares
    )
    loss.backward()
    gradient, hidden.grad = hidden.grad, None
    log_q = (hidden.flatten(0, 1) @ rows.T).log_softmax(-1)
    p = (target.logits - target.log_total[..., None])[:, shift:].flatten(0, 1).exp()
    shared = torch.minimum(p, log_q.exp()).sum(-1)
    expected = weight * (shares.entropy * -(p * log_q).sum(-1) + shares.overlap * (1 - shared))
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.sum())
    torch.testing.assert_close(figures.overlap, shared)
    torch.testing.assert_close(figures.log_top, log_q.amax(-1))
    torch.testing.assert_close(figures.spread, -(log_q.exp() * log_q).sum(-1))
    torch.testing.assert_close(gradient, hidden.grad)
    log_q = log_q.detach()
    kept = [
        (log_q[i, c].exp() / p[i, c]).clamp(max=1) if c >= 0 else 0 for i, c in enumerate(column)
    ]
    torch.testing.assert_close(figures.ratio, torch.tensor(kept))


def new_trainer(target: FrozenTarget, family: Family = EAGLE, **changes: int) -> Trainer:
    text = encode_text(target, random_tokens(12, 20, seed=4).int(), batch=4)
    settings = TrainingSettings(
        **{"num_steps": 8, "batch": 4, "chain_steps": CHAIN, "warmup_steps": 2} | changes
    )
    counted = torch.ones(text.tokens.shape)
    ids = frequent_tokens(text.tokens, counted, 50, VOCAB)
    return Trainer(
        family, family.new_head(target, CHAIN, seed=0), target, text, ids, counted, settings
    )


@pytest.mark.parametrize("family", [EAGLE, DSPARK], ids=lambda family: family.name)
def test_a_resumed_run_equals_one_that_never_stopped(
    target: FrozenTarget, tmp_path: Path, family: Family
) -> None:
    """Optimiser state, schedule or order of the batches lost at a stop."""
    whole = new_trainer(target, family)
    assert train(whole, tmp_path / "whole.pt", seconds=600, report=lambda _: None)
    stopped = new_trainer(target, family)
    for _ in range(5):
        stopped.train_step()
    stopped.save(tmp_path / "stopped.pt")
    resumed = new_trainer(target, family, num_steps=5)  # the checkpoint knows better
    resumed.resume(tmp_path / "stopped.pt")
    assert resumed.step == 5
    train(resumed, tmp_path / "stopped.pt", seconds=600, report=lambda _: None)
    for name, parameter in whole.head.named_parameters():
        assert torch.equal(parameter, resumed.head.get_parameter(name)), name
    other = new_trainer(target, family)
    other.draft_to_target = other.draft_to_target.flip(0)
    with pytest.raises(UsageError, match="another text"):
        other.resume(tmp_path / "stopped.pt")


def test_a_run_fits_its_time(target: FrozenTarget, tmp_path: Path) -> None:
    """A schedule that never ends, so that the learning rate is still high when the time is up; weights
    that are written only at the end of it."""
    trainer = new_trainer(target, num_steps=10**9)
    path = tmp_path / "head.safetensors"
    train(
        trainer, tmp_path / "c.pt", seconds=1, report=lambda _: None, fits_time=True, snapshot=path
    )
    assert 100 < trainer.settings.num_steps < 10**5
    assert EAGLE.load(path)[1].equal(trainer.draft_to_target)


@pytest.mark.parametrize("family", [EAGLE, DSPARK], ids=lambda family: family.name)
def test_training_raises_acceptance(target: FrozenTarget, family: Family) -> None:
    """A sign error anywhere between loss and figure: measured acceptance must rise on the text trained on."""
    trainer = new_trainer(target, family, num_steps=60)
    text = random_tokens(12, 20, seed=4)
    counted = torch.ones(text.shape, dtype=torch.bool)

    def acceptance() -> list[float]:
        report = acceptance_by_depth(
            family, trainer.head, target, trainer.draft_to_target, text, counted, CHAIN
        )
        return report.unconditional  # random text is no prefix that drafting would reach

    before = acceptance()
    for _ in range(60):
        trainer.train_step()
    after = acceptance()
    assert all(new > 1.1 * old for new, old in zip(after, before, strict=True)), (before, after)


def test_conditional_acceptance_is_that_of_drafting(
    target: FrozenTarget, loaded: LoadedModel
) -> None:
    """Prefixes weighted by their own acceptance or by the next depth's, or columns mixed up: a figure
    that drafting never shows."""
    head, ids = trained_head(target), torch.arange(0, VOCAB, 2)
    text = random_tokens(3, 12, seed=8)
    p = (target.encode(text) @ target.output_rows.T).softmax(-1)
    drafter = EagleDrafter(
        head.requires_grad_(False), ids, loaded, num_slots=3, max_len=20, max_draft_len=CHAIN
    )
    slots, total, reached = torch.arange(3), torch.zeros(CHAIN), torch.zeros(CHAIN)
    bounds = torch.arange(4) * text.shape[1]
    drafter.observe(slots, 0 * slots, bounds, target.encode(text).flatten(0, 1))
    for row in range(text.shape[1] - CHAIN - 1):
        chance = torch.ones(3)
        logits = drafter.start(DraftContext(slots, torch.full((3,), row + 2), text))
        for depth in range(CHAIN):
            at = row + 1 + depth
            if depth:
                logits = drafter.step(depth, text[:, at])
            q = torch.zeros(3, VOCAB)
            q[:, ids] = logits.softmax(-1)
            total[depth] += (chance * torch.minimum(p[:, at], q).sum(-1)).sum()
            reached[depth] += chance.sum()
            drawn = text[:, at + 1, None]
            chance = chance * (q.gather(1, drawn) / p[:, at].gather(1, drawn)).clamp(max=1)[:, 0]
    counted = torch.ones(text.shape, dtype=torch.bool)
    report = acceptance_by_depth(EAGLE, head, target, ids, text, counted, CHAIN, batch=2)
    torch.testing.assert_close(torch.tensor(report.conditional), total / reached)


def test_decoding_samples_behind_the_forced_prompt(target: FrozenTarget) -> None:
    """A cache that is off by one, or prompt tokens that are overwritten: text the target did not write."""
    forced = torch.full((3, 16), -1)
    for row in range(3):
        forced[row, : 2 + row] = random_tokens(2 + row, seed=row) + 20
    decoder = Decoder(target, MARKS, batch=3, capacity=16, user_temperature=1e-4, seed=0)
    for _ in range(2):  # the second text must not see the first one's cache
        text = decoder.generate(forced)
        assert torch.equal(torch.where(forced >= 0, text, -1), forced)
        best = (target.encode(text) @ target.output_rows.T).argmax(-1)
        for row in range(3):
            # Without a turn of the assistant everything is drawn at the user's, next to zero.
            assert torch.equal(text[row, 2 + row :], best[row, 1 + row : -1])


def test_text_is_counted_in_answers(folder: Path, target: FrozenTarget, tmp_path: Path) -> None:
    """Openings, or turns of the user at another temperature, counted as answers at temperature 1."""
    source, length = load_source(str(folder)), 600
    path = tmp_path / "text.safetensors"
    answered, sampled, _ = generate_text(
        target, source, path, num_tokens=1, batch=4, length=length, seed=0
    )
    text = load_file(path)
    lens = text["prompt_lens"][:, None]
    is_sampled = torch.arange(length) >= lens
    assert sampled == int((length - lens).sum())
    is_answer = is_assistant(text["tokens"], chat_marks(source)) & is_sampled
    assert 1 <= answered == int(is_answer.sum()) < sampled


def test_assistant_mask() -> None:
    """Requests, role names or text behind a closed turn counting as answers."""
    start, end, name, rest, line = 10, 11, 12, 13, 14
    user = [start, 30, line, 1, 2, end, line]
    answer = [start, name, rest, line, 3, 4, end, line]
    mask = is_assistant(torch.tensor([user + answer + user]), MARKS)[0].tolist()
    assert mask == [False] * 7 + [False] * 4 + [True] * 3 + [False] + [False] * 7


def test_texts_with_a_known_run_are_dropped() -> None:
    """Evaluation prompts in the training text."""
    tokens = random_tokens(4, 40, seed=6)
    prompt = random_tokens(12, seed=7).tolist()
    tokens[1, 5:13] = torch.tensor(prompt[2:10])
    tokens[2, 5:12] = torch.tensor(prompt[2:9])  # one short of the window
    assert drop_overlaps(tokens, [prompt, [1, 2]], window=8).tolist() == [True, False, True, True]


def test_draft_ids_are_the_heaviest() -> None:
    """A draft vocabulary chosen from tokens that do not count."""
    tokens = torch.tensor([[5, 5, 5, 7], [7, 2, 2, 9]])
    weight = torch.tensor([[0.0, 0.0, 0.1, 1.0], [1.0, 1.0, 1.0, 0.5]])
    assert frequent_tokens(tokens, weight, 3, 20).tolist() == [2, 7, 9]
