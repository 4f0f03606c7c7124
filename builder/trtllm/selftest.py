"""What a user with a GPU and TensorRT-LLM runs to see that trimming works there.

It builds tiny EAGLE engines, a chain and a tree, with and without the plugin, and serves them. Run by
``trtllm-av-doctor --selftest`` and ``pytest -m trtllm``, or alone:
``python -m trtllm_av.builder.trtllm.selftest``. Its checks of a served engine are tested on doubles; with
TensorRT-LLM it was not executed where it was written.

Invariants: a check that fails does not stop the others; nothing is downloaded; engines go to a folder of
its own, which is removed.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_av.builder.trtllm import cli
from trtllm_av.builder.trtllm.compare import compare_installed
from trtllm_av.builder.trtllm.modules import import_trtllm
from trtllm_av.builder.trtllm.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint
from trtllm_av.plugins.control_block import ControlBlock
from trtllm_av.runtime.engines.trtllm import TrtllmExecutor, TrtllmOptions
from trtllm_av.runtime.engines.trtllm_adaptation import StepResult
from trtllm_av.runtime.engines.trtllm_library import register_plugins
from trtllm_av.runtime.engines.trtllm_trace import TraceReader, TraceRow
from trtllm_av.runtime.errors import AdaptiveVerificationError
from trtllm_av.runtime.estimator import cold_coefficients

CHAIN = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
PROMPTS = [[3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9], [3, 2, 3, 8, 4], [6, 2]]
MAX_TOKENS = 256
TRIMMED_STEPS = 100
#: The plugin rounds requests and drafts of a step up to a multiple of this.
TOTAL_MULTIPLE = 8

Start = Callable[..., TrtllmExecutor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check: what it is about, whether it held, and figures or the reason."""

    name: str
    is_passed: bool
    detail: str


@dataclass(slots=True)
class _Served:
    """Tokens of all requests, the drafts verified for them, and every row of their traces."""

    tokens: list[list[int]]
    verified: int
    rows: list[TraceRow]
    last: list[TraceRow]


def check_engine(
    name: str,
    start: Start,
    block: ControlBlock,
    expected: Sequence[Sequence[int]] | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[Outcome]:
    """Serve an engine in several ways.

    ``start(is_adaptive=…, observe=…)`` opens it anew; ``block`` is the control block it reads; ``expected``
    are the stock engine's tokens.
    """
    full = _serve(start, None, block, max_tokens)
    if expected is not None:
        is_equal = full.tokens == [list(tokens) for tokens in expected]
        yield Outcome(f"{name}: tokens of the stock engine", is_equal, _differing(full, expected))
    kept_all = all(row.kept_len == row.draft_len for row in full.rows)
    yield Outcome(f"{name}: without a control block all drafts stay", kept_all, f"{full.verified}")

    trimmed = _serve(start, len(PROMPTS), block, max_tokens)
    yield Outcome(
        f"{name}: trimmed drafts give the same tokens",
        trimmed.tokens == full.tokens,
        _differing(trimmed, full.tokens),
    )
    yield Outcome(
        f"{name}: fewer drafts are verified",
        trimmed.verified < full.verified,
        f"{full.verified} → {trimmed.verified}",
    )
    shortest = min((row.kept_len for row in full.rows + trimmed.rows), default=0)
    yield Outcome(f"{name}: no request is left without a draft", shortest >= 1, f"least {shortest}")
    yield _obeyed(name, trimmed)
    yield _whole_template(name, start, block, full, max_tokens)

    adaptive = start(is_adaptive=True)
    try:
        tokens = [
            request.token_ids for request in adaptive.generate(PROMPTS, max_tokens=max_tokens)
        ]
    finally:
        adaptive.close()
    fallbacks = dict(adaptive.adaptation.fallbacks) if adaptive.adaptation is not None else {}
    yield Outcome(
        f"{name}: adapting changes no token", tokens == full.tokens, f"fallbacks {fallbacks}"
    )


def _serve(start: Start, budget: int | None, block: ControlBlock, max_tokens: int) -> _Served:
    """Generate with ``budget`` drafts a step, written once; all drafts if it is None."""
    rows: list[TraceRow] = []
    reader: TraceReader | None = None

    def observe(results: Sequence[StepResult]) -> None:
        assert reader is not None
        for result in results:
            rows.extend(reader.read(result.request_id, result.trace, is_final=False)[0])

    wrapper = start(is_adaptive=False, observe=observe)
    reader = TraceReader(wrapper.engine.max_draft_len)
    try:
        if budget is not None:
            coefficients = [float(c) for c in cold_coefficients(wrapper.engine.num_levels)]
            block.write(budget=budget, coefficients=coefficients, round=block.progress().round)
        generated = wrapper.generate(PROMPTS, max_tokens=max_tokens)
    finally:
        wrapper.close()
    verified = sum(row.verified_len for row in rows)
    return _Served([g.token_ids for g in generated], verified, rows, list(reader.live.values()))


def _differing(served: _Served, expected: Sequence[Sequence[int]]) -> str:
    pairs = zip(served.tokens, expected, strict=True)
    wrong = [row for row, (ours, theirs) in enumerate(pairs) if ours != list(theirs)]
    return f"requests {wrong} differ" if wrong else f"{sum(map(len, served.tokens))} tokens"


def _obeyed(name: str, trimmed: _Served) -> Outcome:
    """The block was used from the next step on, and kept no more than its budget, rounded up."""
    used = [row for row in trimmed.rows if row.version >= 0]
    totals: dict[int, list[int]] = {}
    for row in used:
        totals.setdefault(row.round, []).append(row.kept_len)
    above = [
        round
        for round, kept in totals.items()
        # The floor of one draft a request is kept whatever the budget says.
        if sum(kept) + len(kept) > -(-2 * len(PROMPTS) // TOTAL_MULTIPLE) * TOTAL_MULTIPLE
    ]
    late = len(trimmed.rows) - len(used)
    is_passed = bool(used) and not above and late <= 2 * len(PROMPTS)
    detail = f"{len(totals)} steps, {len(above)} above the budget, {late} rows without it"
    return Outcome(f"{name}: the control block is obeyed", is_passed, detail)


def _whole_template(
    name: str, start: Start, block: ControlBlock, full: _Served, max_tokens: int
) -> Outcome:
    """After many trimmed steps the engine drafts as many tokens as before."""
    served = _serve(start, len(PROMPTS), block, max_tokens)
    steps = len({row.round for row in served.rows})
    before = max((row.draft_len for row in full.rows), default=0)
    after = min((row.draft_len for row in served.last), default=0)
    is_passed = steps >= TRIMMED_STEPS and after == before > 0
    detail = f"{before} drafts at first, {after} after {steps} trimmed steps"
    return Outcome(f"{name}: the template stays whole", is_passed, detail)


def run_selftest(on_outcome: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """All checks on this machine; ``on_outcome`` is told each as it ends."""
    outcomes: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)

    with tempfile.TemporaryDirectory(prefix="trtllm-av-selftest-") as folder:
        for name, run in (
            ("interface", _check_interface),
            ("chain", lambda: _check_choices("chain", CHAIN, 1, Path(folder))),
            ("tree", lambda: _check_choices("tree", TREE, 2, Path(folder))),
        ):
            try:
                for outcome in run():
                    report(outcome)
            except AdaptiveVerificationError as error:
                report(Outcome(name, False, str(error)))
            except Exception as error:  # one failure must not hide the rest
                traceback.print_exc()
                report(Outcome(name, False, f"{type(error).__name__}: {error}"))
    return outcomes


def _check_interface() -> Iterator[Outcome]:
    differences = compare_installed()
    for difference in differences:
        yield Outcome("interface", False, str(difference))
    if not differences:
        yield Outcome("interface", True, "as assumed")


def _check_choices(
    name: str, choices: list[list[int]], max_non_leaves: int, folder: Path
) -> Iterator[Outcome]:
    import_trtllm()
    checkpoint = write_tiny_checkpoint(
        folder / name,
        num_levels=max(map(len, choices)),
        max_draft_len=len(choices),
        max_non_leaves=max_non_leaves,
    )
    for mode in ("disable", "enable"):
        cli.main(
            f"--checkpoint_dir {checkpoint} --output_dir {folder / f'{name}-{mode}'} "
            f"--adaptive_verification_plugin {mode} --speculative_decoding_mode eagle "
            "--max_batch_size 8 --max_input_len 64 --max_seq_len 512 --max_num_tokens 1024 "
            "--use_paged_context_fmha enable --log_level error".split()
        )
    yield Outcome(f"{name}: builds", True, "with and without the plugin")
    block = register_plugins("library")
    options = TrtllmOptions(eagle_choices=choices, kv_cache_free_gpu_memory_fraction=0.2)

    def start(*, is_graph: bool = False, observe: Any = None, is_adaptive: bool) -> TrtllmExecutor:
        chosen = replace(options, is_adaptive=is_adaptive, cuda_graph_mode=is_graph)
        return TrtllmExecutor(folder / f"{name}-enable", chosen, observe=observe)

    expected = _stock_tokens(folder / f"{name}-disable", choices)
    yield from check_engine(name, start, block, expected)
    yield from check_engine(
        f"{name}, CUDA graphs",
        lambda **kwargs: start(is_graph=True, **kwargs),
        block,
        expected,
    )


def _stock_tokens(folder: Path, choices: list[list[int]]) -> list[list[int]]:
    """What the engine without the plugin generates, through the executor alone."""
    b = importlib.import_module("tensorrt_llm.bindings.executor")
    config = b.ExecutorConfig(
        max_beam_width=1,
        decoding_config=b.DecodingConfig(
            decoding_mode=b.DecodingMode.Eagle(),
            eagle_config=b.EagleConfig(eagle_choices=choices, greedy_sampling=True),
        ),
        kv_cache_config=b.KvCacheConfig(free_gpu_memory_fraction=0.2),
    )
    executor = b.Executor(str(folder), b.ModelType.DECODER_ONLY, config)
    tokens: dict[int, list[int]] = {}
    for prompt in PROMPTS:
        assert max(prompt) < VOCAB_SIZE
        request = b.Request(
            input_token_ids=prompt,
            max_tokens=MAX_TOKENS,
            sampling_config=b.SamplingConfig(),
            output_config=b.OutputConfig(exclude_input_from_output=True),
        )
        tokens[int(executor.enqueue_request(request))] = []
    running = set(tokens)
    while running:
        for response in executor.await_responses():
            if response.has_error():
                raise RuntimeError(response.error_msg)
            number = int(response.request_id)
            tokens[number].extend(response.result.output_token_ids[0])
            if response.result.is_final:
                running.discard(number)
    executor.shutdown()
    return [tokens[number] for number in sorted(tokens)]


def main() -> None:
    """Run all checks and print them; exit code 1 if one failed."""

    def show(outcome: Outcome) -> None:
        state = "passed" if outcome.is_passed else "FAILED"
        print(f"{state}  {outcome.name}: {outcome.detail}", flush=True)

    outcomes = run_selftest(show)
    sys.exit(0 if all(outcome.is_passed for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
