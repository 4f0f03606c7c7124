"""A tiny engine on every path that this machine has, compared with the torch executor on the CPU.

``python -m trtllm_av.builder.selftest PATH`` runs one path and prints its result as JSON; the doctor starts
one process for each, because a library that ends its process must not hide the other results.

Invariants: the model is random and made here; everything is written to a temporary folder; a path that the
machine does not have is skipped with the reason, and one that was built and not run says so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trtllm_av.builder.build import build_engine
from trtllm_av.builder.config import BuildConfig
from trtllm_av.builder.progress import BuildProgress
from trtllm_av.builder.selftest_compare import TOLERANCE, compare_with_torch
from trtllm_av.builder.selftest_model import write_head, write_model
from trtllm_av.builder.trtllm.selftest import run_selftest as run_trtllm
from trtllm_av.runtime.api import LLM
from trtllm_av.runtime.engines.engine_directory import EngineDirectory
from trtllm_av.runtime.engines.gpu import current_gpu
from trtllm_av.runtime.engines.tensorrt_module import buildable_capabilities, import_backend
from trtllm_av.runtime.errors import AdaptiveVerificationError, DeviceError, MissingDependencyError
from trtllm_av.runtime.params import SamplingParams

Status = Literal["passed", "failed", "skipped", "built, not run"]
#: Seconds after which a path counts as hung.
TIMEOUT = 900
MAX_DRAFT_LEN = 3
_PROMPTS = ["The sea is", "Two plus two", "def add(a, b):"]
#: Costs that make rounds draft deep and trim, whatever the machine.
_COSTS: dict[str, Any] = {
    "unit": "ms",
    "graph_limit_tokens": 0,
    "verify_ms_by_tokens": [[1, 1.0], [4, 1.1], [8, 1.6], [16, 4.0]],
    "draft_ms_by_requests": [[1, 0.01], [4, 0.02]],
}


@dataclass(frozen=True, slots=True)
class PathResult:
    """``figures`` hold differences and counts, ``detail`` one line for a reader."""

    path: str
    status: Status
    detail: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


#: What a path returns: its status, the line, and figures.
_Outcome = tuple[Status, str, dict[str, Any]]


def _torch_cpu(model: Path, folder: Path) -> _Outcome:
    return _compare_tokens(str(model), generate(str(model), None), {})


def _torch_cuda(model: Path, folder: Path) -> _Outcome:
    if current_gpu() is None:
        raise DeviceError("no GPU that torch can use")
    # In float32 tokens are equal; the device drafts with a head only.
    options = {"device": "cuda", "dtype": "float32"}
    drafter = {"method": "eagle", "model": str(write_head(folder / "head.safetensors", model))}
    return _compare_tokens(str(model), generate(str(model), None), options, drafter)


def _onnx(model: Path, folder: Path) -> _Outcome:
    engine = _build(model, folder / "engine", "onnx", None, "float32")
    figures = compare_with_torch(engine, model)
    status, detail, more = _compare_tokens(str(engine), generate(str(model), None), {})
    return status, detail, figures | more


def _tensorrt_rtx(model: Path, folder: Path) -> _Outcome:
    known = buildable_capabilities(import_backend("tensorrt_rtx"))
    gpu = current_gpu()
    can_run = gpu is not None and gpu.compute_capability in known
    capability = gpu.compute_capability if gpu is not None and can_run else 89
    engine = _build(model, folder / "engine", "tensorrt_rtx", capability, "float16")
    if not can_run:
        where = "there is no GPU" if gpu is None else f"it does not run on the {gpu.name}"
        return "built, not run", f"plans for compute capability {capability}; {where}", {}
    return _run_plans(engine, model)


def _tensorrt(model: Path, folder: Path) -> _Outcome:
    import_backend("tensorrt")
    return _run_plans(_build(model, folder / "engine", "tensorrt", None, "float16"), model)


def _trtllm(model: Path, folder: Path) -> _Outcome:
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise MissingDependencyError(
            "tensorrt_llm not installed: pip install 'trtllm-adaptive-verification[tensorrt-llm]'"
        )
    outcomes = run_trtllm()
    failed = [outcome for outcome in outcomes if not outcome.is_passed]
    figures = {outcome.name: outcome.detail for outcome in outcomes}
    detail = f"{len(outcomes) - len(failed)} of {len(outcomes)} checks passed"
    return "failed" if failed else "passed", detail, figures


PATHS: dict[str, Callable[[Path, Path], _Outcome]] = {
    "torch-cpu": _torch_cpu,
    "torch-cuda": _torch_cuda,
    "onnxruntime": _onnx,
    "tensorrt-rtx": _tensorrt_rtx,
    "tensorrt": _tensorrt,
    "tensorrt-llm": _trtllm,
}


def run_path(name: str) -> PathResult:
    """Run one path of ``PATHS`` in this process; whatever it raises becomes its result."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trtllm-av-selftest-") as temporary:
        folder = Path(temporary)
        figures: dict[str, Any] = {}
        status: Status
        try:
            status, detail, figures = PATHS[name](write_model(folder / "model"), folder)
        except (DeviceError, MissingDependencyError) as error:
            status, detail = "skipped", str(error)
        except AdaptiveVerificationError as error:
            status, detail = "failed", str(error)
        except Exception as error:  # the report is what a developer gets to see
            status, detail = "failed", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    return PathResult(name, status, " ".join(detail.split()), seconds, figures)


def run_isolated(name: str, command: Sequence[str] | None = None) -> PathResult:
    """``run_path`` in a process of its own, which may crash or hang; ``command`` replaces it in tests."""
    started = time.perf_counter()
    arguments = command or [sys.executable, "-m", "trtllm_av.builder.selftest", name]
    try:
        process = subprocess.run(
            list(arguments), capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        lines = process.stdout.splitlines()
        if process.returncode == 0 and lines:
            return PathResult(**json.loads(lines[-1]))
        last = process.stderr.strip().splitlines()[-1:] or ["no message"]
        detail = f"its process ended with {process.returncode}: {last[0]}"
    except subprocess.TimeoutExpired:
        detail = f"no result after {TIMEOUT} s"
    except (ValueError, TypeError) as error:
        detail = f"its process printed no result ({error})"
    return PathResult(name, "failed", detail, time.perf_counter() - started)


def generate(model: str, speculative: dict[str, Any] | None, **options: Any) -> list[list[int]]:
    """Greedy tokens of the prompts."""
    costs = None if speculative is None else _COSTS
    llm = LLM(model, speculative, max_seq_len=192, max_batch_size=4, cost_table=costs, **options)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, params)]


def _compare_tokens(
    model: str,
    expected: list[list[int]],
    options: dict[str, Any],
    drafter: Mapping[str, Any] = MappingProxyType({}),
) -> _Outcome:
    """Tokens of ``model`` with and without drafts against those of the torch executor in float32.

    ``options`` are of ``LLM``, ``drafter`` of its speculative configuration.
    """
    speculative = {"num_speculative_tokens": MAX_DRAFT_LEN, **drafter}
    plain, drafted = generate(model, None, **options), generate(model, speculative, **options)
    figures = {
        "tokens": sum(map(len, expected)),
        "equal_without_drafts": _num_equal(plain, expected),
        "equal_with_drafts": _num_equal(drafted, expected),
    }
    is_equal = plain == expected and drafted == expected
    detail = "{equal_with_drafts} of {tokens} greedy tokens equal the torch executor's"
    return "passed" if is_equal else "failed", detail.format(**figures), figures


def _run_plans(engine: Path, model: Path) -> _Outcome:
    """Logits, scores and trims within tolerance; tokens in 16 bits may part where two logits are close."""
    figures = compare_with_torch(engine, model)
    _, detail, more = _compare_tokens(str(engine), generate(str(model), None), {})
    dtype = str(EngineDirectory.load(engine).pretrained_config["dtype"])
    is_close = figures["logits"] <= TOLERANCE[dtype] and figures["wrong_trims"] == 0
    detail = f"logits within {figures['logits']:.1e}, trims equal; {detail} ({dtype})"
    return "passed" if is_close else "failed", detail, figures | more


def _num_equal(found: list[list[int]], expected: list[list[int]]) -> int:
    return sum(
        ours == theirs
        for row, other in zip(found, expected, strict=True)
        for ours, theirs in zip(row, other, strict=False)
    )


def _build(model: Path, output: Path, backend: str, capability: int | None, dtype: str) -> Path:
    config = BuildConfig(
        model_dir=str(model),
        output_dir=output,
        backend=backend,
        compute_capability=capability,
        dtype=dtype,
        max_batch_size=4,
        max_seq_len=192,
        max_draft_len=MAX_DRAFT_LEN,
        max_num_tokens=128,
        verify=False,
    )
    build_engine(config, BuildProgress(is_quiet=True))
    return output


if __name__ == "__main__":
    print(json.dumps(asdict(run_path(sys.argv[1]))))
