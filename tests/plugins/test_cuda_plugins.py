"""The plugins on CUDA, both kinds of tree kernels and the control block. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.plugins import plugin_checks
from trtllm_av.plugins import plugin_runtime
from trtllm_av.plugins.control_block import process_block

pytestmark = pytest.mark.cuda


def test_trees_are_trimmed_as_defined() -> None:
    """Guards against: a wrong path, pool, tie, floor or total; random and adversarial trees."""
    for seed in range(300):
        plugin_checks.check_trim_tree(seed, 1 + seed % 9, 1 + seed % 37, 1 + seed % 6)
    for seed in range(20):
        drafts = 1 + seed % 9
        plugin_checks.check_trim_tree(5 * seed, 1 + seed % 70, drafts, drafts)
    plugin_checks.check_trim_tree(7003, 512, 63, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_levels_are_scored_as_defined(dtype: torch.dtype) -> None:
    """Guards against: children with another rank's logit, other requests' rows, padded columns."""
    for seed in range(20):
        width = (130, 4099, 32003)[seed % 3]
        plugin_checks.check_score_level(seed, dtype, 1 + seed % 5, width)


def test_verify_all_keeps_every_length() -> None:
    """Guards against: a plugin that trims although the runtime has said that it must not."""
    inputs = plugin_checks.tree_inputs(5, 12, 3, 3)
    inputs[1][0] = -3
    block = process_block()
    block.verify_all(round=block.progress().round)
    (trimmed, trace), _ = plugin_runtime.run("TrimTree", *inputs)
    assert torch.equal(trimmed, inputs[1])
    assert trace[:, 2].tolist() == [-1.0] * 5
    assert torch.equal(trace[:, 8:], inputs[0])
    assert block.progress().version == -1


def test_scores_and_trims_of_the_engine_plugins() -> None:
    """Guards against: arguments in another order than the kernels take them."""
    for seed in range(6):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        inputs, vocab_size = plugin_checks.score_inputs(seed, dtype, 3, 2, 5003, masked=seed > 2)
        outputs, _ = plugin_runtime.run("ScoreDrafts", *inputs, vocab_size=vocab_size)
        plugin_checks.check_scores(inputs, vocab_size, outputs)
        inputs = plugin_checks.trim_inputs(seed, 1 + 13 * seed, 1 + 3 * seed)
        plugin_checks.check_trim(inputs, plugin_runtime.run("TrimDrafts", *inputs)[0])
