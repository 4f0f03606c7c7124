"""Answers of the target to evaluation prompts, at temperature 1: the text that acceptance is measured on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtllm_av.runtime.errors import UsageError

from .decode import Decoder
from .generate import chat_marks, forced_rows, opening
from .prompts import SYSTEM_TURNS
from .source import Source
from .target import FrozenTarget


@dataclass(slots=True, frozen=True)
class Prompt:
    """One request of a data set."""

    data_set: str
    text: str


@dataclass(slots=True)
class Answers:
    """``tokens`` [B, S] int64, prompts included; ``is_answer`` [B, S] bool: the answer up to the mark that
    closes it; ``prompt_of`` [B] int64: index of each row's prompt."""

    tokens: Tensor
    is_answer: Tensor
    prompt_of: Tensor


def read_prompts(folder: Path) -> list[Prompt]:
    """The rows of every JSON-lines file in ``folder``: fields ``dataset`` and ``prompt``."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UsageError(f"--prompts {folder} holds no .jsonl file; name a folder that does")
    lines = [line for file in files for line in file.read_text().splitlines() if line]
    rows = [json.loads(line) for line in lines]
    return [Prompt(row["dataset"], row["prompt"]) for row in rows]


def answer_prompts(
    source: Source,
    target: FrozenTarget,
    prompts: list[Prompt],
    *,
    samples: int,
    answer_tokens: int,
    seed: int,
) -> Answers:
    """Let ``target`` answer every prompt ``samples`` times.

    An answer is cut off ``answer_tokens`` behind the longest prompt, so behind shorter ones later.
    """
    marks = chat_marks(source)
    encoded = [source.encode(opening(SYSTEM_TURNS[0], prompt.text, True)) for prompt in prompts]
    capacity = max(len(ids) for ids in encoded) + answer_tokens
    batch = len(encoded) * samples
    decoder = Decoder(
        target, marks, batch=batch, capacity=capacity, user_temperature=1.0, seed=seed
    )
    forced, lens = forced_rows(encoded, capacity, batch)
    tokens = decoder.generate(forced).cpu()
    position = torch.arange(capacity)
    is_after = position >= lens[:, None]
    is_end = (tokens == marks.turn_end) & is_after
    ends_before = is_end.int().cumsum(1) - is_end.int()
    return Answers(tokens, is_after & (ends_before == 0), torch.arange(batch) % len(encoded))
