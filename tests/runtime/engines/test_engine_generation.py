"""Generation from an engine directory: target, draft step, score and trim, all from the exported files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builder.tiny_target import save_target
from tests.runtime.engines.tiny_engine import MAX_SEQ_LEN, NUM_SLOTS, K, build_tiny_engine
from tests.runtime.models.drafters.tiny_heads import FAMILIES, draft_ids
from trtllm_av.builder.drafters import find_drafter
from trtllm_av.builder.verify import TOLERANCE
from trtllm_av.plugins import torch_ops
from trtllm_av.runtime import cli
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engines.plan_blocks import PlanDFlashDrafter, PlanDSparkDrafter
from trtllm_av.runtime.engines.plan_drafters import (
    PlanDraftModelDrafter,
    PlanHeadDrafter,
    PlanLayerSkipDrafter,
)
from trtllm_av.runtime.engines.plan_executor import PlanExecutor
from trtllm_av.runtime.engines.plan_operations import PlanOperations
from trtllm_av.runtime.errors import BuildError, CheckpointError, UsageError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.checkpoint import CheckpointFiles, load_checkpoint
from trtllm_av.runtime.models.drafters.base import DraftContext
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig

pytest.importorskip("onnx", reason="needs the `onnx` extra")
pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")

NUM_TOKENS = 32
TEXTS = ["The sea is", "Two plus two", "Once upon a time", "def add(a, b):", "A list of colours:"]
#: Drafting costs nothing and verifying little: rounds draft deep and trim.
COSTS = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [4, 1.1], [8, 1.6], [16, 4.0]],
    "draft_ms_by_requests": [[1, 0.01], [NUM_SLOTS, 0.02]],
}


def generate(llm: LLM, prompts: Sequence[str], **params: Any) -> list[list[int]]:
    options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params
    outputs = llm.generate(list(prompts), SamplingParams(**options))
    return [output.outputs[0].token_ids for output in outputs]


def assert_same_greedy_tokens(engine: Path, target: Path | str, drafter: type) -> None:
    """Without drafts, and with drafts that the engine's own plan really trimmed."""
    expected = generate(LLM(str(target), max_batch_size=NUM_SLOTS, max_seq_len=MAX_SEQ_LEN), TEXTS)
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(TEXTS)
    assert generate(LLM(engine), TEXTS) == expected
    adaptive = LLM(engine, SpeculativeConfig(), cost_table=COSTS)
    parts = adaptive.engine
    assert isinstance(parts.executor, PlanExecutor) and isinstance(parts.drafter, drafter)
    assert isinstance(parts.round.operations, PlanOperations)
    assert parts.num_speculative_tokens == K
    assert generate(adaptive, TEXTS) == expected
    report = adaptive.report()
    assert report.drafted > 0
    # A random confidence head may keep everything; an estimator at its start never does.
    assert report.verified < report.drafted or adaptive.engine.drafter.has_confidence_head


def test_greedy_tokens_are_the_torch_executors(tiny_engine: Path, tiny_target: Path) -> None:
    """Guards against: a drafter, score or trim inside the engine that the runtime misreads, and slots that
    are taken over with their last owner's tokens (five prompts, four slots)."""
    assert_same_greedy_tokens(tiny_engine, tiny_target, PlanHeadDrafter)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["layer_skip", "draft_model"])
def test_greedy_tokens_with_other_drafters(tiny_target: Path, tmp_path: Path, method: str) -> None:
    """Guards against: a draft step that writes into other caches than the target reads, or lags behind."""
    target = tiny_target
    is_second = method == "draft_model"
    drafter = save_target(tmp_path / "draft", seed=5) if is_second else "layer_skip"
    engine = build_tiny_engine(target, tmp_path / "engine", drafter)
    family = PlanDraftModelDrafter if is_second else PlanLayerSkipDrafter
    assert_same_greedy_tokens(engine, target, family)
    # A wrong draft costs acceptance, never a token.
    fixed: dict[str, Any] = {"num_speculative_tokens": K, "av_mode": "fixed"}
    theirs = fixed | {"method": method, "model": str(drafter) if is_second else None}
    sizes = {"max_batch_size": NUM_SLOTS, "max_seq_len": MAX_SEQ_LEN}
    ours, expected = LLM(engine, fixed), LLM(str(target), theirs, **sizes)
    assert generate(ours, TEXTS) == generate(expected, TEXTS)
    mine, other = ours.report(), expected.report()
    assert (mine.drafted, mine.accepted) == (other.drafted, other.accepted)
    assert mine.accepted > 0 or is_second


@pytest.mark.slow
def test_greedy_tokens_of_smollm2(tmp_path: Path) -> None:
    """Guards against: differences that a random model of two layers is too small to show."""
    engine = build_tiny_engine(smollm2.NAME, tmp_path / "engine", None)
    assert_same_greedy_tokens(engine, smollm2.NAME, PlanHeadDrafter)


def assert_same_drafts(engine: Path, target: Path, speculative: dict[str, Any]) -> None:
    """Logits, scores and a head's confidence of a round of drafts, for given states and tokens.

    Greedy tokens would not show a difference, only the acceptance and the trim of every request.
    """
    sizes = {"max_batch_size": NUM_SLOTS, "max_seq_len": MAX_SEQ_LEN}
    engines = [
        LLM(str(target), speculative | {"num_speculative_tokens": K}, cost_table=COSTS, **sizes),
        LLM(engine, {}, cost_table=COSTS),
    ]
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(261, (NUM_SLOTS, MAX_SEQ_LEN), generator=generator)
    hidden = torch.randn(9 + 30, 32, generator=generator)
    slots, lens = torch.tensor([2, 0]), torch.tensor([10, 31])  # the second catches up in chunks
    found: list[list[torch.Tensor]] = []
    confidences: list[torch.Tensor] = []
    for llm in engines:
        drafter, operations = llm.engine.drafter, llm.engine.round.operations
        assert drafter is not None
        drafter.observe(slots, torch.zeros(2).long(), torch.tensor([0, 9, 39]), hidden)
        results: list[torch.Tensor] = []
        for i in range(K):
            if i == 0:
                logits = drafter.start(DraftContext(slots, lens, history))
            else:
                logits = drafter.step(i, torch.tensor([7 * i, 3]))
            results.append(logits.clone())
            if drafter.has_confidence_head:
                confidences.append(drafter.confidence_logit())
            results += operations.score_drafts(
                logits[:, None],
                torch.tensor([0.0, 1.3]),
                torch.tensor([0.5, -0.2, 0.1, 0.3]),
                torch.tensor([i]).int(),
                vocab_size=logits.shape[1],
            )
        found.append(results)
    for expected, result in zip(*found, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    half = len(confidences) // 2
    for expected, result in zip(confidences[:half], confidences[half:], strict=True):
        # The module's log-odds of a nearly certain token cancel in float32, the exported ones do not.
        torch.testing.assert_close(result, expected, atol=0.1, rtol=0)


def test_drafts_and_scores_are_the_torch_modules(tiny_engine: Path, tiny_target: Path) -> None:
    """Guards against: an engine whose drafts or confidences differ from the checkpoint's."""
    head = tiny_engine.with_name("head")
    assert_same_drafts(tiny_engine, tiny_target, {"method": "eagle", "model": str(head)})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_drafters(tiny_target: Path, tmp_path: Path, method: str) -> None:
    """Guards against: masks of other positions, a carried state of another row or block, and confidences
    that the exporter's arithmetic changes."""
    target = tiny_target
    family = next(one for one in FAMILIES if one.name == method)
    head, loaded = tmp_path / "head", load_checkpoint(target)
    family.save(head, family.head(loaded), draft_ids(loaded.config.vocab_size))
    engine = build_tiny_engine(target, tmp_path / "engine", head)
    drafter = PlanDSparkDrafter if method == "dspark" else PlanDFlashDrafter
    assert_same_greedy_tokens(engine, target, drafter)
    assert_same_drafts(engine, target, {"method": method, "model": str(head)})
    source = find_drafter(str(head), CheckpointFiles.find(target), loaded.tokenizer, K)
    difference, pairs = source.check(engine, loaded.model, K)
    assert difference < TOLERANCE / 5 and pairs
    other = target.with_name("another head")
    changed = family.head(loaded)
    changed.layer.final_norm.mul_(1.1)
    family.save(other, changed, draft_ids(loaded.config.vocab_size))
    wrong = find_drafter(str(other), CheckpointFiles.find(target), loaded.tokenizer, K)
    with pytest.raises(BuildError, match="differ from the torch module's"):
        wrong.check(engine, loaded.model, K)
    with pytest.raises(UsageError, match=r"--max_draft_len 5: the head .* blocks of at most 4"):
        find_drafter(str(head), CheckpointFiles.find(target), loaded.tokenizer, 5)


def test_fewer_drafts_than_compiled(tiny_engine: Path) -> None:
    """Guards against: an engine that serves only the K it was built for, or packs rows by that K."""
    expected = generate(LLM(tiny_engine), TEXTS, max_tokens=8)
    llm = LLM(tiny_engine, {"num_speculative_tokens": 2}, cost_table=COSTS)
    assert llm.engine.num_speculative_tokens == 2
    assert generate(llm, TEXTS, max_tokens=8) == expected
    assert llm.report().drafted > 0


@pytest.mark.parametrize(
    ("speculative", "options", "message"),
    [
        ({"num_speculative_tokens": 4}, {}, "num_speculative_tokens=4 exceeds max_draft_len=3"),
        ({"method": "layer_skip"}, {}, "method='layer_skip', but the engine .* with 'eagle'"),
        ({"method": "eagle", "model": "head"}, {}, "model='head', but the engine"),
        ({"skip_layers": [0]}, {}, r"skip_layers=\[0\], but the engine"),
        ({}, {"max_batch_size": 5}, "max_batch_size=5 exceeds 4"),
        ({}, {"max_seq_len": 97}, "max_seq_len=97 exceeds 96"),
        ({}, {"prefill_chunk": 41}, "prefill_chunk=41 exceeds 40"),
        ({}, {"dtype": "bfloat16"}, "dtype='bfloat16', but the engine .* built with float32"),
    ],
)
def test_what_an_engine_was_not_built_for_is_refused(
    tiny_engine: Path, speculative: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """Guards against: a setting that is dropped silently, or a write behind the compiled cache."""
    with pytest.raises(UsageError, match=message) as error:
        LLM(tiny_engine, speculative, cost_table=COSTS, **options)
    assert "\n" not in str(error.value)


def test_damaged_engines_do_not_load(tiny_engine: Path, tmp_path: Path) -> None:
    """Guards against: a file of another build that is run as if it belonged to this engine."""
    copy = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    data = (copy / "trim.onnx").read_bytes()
    (copy / "trim.onnx").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"trim.onnx.* is not the file that was built"):
        LLM(copy, {}, cost_table=COSTS)


def test_operations_fall_back_for_logits_that_rules_widened(tiny_engine: Path) -> None:
    """Guards against: a plan of the reduced vocabulary that is fed with logits of the whole one."""
    llm = LLM(tiny_engine, {}, cost_table=COSTS)
    operations = llm.engine.round.operations
    logits = torch.randn(2, 1, 261, generator=torch.Generator().manual_seed(0))
    arguments = (torch.ones(2), torch.tensor([0.5, -0.2, 0.1, 0.3]), torch.tensor([1]).int())
    found = operations.score_drafts(logits, *arguments, vocab_size=261)
    expected = torch_ops.score_drafts(logits, *arguments, vocab_size=261)
    assert torch.equal(found[1], expected[1])


def test_trim_of_fewer_positions_than_compiled(tiny_engine: Path) -> None:
    """Guards against: positions that this runtime does not draft and the engine's plan admits."""
    operations = LLM(tiny_engine, {}, cost_table=COSTS).engine.round.operations
    arguments = (
        torch.tensor([[0.9, 0.8], [0.7, 0.6]]),
        torch.tensor([3, 2], dtype=torch.int32),  # as long as the engine's drafts
        torch.tensor([1, 1], dtype=torch.int32),
        torch.tensor([0, 0], dtype=torch.int32),
        torch.tensor([9], dtype=torch.int32),
    )
    survival, verify_lens, cu_seqlens = operations.trim_drafts(*arguments)
    expected = torch_ops.trim_drafts(*arguments)
    for ours, theirs in zip((survival, verify_lens, cu_seqlens), expected, strict=True):
        assert torch.equal(ours, theirs)
    base = torch.ones(2, dtype=torch.int32)
    packed = operations.pack_drafts(base, verify_lens, stride=3, capacity=6)
    assert packed.tolist() == [0, 1, 2, 3, 4, 5]
    other = torch.tensor([1, 0], dtype=torch.int32)  # not what the plan has just trimmed
    assert operations.pack_drafts(base, other, stride=3, capacity=3).tolist() == [0, 1, 3]


def test_command_runs_an_engine(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against: an engine directory that the command takes for a checkpoint, and more drafts than it
    was compiled for."""

    def run(*arguments: str) -> tuple[int, str, str]:
        common = ["trtllm-av-run", f"--model={tiny_engine}", "--raw", "--max-tokens=8"]
        monkeypatch.setattr(sys, "argv", [*common, *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    off = '--speculative-config={"av_mode": "fixed"}'
    code, out, _ = run("--prompt=abc", off, "--json")
    assert code == 0 and len(json.loads(out)["outputs"][0]["token_ids"]) == 8
    code, _, err = run("--prompt=abc", '--speculative-config={"num_speculative_tokens": 4}')
    assert code == 2 and err.count("\n") == 1 and "exceeds max_draft_len=3 of the engine" in err
    code, _, err = run("--compare")
    assert code == 2 and err.count("\n") == 1 and "is an engine; give its checkpoint" in err
