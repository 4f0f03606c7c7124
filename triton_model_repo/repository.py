"""A model repository in a folder of its own, from the templates in ``models/``.

Invariants: the templates are never written to; the folder holds the models of one layout and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trtllm_av.triton_model_repo.template import fill

Layout = Literal["ensemble", "llm"]

TEMPLATES = Path(__file__).parent / "models"
LAYOUTS: dict[Layout, tuple[str, ...]] = {
    "ensemble": (
        "preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls",
    ),
    "llm": ("llm",),
}  # fmt: skip
# Placeholders that Triton itself reads, so that they cannot stay unfilled.
DEFAULTS = {
    "triton_backend": "python",
    "triton_max_batch_size": "64",
    "decoupled_mode": "true",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "logits_datatype": "TYPE_FP32",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
}


def write_repository(folder: Path, layout: Layout, values: Mapping[str, str]) -> list[str]:
    """Fill the models of ``layout`` into ``folder`` and return their names."""
    for name in LAYOUTS[layout]:
        shutil.copytree(
            TEMPLATES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
        config = folder / name / "config.pbtxt"
        config.write_text(
            fill(config.read_text(encoding="utf-8"), {**DEFAULTS, **values}), encoding="utf-8"
        )
    return list(LAYOUTS[layout])
