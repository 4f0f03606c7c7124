"""An engine by TensorRT-LLM's own ``trtllm-build``, in this process, with our classes in three places.

Its ``main`` runs as it is installed, so that whatever a version does around a build stays its business;
for the time of the call, the names that it takes its parser, its PluginConfig and its
``parallel_build`` from are bound to ours. Workers get the classes by pickling, not by these names.

Invariants: with the plugin disabled nothing is replaced but the parser, and the stock network is built;
what cannot work is refused before the build; ``config.json`` says what the engine is, and is read back;
the names are restored whatever happens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.builder.trtllm.plugin_config import recorded_fields
from trtllm_av.builder.trtllm.settings import CONFIG_KEY, AvSettings
from trtllm_av.plugins.control_block import MAX_LEVELS
from trtllm_av.plugins.plugin_spec import VERSION
from trtllm_av.runtime.engines.trtllm_engine import VERSION_KEY
from trtllm_av.runtime.errors import BuildError, UsageError


class _Parsed:
    """The parser of a command line that was parsed already."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    def parse_args(self) -> argparse.Namespace:
        return self._arguments


def run_trtllm_build(arguments: argparse.Namespace, settings: AvSettings) -> None:
    """Build what the parsed ``arguments`` ask for.

    Raises UsageError or BuildError; whatever TensorRT-LLM raises becomes a BuildError.
    """
    command = importlib.import_module("tensorrt_llm.commands.build")
    replacements: dict[str, Any] = {"parse_arguments": lambda: _Parsed(arguments)}
    if settings.plugin:
        installed = importlib.import_module("trtllm_av.builder.trtllm.installed")
        replacements["PluginConfig"] = installed.AdaptivePluginConfig
        replacements["parallel_build"] = _adaptive_parallel_build(
            command, installed.AdaptiveEagleForCausalLM, settings
        )
    with _bound(command, replacements):
        try:
            command.main()
        except (UsageError, BuildError):
            raise
        except Exception as error:  # its errors are of any type, assertions included
            raise BuildError(
                f"trtllm-build failed with {type(error).__name__}: {error or 'no message'}; its log is above"
            ) from error


def _adaptive_parallel_build(
    command: ModuleType, model_cls: type[Any], settings: AvSettings
) -> Any:
    """``parallel_build`` with our model class, checks before it and the record after it."""
    stock = command.parallel_build

    def parallel_build(
        model_config: Any,
        ckpt_dir: str | None,
        build_config: Any,
        output_dir: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        check_limits(model_config, build_config, settings)
        # Model class: the seventh argument of the stock function, after workers and the log level.
        if len(args) > 2:
            args = (*args[:2], model_cls, *args[3:])
        else:
            kwargs["model_cls"] = model_cls
        result = stock(model_config, ckpt_dir, build_config, output_dir, *args, **kwargs)
        if not getattr(build_config, "dry_run", False) and command.mpi_rank() == 0:
            record_settings(Path(output_dir), settings)
        return result

    return parallel_build


@contextmanager
def _bound(module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def check_limits(model_config: Any, build_config: Any, settings: AvSettings) -> None:
    """Refuse what an EAGLE engine with trimmed drafts cannot be; UsageError names flag and remedy."""
    known = assumptions()
    if model_config.architecture != known.architecture:
        raise UsageError(
            f"checkpoint of {model_config.architecture}: drafts are trimmed in {known.architecture} engines "
            "only; convert the checkpoint for EAGLE or give --adaptive_verification_plugin disable"
        )
    limits = known.limits
    if model_config.mapping.pp_size > limits.pp_size:
        raise UsageError(
            f"checkpoint with pp_size={model_config.mapping.pp_size}: EAGLE has no pipeline parallelism; "
            "convert it with --pp_size 1"
        )
    if model_config.num_eagle_layers > MAX_LEVELS:
        raise UsageError(
            f"checkpoint with num_eagle_layers={model_config.num_eagle_layers}: the plugin takes at most "
            f"{MAX_LEVELS}; give --adaptive_verification_plugin disable"
        )
    draft_len = build_config.max_draft_len or model_config.max_draft_len
    for flag, value, limit in (
        ("max_batch_size", build_config.max_batch_size, limits.max_batch_size),
        ("max_draft_len", draft_len, limits.max_draft_len),
        ("max_beam_width", build_config.max_beam_width, limits.max_beam_width),
        ("av_min_draft_len", settings.min_draft_len, draft_len),
    ):
        if value > limit:
            raise UsageError(
                f"--{flag} {value} is too much for an EAGLE engine here; give at most {limit}"
            )


def record_settings(output_dir: Path, settings: AvSettings) -> None:
    """Write ``settings`` into ``config.json``, whose writer may drop fields it does not know; read it back."""
    path = output_dir / assumptions().raw["engine_config"]["file"]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config["pretrained_config"] |= {CONFIG_KEY: settings.to_dict(), VERSION_KEY: VERSION}
        plugins = config["build_config"].setdefault("plugin_config", {})
        plugins.update(recorded_fields(settings))
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"cannot record the settings in {str(path)!r} ({type(error).__name__}: {error}); the engine is "
            "built, but the runtime will not know it"
        ) from None
    if AvSettings.from_dict(written["pretrained_config"][CONFIG_KEY], str(path)) != settings:
        raise BuildError(f"{str(path)!r} does not hold the settings that were written; build again")
