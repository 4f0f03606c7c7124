"""Prompts from a JSON Lines file: one object a line, and every mistake named with its line.

``{"prompt": text}``, ``{"prompt_token_ids": [int, …]}`` or ``{"messages": [{"role", "content"}, …]}``,
each with an optional ``"sampling_params"`` object whose keys are those of SamplingParams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.params import SamplingParams, describe_validation_error
from trtllm_av.runtime.strict_json import parse_json


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt: str | None = Field(default=None, min_length=1)
    prompt_token_ids: list[StrictInt] | None = Field(default=None, min_length=1)
    messages: list[_Message] | None = Field(default=None, min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_prompt(self) -> _Line:
        if sum(x is not None for x in (self.prompt, self.prompt_token_ids, self.messages)) != 1:
            raise ValueError("give exactly one of 'prompt', 'prompt_token_ids' and 'messages'")
        return self


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt, said in exactly one way: text, token ids or a conversation.

    ``place`` is what an error calls it; ``sampling_params`` is what differs from the common parameters.
    """

    place: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """A heading for people: the text if there is one."""
        return self.place if self.prompt is None else self.prompt

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The common parameters with this record's own on top; UsageError names the record."""
        try:
            return SamplingParams(**{**defaults, **self.sampling_params})
        except UsageError as error:
            if not self.sampling_params:
                raise
            raise UsageError(f"{self.place}: {error}") from None


def parse_prompts(text: str, source: str) -> list[PromptRecord]:
    """The records of JSON Lines ``text``; blank lines are skipped.

    Raises UsageError naming ``source`` and the line number for a malformed line, and for no prompt at all.
    """
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line)
            if not isinstance(data, dict):
                raise UsageError(f"{source} line {number} is not a JSON object: {_shorten(line)!r}")
            fields = _Line(**data).model_dump()
            records.append(PromptRecord(f"{source} line {number}", **fields))
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{source} line {number} is not JSON ({error.msg} at column {error.colno}): "
                f"{_shorten(line)!r}"
            ) from None
        except RecursionError:
            raise UsageError(f"{source} line {number} is nested too deeply; simplify it") from None
        except ValidationError as error:
            raise UsageError(
                f"{source} line {number}: {describe_validation_error(error)}"
            ) from None
        except UsageError:
            raise
        except ValueError as error:  # a key twice, a number of thousands of digits
            raise UsageError(f"{source} line {number} cannot be read: {error}") from None
    if not records:
        raise UsageError(f'{source} holds no prompt; write one {{"prompt": "…"}} a line')
    return records


def read_prompts(path: Path) -> list[PromptRecord]:
    """Read a UTF-8 JSON Lines file; UsageError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read prompts from {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{str(path)!r} is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    return parse_prompts(text, path.name)


def demo_prompts() -> list[PromptRecord]:
    """The ten prompts that come with the package."""
    file = resources.files("trtllm_av.runtime").joinpath("data").joinpath("demo_prompts.jsonl")
    return parse_prompts(file.read_text(encoding="utf-8"), "demo_prompts.jsonl")


def _shorten(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "…"
