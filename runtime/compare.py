"""The same prompts without speculation, with fixed K and with adaptive verification, on one loaded model.

Each mode has an engine of its own, so that none pays for another's drafter or scoring.

Invariants: the modes differ in nothing but how many drafts are drawn and verified; repetitions take
turns (none, fixed, adaptive, none, …), so that a slow phase of the machine hits all modes; every
repetition's tokens are compared, not only those of the one whose speed is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from trtllm_av.runtime.api import LLM, Prompt
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.metrics import RoundReport
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.params import SamplingParams, SpeculativeConfig

Mode = Literal["none", "fixed", "adaptive"]
MODES: tuple[Mode, ...] = get_args(Mode)

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode: tokens of each prompt, wall-clock ``seconds`` (prefill included) and the engine's counters."""

    token_ids: list[list[int]]
    seconds: float
    report: RoundReport

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def to_dict(self) -> dict[str, object]:
        report = self.report.to_dict()
        return {
            "tokens_per_second": self.tokens_per_second,
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            **report,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """``differing``: per pair of token sources, the prompts (counted from 0) whose tokens differ.

    Greedy decoding only; None when tokens are sampled, because modes then use different random numbers.
    """

    modes: dict[Mode, ModeResult]
    differing: dict[str, list[int]] | None

    @property
    def identical(self) -> bool | None:
        """True if all greedy tokens agree; None if there was nothing that had to agree."""
        return None if self.differing is None else not any(self.differing.values())

    def to_dict(self) -> dict[str, object]:
        return {
            "modes": {mode: result.to_dict() for mode, result in self.modes.items()},
            "identical": self.identical,
            "differing_prompts": self.differing,
        }


def load_modes(
    model: LoadedModel,
    speculative: SpeculativeConfig,
    *,
    cost_table: Path | None = None,
    **options: Any,
) -> dict[Mode, LLM]:
    """One LLM per mode over one loaded model; ``options`` are those of LLM.

    Raises UsageError if ``speculative`` does not adapt: there would be nothing to compare.
    """
    if speculative.resolved_mode != "adaptive":
        raise UsageError(
            f"av_mode {speculative.resolved_mode!r} leaves nothing to compare; leave av_mode out"
        )
    fixed = {"av_mode": "fixed", "enable_adaptive_verification": False}
    return {
        "none": LLM(model, None, **options),
        "fixed": LLM(model, speculative.model_copy(update=fixed), **options),
        "adaptive": LLM(model, speculative, cost_table=cost_table, **options),
    }


def compare(
    llms: Mapping[Mode, LLM],
    checkpoint: Path,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    repetitions: int = 1,
    on_tokens: Callable[[int], None] | None = None,
) -> Comparison:
    """Decode ``prompts`` in each mode; the repetition of median speed is reported.

    Greedy tokens are also compared with those of ``transformers``' own decoding of the ``checkpoint``
    folder, unless a request edits the logits or has stops of its own, which that decoding does not.
    ``on_tokens`` is told of every new token, all modes and repetitions together.
    """
    # The engine without drafts refuses requests that ask for some.
    plain = [one.model_copy(update={"num_speculative_tokens": None}) for one in params]
    by_mode = {mode: plain if mode == "none" else params for mode in MODES}
    warm_up = SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    for llm in llms.values():  # first-use costs (threads, allocator) would fall on the first mode
        llm.generate([prompts[0]], warm_up)
    runs: dict[Mode, list[ModeResult]] = {mode: [] for mode in MODES}
    prompt_ids: list[list[int]] = []
    for _ in range(repetitions):
        for mode in MODES:
            llm = llms[mode]
            llm.reset_report()
            started = time.perf_counter()
            outputs = llm.generate(prompts, by_mode[mode], on_tokens=on_tokens)
            seconds = time.perf_counter() - started
            prompt_ids = [output.prompt_token_ids for output in outputs]
            token_ids = [output.outputs[0].token_ids for output in outputs]
            runs[mode].append(ModeResult(token_ids, seconds, llm.report()))

    differing: dict[str, list[int]] | None = None
    if all(one.temperature == 0.0 for one in params):
        baseline = runs["none"][0].token_ids
        differing = {
            f"none_vs_{mode}": _differing(baseline, [run.token_ids for run in runs[mode]])
            for mode in MODES[1:]
        }
        if not any(one.is_constrained or one.stop or one.stop_token_ids for one in params):
            expected = transformers_greedy(
                checkpoint,
                prompt_ids,
                params,
                llms["none"].engine.eos_token_ids,
                on_tokens=on_tokens,
            )
            differing["none_vs_transformers"] = _differing(baseline, [expected])
    middle = (repetitions - 1) // 2
    return Comparison(
        {
            mode: sorted(results, key=lambda result: result.tokens_per_second)[middle]
            for mode, results in runs.items()
        },
        differing,
    )


def transformers_greedy(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    eos_token_ids: Sequence[int],
    *,
    on_tokens: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Greedy tokens of ``transformers``' own model, one prompt at a time (padding would change sums)."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # of weights that load in a second
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(checkpoint), dtype=torch.float32, local_files_only=True
    )
    tokens: list[list[int]] = []
    for prompt, one in zip(prompts, params, strict=True):
        ids = torch.tensor([list(prompt)])
        eos = [] if one.ignore_eos else list(eos_token_ids)
        # Not an argument of generate, which would add the checkpoint's own penalties to it.
        model.generation_config = GenerationConfig.from_dict(
            {
                "do_sample": False,
                "max_new_tokens": one.max_tokens,
                "eos_token_id": eos or None,
                "pad_token_id": 0,  # never used: one row at a time
            }
        )
        with torch.inference_mode():
            sequence = model.generate(ids, attention_mask=torch.ones_like(ids))
        tokens.append([int(token) for token in sequence[0, len(prompt) :]])
        if on_tokens is not None:
            on_tokens(len(tokens[-1]))
    return tokens


def _differing(
    expected: Sequence[Sequence[int]], runs: Sequence[Sequence[Sequence[int]]]
) -> list[int]:
    return [
        index
        for index, tokens in enumerate(expected)
        if any(list(run[index]) != list(tokens) for run in runs)
    ]
