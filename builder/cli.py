"""``trtllm-av-build``: an engine directory from a checkpoint, with flags spelled like trtllm-build's.

Exit codes: 0 success, 1 a failed build, 2 wrong usage. A user's mistake is one line on standard error;
with ``--json`` standard output holds one object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_av.builder.trtllm import cli as trtllm_cli
from trtllm_av.runtime.console import run_console

if TYPE_CHECKING:
    from trtllm_av.builder.build_report import BuildReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def build(
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="The engine directory to write.")
    ],
    model_dir: Annotated[
        str,
        typer.Option(
            "--model_dir",
            "--checkpoint_dir",
            help="smollm2, or a local Hugging Face directory (Llama family).",
        ),
    ] = "smollm2",
    speculative_model: Annotated[
        str | None,
        typer.Option(
            "--speculative_model",
            help="smollm2-head, layer_skip, a draft checkpoint's directory or a head's file; default: "
            "the head that ships for the model, else layer_skip.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="onnx stops at the files; tensorrt and tensorrt_rtx build plans; trtllm takes the flags "
            "of the installed trtllm-build instead of these; default: what is installed.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="bfloat16, float16 or float32; default: float32 for onnx, bfloat16 for plans.",
        ),
    ] = None,
    compute_capability: Annotated[
        int | None,
        typer.Option("--compute_capability", help="For tensorrt_rtx: of the GPU, as in 89."),
    ] = None,
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="Requests at once.")] = 8,
    max_seq_len: Annotated[
        int, typer.Option("--max_seq_len", help="Tokens per request, prompt included.")
    ] = 2048,
    max_draft_len: Annotated[
        int, typer.Option("--max_draft_len", help="K, drafts per request and round.")
    ] = 7,
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            "--max_num_tokens",
            help="Tokens per pass; default: (max_draft_len + 1) * max_batch_size.",
        ),
    ] = None,
    adaptive_verification_plugin: Annotated[
        str,
        typer.Option(
            "--adaptive_verification_plugin",
            help="auto: plugins where the backend holds them; disable: operations in the graph; enable: "
            "an error without plugins.",
        ),
    ] = "auto",
    verify: Annotated[
        bool,
        typer.Option("--verify/--no_verify", help="Run the files on onnxruntime against torch."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Build an engine whose verify pass takes a variable number of tokens per request."""
    from trtllm_av.builder.backend import choose_backend
    from trtllm_av.builder.build import build_engine
    from trtllm_av.builder.config import BuildConfig
    from trtllm_av.builder.progress import BuildProgress

    if backend is None:
        choice = choose_backend(compute_capability)
        backend, compute_capability = choice.backend, choice.compute_capability
        print(f"backend {backend}: {choice.reason}", file=sys.stderr)
    config = BuildConfig(
        model_dir=model_dir,
        output_dir=output_dir,
        speculative_model=speculative_model,
        backend=backend,
        dtype=dtype,
        compute_capability=compute_capability,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        max_num_tokens=max_num_tokens,
        adaptive_verification_plugin=adaptive_verification_plugin,
        verify=verify,
    )
    if config.num_tokens < config.full_decode_tokens:
        print(
            f"warning: --max_num_tokens {config.num_tokens} is below {config.full_decode_tokens}, the "
            "tokens of a round that verifies every draft; such rounds will not fit",
            file=sys.stderr,
        )
    with BuildProgress() as progress:
        report = build_engine(config, progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        _print_report(report)


def _print_report(report: BuildReport) -> None:
    print(f"engine     {report.output_dir} ({report.num_bytes / 1e6:.0f} MB)")
    print(f"backend    {report.backend}, operations as {report.operations}")
    print(f"drafter    {report.drafter}")
    for stage, seconds in report.seconds.items():
        print(f"{stage:<10} {seconds:.1f} s")
    for name, difference in report.differences.items():
        print(f"{name:<16} differs from torch by at most {difference:.1e}")
    if report.end_to_end_rounds:
        print(
            f"verify_lens      equal in {report.end_to_end_rounds} rounds from the drafter's logits"
        )
    for name, plan in report.plans.items():
        print(f"{name:<16} {plan['num_bytes'] / 1e6:.0f} MB, built in {plan['seconds']:.1f} s")
    print(
        f"memory     at most {report.peak_memory_bytes / 1e6:.0f} MB, "
        f"{report.export_memory_bytes / 1e6:.0f} MB of them for the export of "
        f"{report.weight_bytes / 1e6:.0f} MB of weights"
    )


def main() -> None:
    """The console script."""
    run_console(_run)


def _run() -> None:
    if (arguments := trtllm_cli.trtllm_arguments(sys.argv[1:])) is not None:
        trtllm_cli.main(arguments)  # the flags of the installed trtllm-build
    else:
        app()


if __name__ == "__main__":
    main()
