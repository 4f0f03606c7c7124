"""The self-test's checks on doubles, right ones and broken ones; the real thing is ``pytest -m trtllm``."""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.builder.eagle_double import Control, EagleDouble
from tests.builder.executor_double import ExecutorDouble, fill_bindings
from tests.builder.toy_models import CHAIN, TREE, greedy
from tests.builder.trtllm_double import TrtllmDouble
from trtllm_av.builder.trtllm import selftest
from trtllm_av.builder.trtllm.selftest import PROMPTS, Outcome, check_engine, run_selftest
from trtllm_av.builder.trtllm.tiny_checkpoint import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    WRONG_SHARE,
    next_tokens,
    write_tiny_checkpoint,
)
from trtllm_av.plugins.control_block import SIZE, ControlBlock
from trtllm_av.runtime.engines import trtllm
from trtllm_av.runtime.engines.trtllm import TrtllmExecutor, TrtllmOptions

LENGTH = 256
EXPECTED = [greedy(prompt, LENGTH) for prompt in PROMPTS]


def outcomes_on(
    double: Any,
    choices: Sequence[Sequence[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Outcome]:
    """Outcomes on engines that ``double(control)`` makes."""
    block = ControlBlock(mmap.mmap(-1, SIZE))
    monkeypatch.setattr(trtllm, "register_plugins", lambda form, path: block)
    model = {
        "architecture": "EagleForCausalLM",
        "num_eagle_layers": max(map(len, choices)),
        "max_draft_len": len(choices),
        "max_non_leaves_per_layer": 4,
        "adaptive_verification": {"plugin": True, "min_draft_len": 1, "trace": True},
        "adaptive_verification_version": "1",
    }
    config = {"version": "1.2.1", "pretrained_config": model, "build_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    package = TrtllmDouble()
    package.install(monkeypatch)
    bindings = package.modules["tensorrt_llm.bindings.executor"]

    def start(*, is_adaptive: bool, observe: Any = None) -> TrtllmExecutor:
        fill_bindings(bindings, ExecutorDouble(double(Control(total_multiple=8, block=block))))
        options = TrtllmOptions(eagle_choices=choices, is_adaptive=is_adaptive)
        return TrtllmExecutor(tmp_path, options, observe=observe)

    return list(check_engine("double", start, block, EXPECTED, max_tokens=LENGTH))


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(CHAIN, id="chain"),
        pytest.param(TREE, id="tree", marks=pytest.mark.slow),
    ],
)
def test_all_checks_pass_on_a_right_engine(
    choices: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a self-test that fails on machines where everything works."""
    outcomes = outcomes_on(lambda c: EagleDouble(choices, c), choices, tmp_path, monkeypatch)
    assert [o.name for o in outcomes if not o.is_passed] == [], outcomes
    assert len(outcomes) == 8


class Disobedient(EagleDouble):
    """Trims nothing, whatever the control block says."""

    def _trim_tree(self, fields: dict[str, int]) -> Any:
        compute = super()._trim_tree(fields)

        def keep_all(features: Any, lens: Any, *others: Any) -> list[Any]:
            _, trace = compute(features, lens, *others)
            trace[:, 7] = lens
            return [lens, trace]

        return keep_all


class Shrinking(EagleDouble):
    """Loses a node of the template with every step."""

    def _trim_tree(self, fields: dict[str, int]) -> Any:
        compute = super()._trim_tree(fields)

        def shrink(features: Any, lens: Any, *others: Any) -> list[Any]:
            return compute(features, np.maximum(lens - self.control.round // 40, 1), *others)

        return shrink


@pytest.mark.slow
@pytest.mark.parametrize(
    ("double", "failing"),
    [
        (
            Disobedient,
            [
                "fewer drafts are verified",
                "the control block is obeyed",
                "the template stays whole",  # too few steps to tell
            ],
        ),
        (Shrinking, ["the template stays whole"]),
    ],
)
def test_checks_fail_on_broken_engines(
    double: type[EagleDouble],
    failing: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a self-test that passes whatever the engine does."""
    outcomes = outcomes_on(lambda c: double(CHAIN, c), CHAIN, tmp_path, monkeypatch)
    failed = [o.name.partition(": ")[2] for o in outcomes if not o.is_passed]
    assert failed == failing


def test_one_failure_does_not_hide_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a report that ends at the first thing that is missing on a machine."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(selftest, "compare_installed", lambda: [])
    monkeypatch.setattr(selftest, "_check_choices", fail)
    seen: list[Outcome] = []
    outcomes = run_selftest(seen.append)
    assert [(o.name, o.is_passed) for o in outcomes] == [
        ("interface", True),
        ("chain", False),
        ("tree", False),
    ]
    assert seen == outcomes
    assert outcomes[1].detail == "RuntimeError: no such device"


def test_missing_package_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against pages of traceback on a machine that simply has no TensorRT-LLM."""
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    outcomes = run_selftest()
    assert [outcome.is_passed for outcome in outcomes] == [False] * 3
    assert all("cannot be imported" in outcome.detail for outcome in outcomes)
    assert capsys.readouterr().err == ""


class Parameter:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


def test_tiny_checkpoint_drafts_right_most_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a self-test whose drafts are never accepted, and which so shows nothing."""
    double = TrtllmDouble()
    double.install(monkeypatch)
    vocabulary, hidden = 512, HIDDEN_SIZE
    shapes = {
        "transformer.vocab_embedding.weight": (VOCAB_SIZE, hidden),
        "transformer.layers.0.input_layernorm.weight": (hidden,),
        "transformer.layers.0.mlp.fc.weight": (1024, hidden),
        "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        "eagle_nets.0.drafter.vocab_embedding.weight": (VOCAB_SIZE, hidden),
        "eagle_nets.0.drafter.fc.weight": (hidden, 2 * hidden),
        "eagle_nets.0.lm_head.weight": (vocabulary, hidden),
    }
    model = double.modules["tensorrt_llm.models.eagle.model"]
    given: list[Any] = []

    def make(config: Any) -> Any:
        given.append(config)
        names = [(name, Parameter(*shape)) for name, shape in shapes.items()]
        return type("Model", (), {"named_parameters": lambda self: names})()

    monkeypatch.setattr(model, "EagleForCausalLM", make)
    configuration = double.modules["tensorrt_llm.models.eagle.config"].EagleConfig
    monkeypatch.setattr(configuration, "from_dict", lambda config: config)
    folder = write_tiny_checkpoint(tmp_path, num_levels=4, max_draft_len=4, max_non_leaves=1)
    weights = {k: v.float() for k, v in load_file(folder / "rank0.safetensors").items()}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    assert given[0] == json.loads((folder / "config.json").read_text())
    assert not weights["transformer.layers.0.mlp.fc.weight"].any()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    hidden_states = norm(weights["transformer.vocab_embedding.weight"])
    target = (hidden_states @ weights["lm_head.weight"].T).argmax(-1)
    assert torch.equal(target, next_tokens())
    embedded = weights["eagle_nets.0.drafter.vocab_embedding.weight"]
    joined = torch.cat([embedded, torch.randn_like(embedded)], -1)
    drafted = norm(joined @ weights["eagle_nets.0.drafter.fc.weight"].T)
    draft = (drafted @ weights["eagle_nets.0.lm_head.weight"].T).argmax(-1)
    wrong = (draft != target).float().mean().item()
    assert wrong == pytest.approx(WRONG_SHARE, abs=0.02)
