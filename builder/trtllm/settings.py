"""What a network is to do about adaptive verification, wherever it was said.

In this order: the plugin configuration of ``trtllm-av-build``, the key ``adaptive_verification`` of the
checkpoint's ``config.json``, a JSON file named by ``TRTLLM_AV_BUILD_CONFIG``. The last two are for the
stock ``trtllm-build``, which refuses flags that it does not know.

Invariants: a wrong value is one line with the value and the remedy; an unknown key is an error; drafts
are never trimmed to zero, since a length of zero marks a context request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trtllm_av.runtime.errors import UsageError

CONFIG_KEY = "adaptive_verification"
CONFIG_VARIABLE = "TRTLLM_AV_BUILD_CONFIG"


@dataclass(frozen=True, slots=True)
class AvSettings:
    """``plugin``: trim drafts; ``min_draft_len``: drafts that stay in any case; ``trace``: mark av_trace."""

    plugin: bool = True
    min_draft_len: int = 1
    trace: bool = True

    def __post_init__(self) -> None:
        for name in ("plugin", "trace"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(f"{CONFIG_KEY}.{name}={value!r}; give true or false")
        length = self.min_draft_len
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise UsageError(
                f"av_min_draft_len={length!r} must be at least 1: a draft length of 0 would mark a running "
                "request as a new one"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, under the names that ``from_dict`` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object, source: str) -> AvSettings:
        """Read the object ``data`` found in ``source``; UsageError for anything else."""
        if not isinstance(data, Mapping):
            raise UsageError(f"{source}: {CONFIG_KEY}={data!r}; give a JSON object")
        known = {field.name for field in fields(cls)}
        for key in data.keys() - known:
            raise UsageError(f"{source}: unknown key {key!r}; known are {', '.join(sorted(known))}")
        return cls(**data)


def find_settings(model_config: object, plugin_config: object) -> AvSettings:
    """The settings of a network; those of the class's defaults if nobody said anything.

    Args:
        model_config: the checkpoint's configuration; keys that TensorRT-LLM does not know are attributes.
        plugin_config: the network's; it has ``av_settings`` if ``trtllm-av-build`` made it.
    """
    settings = getattr(plugin_config, "av_settings", None)
    if isinstance(settings, AvSettings):
        return settings
    data = getattr(model_config, CONFIG_KEY, None)
    if data is not None:
        return AvSettings.from_dict(data, "config.json")
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return AvSettings()
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{CONFIG_VARIABLE}={path!r} cannot be read ({error}); give the path of a JSON object"
        ) from None
    return AvSettings.from_dict(data, path)
