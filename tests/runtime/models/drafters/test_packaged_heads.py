"""The heads that ship for SmolLM2: found, fitting, and drafting what the target would say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trtllm_av.runtime.errors import MissingDependencyError
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.checkpoint import LoadedModel, load_checkpoint
from trtllm_av.runtime.models.drafters import create_drafter, dspark, eagle
from trtllm_av.runtime.models.drafters.base import DraftContext, Drafter
from trtllm_av.runtime.models.drafters.dspark_head import load_dspark_head
from trtllm_av.runtime.models.drafters.eagle_head import load_head
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig

WEIGHTS = Path(eagle.__file__).with_name("weights")
TEXT = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    "The capital of France is Paris. It is one of the most popular tourist destinations in the "
    "world, and it is known for its beautiful architecture, its museums, and its food.<|im_end|>"
)
#: Positions that are measured: the answer, without its first words.
FIRST, DEPTH = 20, 4


def test_every_file_is_whole_and_named() -> None:
    """A registered file that is missing, too large to ship, or of another target than it is filed under;
    a file without its model card."""
    for fingerprint, name in dspark.PACKAGED_HEADS.items():
        head, ids = load_dspark_head(WEIGHTS / name)
        assert head.config.target_fingerprint == fingerprint
        assert len(ids) == 16384 and head.config.block_size == 7
    for fingerprint, name in eagle.PACKAGED_HEADS.items():
        assert load_head(WEIGHTS / name)[0].config.target_fingerprint == fingerprint
    files = sorted(WEIGHTS.glob("*.safetensors"))
    named = {*eagle.PACKAGED_HEADS.values(), *dspark.PACKAGED_HEADS.values()}
    assert {file.name for file in files} == named
    for file in files:
        assert file.stat().st_size <= 12_000_000, file.name
        assert file.with_suffix(".md").is_file()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    try:
        return load_checkpoint("smollm2")
    except MissingDependencyError as error:
        pytest.skip(str(error))


def drafts_along_text(
    loaded: LoadedModel, method: str
) -> tuple[Drafter, Tensor, list[list[Tensor]]]:
    """A drafter, the target's p [S, V_d], and q [V_d] of every depth behind every measured position; with
    a confidence head its logit is appended to q."""
    assert loaded.tokenizer is not None
    ids = torch.tensor([loaded.tokenizer.encode(TEXT, add_special_tokens=False)])
    count = ids.shape[1]
    cache = KVCache(loaded.config, 1, count + DEPTH)
    output = loaded.model(PackedBatch.from_lists(ids.tolist(), [0], [0]), cache)
    drafter = create_drafter(SpeculativeConfig(method=method), loaded, cache)
    assert drafter.draft_to_target is not None
    slot = torch.tensor([0])
    drafter.observe(slot, slot, torch.tensor([0, count]), output.hidden)
    rows = []
    for row in range(FIRST, count - DEPTH):
        logits = drafter.start(DraftContext(slot, torch.tensor([row + 2]), ids))
        laws = []
        for depth in range(DEPTH):
            if depth:
                logits = drafter.step(depth, ids[:, row + 1 + depth])
            law = logits[0].softmax(-1)
            if drafter.has_confidence_head:
                law = torch.cat([law, drafter.confidence_logit()])
            laws.append(law)
        rows.append(laws)
    return drafter, output.logits.softmax(-1)[:, drafter.draft_to_target], rows


@pytest.mark.slow
@pytest.mark.parametrize(("method", "least"), [("eagle", 0.5), ("dspark", 0.4)])
def test_drafts_resemble_the_target(loaded: LoadedModel, method: str, least: float) -> None:
    """Weights that load and draft noise: another file, a map in another order, a changed definition; a
    confidence that knows nothing."""
    drafter, p, rows = drafts_along_text(loaded, method)
    overlap = torch.tensor(
        [
            [
                float(torch.minimum(p[FIRST + i + 1 + k], q[: p.shape[1]]).sum())
                for k, q in enumerate(laws)
            ]
            for i, laws in enumerate(rows)
        ]
    )
    assert overlap.mean(0).min() > least
    assert drafter.has_confidence_head == (method == "dspark")
    if drafter.has_confidence_head:
        confidence = torch.tensor([[float(q[-1]) for q in laws] for laws in rows]).sigmoid()
        assert (confidence.mean() - overlap.mean()).abs() < 0.1
        pair = torch.stack([confidence.flatten(), overlap.flatten()])
        assert torch.corrcoef(pair)[0, 1] > 0.5
