"""Train the autoregressive drafting head of a target on one GPU: generate, train, evaluate.

python benchmarks/train_drafter.py generate --work DIR
python benchmarks/train_drafter.py train    --work DIR --prompts DIR   (again until it says "done")
python benchmarks/train_drafter.py evaluate --work DIR --prompts DIR --output head.safetensors

generate  the target writes text, answers at temperature 1
train     distils on that text and resumes from the checkpoint in the work folder
evaluate  measures acceptance by depth, on held-out text and on answers to the prompts (JSON lines with
          "dataset" and "prompt"; none of them may occur in the training text), and writes the weights
          and the figures
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from drafter_training.answers import answer_prompts, read_prompts
from drafter_training.evaluate import DepthReport, acceptance_by_depth
from drafter_training.generate import chat_marks, generate_text
from drafter_training.source import Source, load_source
from drafter_training.target import FrozenTarget
from drafter_training.text import drop_overlaps, encode_text, frequent_tokens, is_assistant
from drafter_training.train import Trainer, TrainingSettings, new_head, train
from safetensors.torch import load_file
from torch import Tensor

from trtllm_av.runtime.errors import AdaptiveVerificationError, UsageError
from trtllm_av.runtime.models.drafters.eagle_head import load_head, save_head

_began = time.monotonic()


def report(text: str) -> None:
    """Print ``text`` behind the seconds since the start."""
    print(f"[{time.monotonic() - _began:6.1f} s] {text}", flush=True)


def frozen(source: Source, device: torch.device, dtype: torch.dtype | None = None) -> FrozenTarget:
    """The target in ``dtype``; by default what generation and training use on ``device``."""
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return FrozenTarget(source.weights, source.config, dtype=dtype, device=device)


def read_text(work: Path) -> tuple[Tensor, Tensor]:
    """(tokens [N, S], prompt_lens [N]) of ``generate``."""
    path = work / "text.safetensors"
    if not path.is_file():
        raise UsageError(f"{path} not found; run 'train_drafter.py generate' first")
    data = load_file(path)
    return data["tokens"], data["prompt_lens"]


def run_generate(options: argparse.Namespace) -> None:
    source = load_source(options.model)
    target = frozen(source, options.device)
    report("target ready")
    pace = generate_text(
        target,
        source,
        options.work / "text.safetensors",
        num_tokens=options.tokens,
        batch=options.batch or 4096,
        length=options.length,
        seed=options.seed,
    )
    report(f"wrote at least {options.tokens} sampled tokens at {pace:.0f} tokens/s")


def run_train(options: argparse.Namespace) -> None:
    source = load_source(options.model)
    target = frozen(source, options.device)
    tokens, prompt_lens = (part[: -options.held_out] for part in read_text(options.work))
    prompts = read_prompts(options.prompts) if options.prompts else []
    known = [source.encode(prompt.text) for prompt in prompts]
    is_clean = drop_overlaps(tokens.to(options.device), known).cpu()
    report(
        f"{int((~is_clean).sum())} of {len(tokens)} sequences dropped: they share a run of tokens "
        "with an evaluation prompt"
    )
    text = encode_text(target, tokens[is_clean], options.encode_batch)
    report(f"target states of {text.tokens.numel() / 1e6:.1f} M tokens ready")
    settings = TrainingSettings(
        num_steps=options.steps,
        batch=options.batch or 64,
        chain_steps=options.chain_steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    lens = prompt_lens[is_clean][: len(text.tokens), None].to(options.device)
    is_sampled = torch.arange(text.tokens.shape[1], device=options.device) >= lens
    is_answer = is_assistant(text.tokens, chat_marks(source))
    counted = is_sampled * torch.where(is_answer, 1.0, settings.user_weight)
    draft_to_target = frequent_tokens(
        text.tokens, counted, options.draft_vocab, source.config.vocab_size
    )
    head = new_head(target, options.wide, options.seed)
    trainer = Trainer(head, target, text, draft_to_target, counted, settings)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.resume(checkpoint)
        report(f"resumed at step {trainer.step}")
    seconds = options.minutes * 60 - (time.monotonic() - _began)
    is_done = train(trainer, checkpoint, seconds=seconds, report=report)
    save_head(options.work / "head.safetensors", head, draft_to_target)
    report("done" if is_done else f"stopped at step {trainer.step} of {options.steps}; run again")


def run_evaluate(options: argparse.Namespace) -> None:
    source = load_source(options.model)
    target = frozen(source, options.device, torch.float32)
    head, draft_to_target = load_head(options.work / "head.safetensors")
    head, draft_to_target = head.to(options.device), draft_to_target.to(options.device)
    figures: dict[str, DepthReport] = {}

    def measure(name: str, ids: Tensor, counted: Tensor, groups: Tensor | None = None) -> None:
        figures[name] = result = acceptance_by_depth(
            head, target, draft_to_target, ids, counted, options.chain_steps, groups=groups
        )
        pairs = zip(result.conditional, result.standard_error, strict=True)
        shown = " ".join(f"{value:.3f}±{error:.3f}" for value, error in pairs)
        greedy = " ".join(f"{value:.3f}" for value in result.greedy)
        report(f"{name}: acceptance {shown}, greedy {greedy}")

    tokens, prompt_lens = (part[-options.held_out :] for part in read_text(options.work))
    is_sampled = torch.arange(tokens.shape[1]) >= prompt_lens[:, None]
    measure("held-out text", tokens, is_assistant(tokens, chat_marks(source)) & is_sampled)
    if options.prompts:
        prompts = read_prompts(options.prompts)
        answers = answer_prompts(
            source,
            frozen(source, options.device),
            prompts,
            samples=options.samples,
            answer_tokens=options.answer_tokens,
            seed=options.seed + 1,
        )
        for name in sorted({prompt.data_set for prompt in prompts}):
            mine = torch.tensor([prompts[p].data_set == name for p in answers.prompt_of.tolist()])
            groups = answers.prompt_of[mine].unique(return_inverse=True)[1]
            measure(name, answers.tokens[mine], answers.is_answer[mine], groups)
    output = options.output or options.work / "eagle.safetensors"
    output.parent.mkdir(parents=True, exist_ok=True)
    save_head(output, head, draft_to_target)
    rows = {name: asdict(result) for name, result in figures.items()}
    output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", choices=("generate", "train", "evaluate"))
    add("--work", type=Path, required=True, help="folder of text, checkpoint and head")
    add("--model", default="smollm2", help="target: smollm2 or a Hugging Face folder")
    add("--device", type=torch.device, default=torch.device("cuda"))
    add("--seed", type=int, default=0)
    add("--prompts", type=Path, help="folder of evaluation prompts")
    add("--batch", type=int, help="sequences at once (generate 4096, train 64)")
    add("--tokens", type=int, default=52_000_000, help="sampled tokens to write")
    add("--length", type=int, default=518, help="tokens of a sequence (512 + chain steps + 1)")
    add("--encode-batch", type=int, default=32, help="sequences the target reads at once")
    add("--held-out", type=int, default=256, help="sequences kept for evaluation")
    add("--steps", type=int, default=5400, help="updates of the whole training")
    add("--minutes", type=float, default=10, help="stop and save after this time")
    add("--chain-steps", type=int, default=5, help="depth that is trained and measured")
    add("--learning-rate", type=float, default=2e-3)
    add("--draft-vocab", type=int, default=16384, help="draft ids, the most frequent ones")
    add("--wide", type=int, default=2304, help="width of the head's MLP")
    add("--samples", type=int, default=8, help="answers to each evaluation prompt")
    add("--answer-tokens", type=int, default=256)
    add("--output", type=Path, help="where evaluate writes the weights")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    options.work.mkdir(parents=True, exist_ok=True)
    commands = {"generate": run_generate, "train": run_train, "evaluate": run_evaluate}
    try:
        commands[options.command](options)
    except AdaptiveVerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
