"""``trtllm-av-serve``: a model behind a Triton server.

Exit codes: 0 ended by SIGINT or SIGTERM, 1 the server did not start or died, 2 wrong usage. Standard output
says where the server listens once it is ready; all logs go to standard error. Whatever ends the command
but SIGKILL, the server's processes, shared memory and folder go with it.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, get_args

import typer

from trtllm_av.runtime.console import run_console
from trtllm_av.runtime.engines.engine_directory import is_engine
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models import smollm2
from trtllm_av.runtime.params import AvMode, SpeculativeConfig
from trtllm_av.triton_model_repo.repository import LAYOUTS, Layout, write_repository
from trtllm_av.triton_model_repo.server import ServerError, TritonServer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class _Stopped(BaseException):
    """A signal asked for the end."""


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="smollm2, or a local Hugging Face directory (Llama family).")
    ] = None,
    engine_dir: Annotated[
        str | None, typer.Option(help="Instead of --model: what trtllm-av-build wrote.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where --model runs: cpu, cuda or cuda:N.")] = "cpu",
    layout: Annotated[
        str,
        typer.Option(help="ensemble: TensorRT-LLM's models; llm: one model, text in and text out."),
    ] = "ensemble",
    speculative_config: Annotated[
        str | None,
        typer.Option(help="JSON object, as for trtllm-av-run; default: 7 tokens, adaptive."),
    ] = None,
    av_mode: Annotated[
        str | None, typer.Option(help="adaptive, shadow, fixed or off; default: adaptive.")
    ] = None,
    cost_table: Annotated[
        Path | None, typer.Option(help="Measured step costs; default: measure at start.")
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Requests decoded at once; default: 8, or what an engine has."),
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=2, help="Prompt and output tokens of a request together.")
    ] = None,
    max_queue_size: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; 0: any number.")
    ] = 0,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    start_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to load.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Serve a model with adaptive verification over HTTP and gRPC."""
    name = _check_layout(layout)
    if av_mode is not None and av_mode not in get_args(AvMode):
        raise UsageError(f"--av-mode={av_mode!r}; choose one of {', '.join(get_args(AvMode))}")
    if len({http_port, grpc_port, metrics_port}) < 3:
        raise UsageError("--http-port, --grpc-port and --metrics-port must differ; change one")
    SpeculativeConfig.from_json(speculative_config or "{}")
    folder = _find_folder(model, engine_dir)
    if engine_dir is not None and device != "cpu":
        raise UsageError(f"--device={device!r}: an engine names its own device; leave it out")
    values = {
        "engine_dir": str(folder.resolve()),
        "tokenizer_dir": str((folder if engine_dir is None else folder / "tokenizer").resolve()),
        "av_speculative_config": speculative_config or "",
        "av_mode": av_mode or "",
        "av_cost_table": "" if cost_table is None else str(cost_table.resolve()),
        "av_device": device,
        "av_max_batch_size": "" if max_batch_size is None else str(max_batch_size),
        "av_max_seq_len": "" if max_seq_len is None else str(max_seq_len),
        "max_queue_size": str(max_queue_size),
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="trtllm-av-serve-") as work:
        models = write_repository(Path(work) / "models", name, values)
        with TritonServer(
            Path(work) / "models",
            Path(work),
            address=address,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        ) as server:
            server.wait_until_ready(start_timeout)
            _announce(server, models, as_json=as_json)
            code = server.wait()
    raise ServerError(f"tritonserver ended with code {code}; its messages say why")


def main() -> None:
    """The console script."""
    try:
        run_console(app)
    except _Stopped:
        sys.exit(0)


def _stop(_: int, __: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # one is enough: the clean-up is on its way
    raise _Stopped


def _find_folder(model: str | None, engine_dir: str | None) -> Path:
    """The folder of the checkpoint or of the engine; exactly one of them is named."""
    if (model is None) == (engine_dir is None):
        raise UsageError("name what to serve: either --model or --engine-dir")
    if engine_dir is not None:
        if not is_engine(Path(engine_dir)):
            raise UsageError(
                f"--engine-dir={engine_dir!r} holds no engine; build one with trtllm-av-build"
            )
        return Path(engine_dir)
    assert model is not None
    folder = smollm2.converted_folder() if model == smollm2.NAME else Path(model)
    if not folder.is_dir():
        raise UsageError(
            f"--model={model!r} is no folder; give smollm2 or a Hugging Face directory"
        )
    return folder


def _check_layout(layout: str) -> Layout:
    for name in LAYOUTS:
        if name == layout:
            return name
    raise UsageError(f"--layout={layout!r}; choose one of {', '.join(LAYOUTS)}")


def _announce(server: TritonServer, models: list[str], *, as_json: bool) -> None:
    where = {
        "http": server.http_url,
        "grpc": server.grpc_url,
        "metrics": f"{server.metrics_url}/metrics",
        "models": models,
        "pid": server.pid,
    }
    if as_json:
        print(json.dumps(where), flush=True)
    else:
        print(f"ready: {', '.join(models)}", flush=True)
        print(f"HTTP {where['http']}, gRPC {where['grpc']}, metrics {where['metrics']}", flush=True)


if __name__ == "__main__":
    main()
