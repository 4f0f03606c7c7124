"""Training text: forced openings, then the target's own words, written in batches to one file.

The file is a safetensors with ``tokens`` [N, S] int32 and ``prompt_lens`` [N] int32 (positions before that
were forced).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtllm_av.runtime.errors import UsageError

from .decode import ChatMarks, Decoder
from .prompts import RequestSource
from .source import Source
from .target import FrozenTarget
from .text import is_assistant


def chat_marks(source: Source) -> ChatMarks:
    """The ids that the ChatML template opens and closes a turn with."""
    start, *name, end = source.encode("<|im_start|>assistant<|im_end|>")
    return ChatMarks(start, end, name[0], len(name))


def opening(system: str | None, user: str, is_complete: bool) -> str:
    """The chat text up to where the target takes over."""
    text = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    text += f"<|im_start|>user\n{user}"
    return text + "<|im_end|>\n<|im_start|>assistant\n" if is_complete else text


def forced_rows(
    prompts: list[list[int]], capacity: int, batch: int | None = None
) -> tuple[Tensor, Tensor]:
    """(forced [B, capacity] int64 with −1 behind each prompt, prompt_lens [B]); pads the batch by copies."""
    longest = max(len(prompt) for prompt in prompts)
    if longest >= capacity:
        raise UsageError(
            f"--length {capacity} leaves no room behind a prompt of {longest} tokens; raise it"
        )
    rows = [prompts[index % len(prompts)] for index in range(batch or len(prompts))]
    forced = torch.full((len(rows), capacity), -1, dtype=torch.int64)
    for row, prompt in enumerate(rows):
        forced[row, : len(prompt)] = torch.tensor(prompt)
    return forced, torch.tensor([len(row) for row in rows])


def generate_text(
    target: FrozenTarget,
    source: Source,
    path: Path,
    *,
    num_tokens: int,
    batch: int,
    length: int,
    seed: int,
) -> tuple[int, int, float]:
    """Write at least ``num_tokens`` tokens of answers, sampled at temperature 1, to ``path``.

    Returns how many there are, how many were sampled with the user turns around them, and the latter
    per second.
    """
    requests, marks = RequestSource(seed), chat_marks(source)
    decoder = Decoder(
        target,
        marks,
        batch=batch,
        capacity=length,
        user_temperature=0.7,
        seed=seed,
    )
    cache: dict[str, list[int]] = {}
    tokens, prompt_lens = [], []
    answered, sampled, began = 0, 0, time.monotonic()
    while answered < num_tokens:
        prompts = []
        for _ in range(batch):
            text = opening(*requests.draw())
            if text not in cache:
                cache[text] = source.encode(text)
            prompts.append(cache[text])
        forced, lens = forced_rows(prompts, length)
        text = decoder.generate(forced)
        is_sampled = torch.arange(length) >= lens[:, None]
        answered += int((is_assistant(text, marks) & is_sampled.to(text.device)).sum())
        sampled += int(is_sampled.sum())
        tokens.append(text.to("cpu", torch.int32))
        prompt_lens.append(lens.int())
    seconds = time.monotonic() - began
    save_file(
        {
            "tokens": torch.cat(tokens),
            "prompt_lens": torch.cat(prompt_lens),
        },
        path,
    )
    return answered, sampled, sampled / seconds
