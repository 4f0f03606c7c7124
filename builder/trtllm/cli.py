"""``trtllm-av-build --backend trtllm``: the flags of the installed ``trtllm-build`` and a group of ours.

Invariants: every flag of TensorRT-LLM keeps its name, default and meaning; what ``auto`` chose is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.builder.trtllm.build import run_trtllm_build
from trtllm_av.builder.trtllm.modules import import_trtllm
from trtllm_av.builder.trtllm.plugin_config import add_arguments
from trtllm_av.builder.trtllm.settings import AvSettings
from trtllm_av.runtime.errors import BuildError, UsageError

BACKEND = "trtllm"


def trtllm_arguments(argv: Sequence[str]) -> list[str] | None:
    """``argv`` without ``--backend trtllm``, or None if another backend is asked for."""
    for index, argument in enumerate(argv):
        if argument == f"--backend={BACKEND}":
            return [*argv[:index], *argv[index + 1 :]]
        if argument == "--backend" and argv[index + 1 : index + 2] == [BACKEND]:
            return [*argv[:index], *argv[index + 2 :]]
    return None


def make_parser() -> argparse.ArgumentParser:
    """The installed parser with our group; BuildError if it is no parser."""
    parser = importlib.import_module("tensorrt_llm.commands.build").parse_arguments()
    if not isinstance(parser, argparse.ArgumentParser):
        raise BuildError(
            f"tensorrt_llm.commands.build.parse_arguments returned a {type(parser).__name__}; "
            "run trtllm-av-doctor to see how this TensorRT-LLM differs"
        )
    parser.prog = f"trtllm-av-build --backend {BACKEND}"
    add_arguments(parser)
    return parser


def main(argv: Sequence[str]) -> None:
    """Build; raises UsageError, MissingDependencyError or BuildError, and SystemExit(2) from the parser."""
    import_trtllm()
    arguments = make_parser().parse_args(argv)
    settings = resolve(arguments)
    state = "trimmed by the plugin" if settings.plugin else "not trimmed, the stock network"
    print(f"drafts     {state}", file=sys.stderr)
    # Their log goes to standard output; with --json that holds one object.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        run_trtllm_build(arguments, settings)
    if arguments.json:
        print(json.dumps({"output_dir": arguments.output_dir, **settings.to_dict()}))
    else:
        print(f"engine     {arguments.output_dir}")


def resolve(arguments: argparse.Namespace) -> AvSettings:
    """Settings from parsed flags; writes what ``auto`` means back into ``arguments``."""
    known = assumptions()
    mode = arguments.adaptive_verification_plugin
    if mode == "auto":
        is_eagle = _architecture(arguments) == known.architecture
        mode = "enable" if is_eagle and arguments.model_cls_file is None else "disable"
        arguments.adaptive_verification_plugin = mode
    if mode == "enable":
        if arguments.model_cls_file is not None:
            raise UsageError(
                f"--model_cls_file {arguments.model_cls_file}: the plugin brings its own model class; leave "
                "one of the two out"
            )
        if arguments.build_config is None and arguments.speculative_decoding_mode != "eagle":
            raise UsageError(
                f"--speculative_decoding_mode {arguments.speculative_decoding_mode}: drafts are trimmed in "
                "EAGLE engines only; give eagle, or --adaptive_verification_plugin disable"
            )
    return AvSettings(
        plugin=mode == "enable",
        min_draft_len=arguments.av_min_draft_len,
        trace=arguments.av_trace == "enable",
    )


def _architecture(arguments: argparse.Namespace) -> str | None:
    """That of the checkpoint; UsageError if its config.json cannot be read."""
    flag = "--checkpoint_dir" if arguments.checkpoint_dir is not None else "--model_config"
    named = getattr(arguments, flag[2:])
    if named is None:
        raise UsageError("--checkpoint_dir is missing; give the folder of a converted checkpoint")
    path = Path(named) if str(named).lower().endswith(".json") else Path(named) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {named}: cannot read {str(path)!r} ({error}); convert the checkpoint first"
        ) from None
    return str(config.get("architecture")) if isinstance(config, dict) else None
