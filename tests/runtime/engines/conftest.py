"""One tiny engine with a random head for all tests of this folder: exporting takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builder.tiny_target import save_random_head, save_target
from tests.runtime.engines.tiny_engine import build_tiny_engine


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of ``tiny_engine``."""
    return save_target(tmp_path_factory.mktemp("engines") / "target")


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: Path) -> Path:
    """An engine in float32 for onnxruntime; its head is the file ``head`` beside it. Not to be changed."""
    pytest.importorskip("onnx", reason="needs the `onnx` extra")
    pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")
    head = save_random_head(tiny_target.with_name("head"), tiny_target)
    return build_tiny_engine(tiny_target, tiny_target.with_name("engine"), head)
