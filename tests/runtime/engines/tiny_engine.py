"""How the tests of this folder build engines."""

from __future__ import annotations

from pathlib import Path

from trtllm_av.builder.build import build_engine
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.progress import BuildProgress

K, NUM_SLOTS, MAX_SEQ_LEN, MAX_TOKENS = 3, 4, 96, 40


def tiny_config(target: Path | str, folder: Path, drafter: Path | str | None) -> BuildConfig:
    return BuildConfig(
        model_dir=str(target),
        output_dir=folder,
        speculative_model=None if drafter is None else str(drafter),
        verify=False,
        max_draft_len=K,
        max_batch_size=NUM_SLOTS,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=MAX_TOKENS,
    )


def build_tiny_engine(target: Path | str, folder: Path, drafter: Path | str | None) -> Path:
    """Export without the check, which has tests of its own."""
    build_engine(tiny_config(target, folder, drafter), BuildProgress(is_quiet=True))
    return folder
