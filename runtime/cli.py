"""``trtllm-av-run``: text from a model with speculative decoding, or the three modes side by side.

Exit codes: 0 success, 1 a failed job (or greedy tokens that differ), 2 wrong usage. A user's mistake is
one line on standard error, never a traceback; with ``--json`` standard output holds one object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtllm_av.runtime.console import run_console
from trtllm_av.runtime.errors import RequestError, UsageError
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig
from trtllm_av.runtime.prompts import PromptRecord, demo_prompts, read_prompts

if TYPE_CHECKING:
    from trtllm_av.runtime.api import LLM, Prompt
    from trtllm_av.runtime.compare import Mode

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def run(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2, a local Hugging Face directory (Llama family), or an engine directory."
        ),
    ] = "smollm2",
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; give it again for more.")
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input", help='JSON Lines, one {"prompt": …} a line.')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Prompt i (from 0) draws with seed + i; default: random.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts decoded at once; default: 8, or what an engine holds."),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="JSON object; default: the shipped head, else layer_skip; 7 tokens, adaptive."
        ),
    ] = None,
    cost_table: Annotated[
        Path | None, typer.Option(help="Measured step costs; default: measure at start.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda (bfloat16); an engine directory names its own.")
    ] = "cpu",
    compare: Annotated[
        bool, typer.Option("--compare", help="Run none, fixed and adaptive on the same prompts.")
    ] = False,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of the modes in --compare.")] = 1,
    record: Annotated[
        Path | None, typer.Option(help="Write every round to this file, for trtllm-av-bench.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Serve Prometheus metrics there while running."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Generate text with speculative decoding whose verification adapts to load and acceptance."""
    if repetitions != 1 and not compare:
        raise UsageError(f"--repetitions {repetitions} has no use without --compare; leave it out")
    if compare and (record is not None or metrics_port is not None):
        raise UsageError("--record and --metrics-port watch one engine; leave --compare out")
    if record is not None and input_file is not None and record.resolve() == input_file.resolve():
        raise UsageError(f"--record {str(record)!r} would overwrite --input; name another file")
    speculative = SpeculativeConfig.from_json(speculative_config or "{}")
    records = _read_records(prompt, input_file, use_demo=compare)
    common = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }
    params = [
        record.params(common | {"seed": None if seed is None else seed + index})
        for index, record in enumerate(records)
    ]

    # Heavy imports wait until the command line is known to be right.
    from trtllm_av.runtime.api import LLM
    from trtllm_av.runtime.cli_tables import show_status
    from trtllm_av.runtime.compare import load_modes
    from trtllm_av.runtime.engines.engine_directory import is_engine
    from trtllm_av.runtime.models.checkpoint import load_checkpoint

    is_built = is_engine(Path(model))
    if is_built and compare:
        raise UsageError(
            f"--compare loads one checkpoint three times, {model!r} is an engine; give its checkpoint"
        )
    with show_status(f"loading {model} and measuring step costs", is_quiet=as_json):
        sizes: dict[str, Any] = {"max_batch_size": concurrency, "device": device}
        if compare:
            loaded = load_checkpoint(model)
            llms = load_modes(loaded, speculative, cost_table=cost_table, **sizes)
            llm = llms["adaptive"]
        else:
            llm = LLM(model, speculative, cost_table=cost_table, **sizes)
    prompts = [_prompt(llm, record, is_raw=raw) for record in records]
    if compare:
        _compare(llms, model, prompts, params, repetitions, as_json=as_json)
        return
    with _watch(llm, record, metrics_port):
        _generate(llm, model, records, prompts, params, as_json=as_json)


def main() -> None:
    """The console script."""
    run_console(app)


def _read_records(
    prompts: list[str] | None, input_file: Path | None, *, use_demo: bool
) -> list[PromptRecord]:
    if prompts and input_file is not None:
        raise UsageError("--prompt and --input exclude each other; give one of them")
    if input_file is not None:
        return read_prompts(input_file)
    if prompts:
        for number, text in enumerate(prompts, 1):
            if not text:
                raise UsageError(f"--prompt {number} is empty; give at least one character")
        return [PromptRecord(f"--prompt {n}", prompt=text) for n, text in enumerate(prompts, 1)]
    if use_demo:
        return demo_prompts()
    raise UsageError(
        "no prompt; give --prompt TEXT or --input FILE, or --compare for the demo prompts"
    )


def _prompt(llm: LLM, record: PromptRecord, *, is_raw: bool) -> Prompt:
    if record.prompt_token_ids is not None:
        return record.prompt_token_ids
    if record.messages is not None:
        try:
            return llm.apply_chat_template(record.messages)
        except RequestError as error:
            raise RequestError(f"{record.place}: {error}") from None
    assert record.prompt is not None
    if is_raw or not llm.has_chat_template:
        return record.prompt
    return llm.apply_chat_template(record.prompt)


@contextlib.contextmanager
def _watch(llm: LLM, record: Path | None, metrics_port: int | None) -> Iterator[None]:
    """Record the engine's rounds and serve its metrics, as far as asked, while the body runs."""
    with contextlib.ExitStack() as stack:
        if metrics_port is not None:
            from trtllm_av.runtime.prometheus import start_exporter

            stack.callback(start_exporter({"trtllm-av-run": llm.report}, metrics_port))
        if record is not None:
            from trtllm_av.runtime.run_history import RunRecorder

            stack.enter_context(RunRecorder(llm.engine, record))
        yield


def _generate(
    llm: LLM,
    model: str,
    records: list[PromptRecord],
    prompts: list[Prompt],
    params: list[SamplingParams],
    *,
    as_json: bool,
) -> None:
    from trtllm_av.runtime.cli_tables import print_outputs, print_report, show_progress

    total = sum(one.max_tokens for one in params)
    started = time.perf_counter()
    with show_progress("generating", total, is_quiet=as_json) as on_tokens:
        outputs = llm.generate(prompts, params, on_tokens=on_tokens)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if not as_json:
        titles = [record.title for record in records]
        print_outputs(titles, outputs)
        print_report(llm.report(), num_tokens, seconds)
        return
    _print_json(
        {
            "model": model,
            "outputs": [
                {
                    "prompt": record.prompt,
                    "num_prompt_tokens": len(output.prompt_token_ids),
                    **dataclasses.asdict(output.outputs[0]),
                }
                for record, output in zip(records, outputs, strict=True)
            ],
            "tokens": num_tokens,
            "tokens_per_second": num_tokens / seconds,
            "report": llm.report().to_dict(),
        }
    )


def _compare(
    llms: dict[Mode, LLM],
    model: str,
    prompts: list[Prompt],
    params: list[SamplingParams],
    repetitions: int,
    *,
    as_json: bool,
) -> None:
    from trtllm_av.runtime.cli_tables import print_comparison, show_progress
    from trtllm_av.runtime.compare import MODES, compare
    from trtllm_av.runtime.models import smollm2

    folder = smollm2.converted_folder() if model == smollm2.NAME else Path(model)
    total = sum(one.max_tokens for one in params) * (len(MODES) * repetitions + 1)
    with show_progress("comparing", total, is_quiet=as_json) as on_tokens:
        comparison = compare(
            llms, folder, prompts, params, repetitions=repetitions, on_tokens=on_tokens
        )
    if as_json:
        _print_json({"model": model, "prompts": len(prompts), **comparison.to_dict()})
    else:
        print_comparison(comparison)
    if comparison.identical is False:
        raise typer.Exit(1)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data), flush=True)


if __name__ == "__main__":
    main()
