"""TensorRT-LLM's PluginConfig with the options of adaptive verification, and their flags.

Invariants: the fields are filled by the base class from the same namespace as its own, and "enable" and
"disable" become booleans by its validator; no field stores "auto", which the base class reads as a dtype.
"""

from __future__ import annotations

import argparse
import types
from typing import Any

from pydantic import Field

from trtllm_av.builder.trtllm.settings import AvSettings

CLASS_NAME = "AdaptivePluginConfig"
GROUP = "Adaptive verification"
PLUGIN_MODES = ("auto", "enable", "disable")


def make_plugin_config(base: type[Any], module: str = __name__) -> type[Any]:
    """A subclass of ``base``, the installed PluginConfig, that can be imported from ``module``."""
    default = AvSettings()
    body: dict[str, Any] = {
        "__module__": module,
        "__qualname__": CLASS_NAME,
        "__doc__": "Plugin options of an engine whose drafts are trimmed before they are verified.",
        "__annotations__": {
            "adaptive_verification_plugin": bool,
            "av_min_draft_len": int,
            "av_trace": bool,
        },
        "adaptive_verification_plugin": Field(
            default=default.plugin, description="Trim drafts before they are verified."
        ),
        "av_min_draft_len": Field(
            default=default.min_draft_len, description="Drafts per request that are never trimmed."
        ),
        "av_trace": Field(default=default.trace, description="Mark the output av_trace."),
        "av_settings": property(_settings),
    }
    return types.new_class(CLASS_NAME, (base,), exec_body=lambda namespace: namespace.update(body))


def _settings(config: Any) -> AvSettings:
    return AvSettings(
        plugin=config.adaptive_verification_plugin,
        min_draft_len=config.av_min_draft_len,
        trace=config.av_trace,
    )


def recorded_fields(settings: AvSettings) -> dict[str, Any]:
    """The fields of the subclass as ``build_config.plugin_config`` of an engine records them."""
    return {
        "adaptive_verification_plugin": settings.plugin,
        "av_min_draft_len": settings.min_draft_len,
        "av_trace": settings.trace,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of ``trtllm-build``, in a group of their own."""
    group = parser.add_argument_group(GROUP)
    group.add_argument(
        "--adaptive_verification_plugin",
        choices=PLUGIN_MODES,
        default="auto",
        help="Trim drafts before they are verified; auto: if the checkpoint is an EAGLE one.",
    )
    group.add_argument(
        "--av_min_draft_len",
        type=int,
        default=AvSettings().min_draft_len,
        help="Drafts per request that are verified in any case, at least 1.",
    )
    group.add_argument(
        "--av_trace",
        choices=("enable", "disable"),
        default="enable",
        help="Give the engine the output av_trace, which the runtime learns from.",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="One JSON object on standard output, all else on stderr.",
    )
