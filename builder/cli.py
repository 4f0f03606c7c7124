"""``trtllm-av-build``: an engine directory from a checkpoint, with flags spelled like trtllm-build's.

Exit codes: 0 success, 1 a failed build, 2 wrong usage. A user's mistake is one line on standard error;
with ``--json`` standard output holds one object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trtllm_av.runtime.errors import AdaptiveVerificationError, UsageError

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
            help="smollm2-head or a file of weights; default: the head that ships for the model.",
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="onnx stops at the files; tensorrt_rtx builds plans.")
    ] = "onnx",
    dtype: Annotated[
        str, typer.Option("--dtype", help="bfloat16, float16 or float32.")
    ] = "bfloat16",
    compute_capability: Annotated[
        int | None, typer.Option("--compute_capability", help="Of the GPU to build for, as in 89.")
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
            help="auto or disable: operations in the graph; enable needs a backend with plugins.",
        ),
    ] = "auto",
    verify: Annotated[
        bool,
        typer.Option("--verify/--no_verify", help="Run the files on onnxruntime against torch."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Build an engine whose verify pass takes a variable number of tokens per request."""
    from trtllm_av.builder.build import build_engine
    from trtllm_av.builder.config import BuildConfig

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
    report = build_engine(config, lambda stage: print(f"{stage} …", file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    print(f"engine     {report.output_dir} ({report.num_bytes / 1e6:.0f} MB, backend {backend})")
    print(f"drafter    {report.drafter or 'none; draft outside the engine'}")
    for stage, seconds in report.seconds.items():
        print(f"{stage:<10} {seconds:.1f} s")
    for name, difference in report.differences.items():
        print(f"{name:<16} differs from torch by at most {difference:.1e}")
    for name, plan in report.plans.items():
        print(f"{name:<16} {plan['num_bytes'] / 1e6:.0f} MB for SM{compute_capability}")
    print(f"peak memory {report.peak_memory_bytes / 1e6:.0f} MB")


def main() -> None:
    """The console script: the command with every expected error as one line and an exit code."""
    try:
        app()
    except AdaptiveVerificationError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
