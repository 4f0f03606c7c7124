"""Servers that several modules share; each starts once, when the first test asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from tests.triton_model_repo.serving import Server, serve

SPECULATIVE = {"method": "layer_skip", "num_speculative_tokens": 3}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def cost_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps(cheap_draft_costs()))
    return path


@pytest.fixture(scope="session")
def llm_server(
    tiny_folder: Path, cost_table: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The model ``llm`` with 8 slots and a queue of 64."""
    log = tmp_path_factory.mktemp("llm") / "log"
    with serve(
        tiny_folder, log, "--layout", "llm", "--max-queue-size", "64",
        "--cost-table", str(cost_table), "--speculative-config", json.dumps(SPECULATIVE),
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def ensemble_server(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The five models with adaptive off, so that seeds repeat tokens."""
    log = tmp_path_factory.mktemp("ensemble") / "log"
    with serve(
        tiny_folder, log, "--av-mode", "fixed", "--speculative-config", json.dumps(SPECULATIVE)
    ) as server:
        yield server
