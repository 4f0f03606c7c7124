"""A drafter's name on the command line to what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trtllm_av.builder.draft_block import BlockSource, DSparkSource
from trtllm_av.builder.draft_decoder import LAYER_SKIP, CheckpointSource, LayerSkipSource
from trtllm_av.builder.draft_head import HeadSource, packaged_head
from trtllm_av.builder.draft_source import DraftSource
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles

PACKAGED_HEAD = "smollm2-head"


def find_drafter(
    name: str | None, target: CheckpointFiles, target_tokenizer: Any, num_positions: int
) -> DraftSource:
    """The drafter called ``name``: ``smollm2-head``, ``layer_skip``, a head's file, or the folder of a
    second checkpoint; None takes the head that ships for ``target``, else ``layer_skip``.

    Raises UsageError for a head that does not ship for this target, for a family that is not exported and
    for more positions than a block head has, CheckpointError for files that cannot be read or belong to
    another target.
    """
    if name == LAYER_SKIP:
        return LayerSkipSource(target)
    if name is None or name == PACKAGED_HEAD:
        path = packaged_head(target)
        if path is not None:
            return HeadSource.find(path, target)
        if name is None:
            return LayerSkipSource(target)
        raise UsageError(
            f"--speculative_model {PACKAGED_HEAD}: it was trained for SmolLM2-135M-Instruct, not for "
            "this model; give a head's file, a draft checkpoint, or layer_skip"
        )
    path = Path(name)
    if name and path.is_dir():
        return CheckpointSource.find(path, target, target_tokenizer)
    families = _families(path)
    if "mtp_head" in families:
        raise UsageError(
            f"--speculative_model {name!r} is an mtp head, which is not exported; serve it from the "
            "checkpoint (method 'mtp'), or give another head, a draft checkpoint or layer_skip"
        )
    if "dspark_head" in families:
        return DSparkSource.find_block(path, target, num_positions)
    if "block_head" in families:
        return BlockSource.find_block(path, target, num_positions)
    return HeadSource.find(path, target)


def _families(path: Path) -> set[str]:
    """Keys of a head file's metadata; () for what is no such file, which loading it says better."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return set(file.metadata() or {})
    except (OSError, SafetensorError):
        return set()
