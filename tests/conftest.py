"""Markers of all tests, and what is skipped where its hardware or package is missing.

Invariants: a marker names a need, never a wish: a test without one runs on any machine that has the
`test` extra, in a few seconds.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

MARKERS = {
    "slow": "takes many seconds; run by `scripts/test --all`",
    "cuda": "needs a CUDA device",
    "triton": "needs a Triton server (the `triton` extra)",
    "trtllm": "needs TensorRT-LLM 1.0-1.2 (the `tensorrt-llm` extra)",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def _is_met(marker: str) -> bool:
    if marker == "cuda":
        import torch  # not at the top: collecting the other tests does not need it

        return torch.cuda.is_available()
    module = {"triton": "pytriton", "trtllm": "tensorrt_llm"}.get(marker)
    return module is None or find_spec(module) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    used = {marker.name for item in items for marker in item.iter_markers()} & MARKERS.keys()
    unmet = {marker for marker in used if not _is_met(marker)}
    for item in items:
        for marker in sorted(unmet & {marker.name for marker in item.iter_markers()}):
            item.add_marker(pytest.mark.skip(reason=MARKERS[marker]))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test: it sees nothing of the user's and leaves nothing there."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRTLLM_AV_CACHE", str(folder))
    return folder
