"""Train the drafting head of a target on one GPU: generate, train, evaluate.

python benchmarks/train_drafter.py generate --work DIR
python benchmarks/train_drafter.py train    --work DIR --prompts DIR   (again until it says "done")
python benchmarks/train_drafter.py evaluate --work DIR --prompts DIR --output head.safetensors

generate  the target writes text, answers at temperature 1
train     distils on that text and resumes from the checkpoint in the work folder
evaluate  measures acceptance by depth, and confidence where the head has one, on held-out text and on
          answers to the prompts (JSON lines with "dataset" and "prompt"; none of them may occur in the
          training text), and writes the weights and the figures

--method eagle is the autoregressive head, dspark the block drafter with a sequential and a confidence head.
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
from drafter_training.families import FAMILIES, new_family
from drafter_training.generate import chat_marks, generate_text
from drafter_training.source import Source, load_source
from drafter_training.target import FrozenTarget
from drafter_training.text import drop_overlaps, encode_text, frequent_tokens, is_assistant
from drafter_training.train import Trainer, TrainingSettings, train
from safetensors.torch import load_file
from torch import Tensor

from trtllm_av.runtime.errors import AdaptiveVerificationError, UsageError

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
    answered, sampled, pace = generate_text(
        target,
        source,
        options.work / "text.safetensors",
        num_tokens=options.tokens,
        batch=options.batch or 4096,
        length=options.length,
        seed=options.seed,
    )
    report(
        f"wrote {answered} tokens of answers at temperature 1, {sampled} with user turns, at {pace:.0f} "
        "tokens/s"
    )


def run_train(options: argparse.Namespace) -> None:
    source, family = load_source(options.model), new_family(options.method)
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
        num_steps=options.steps or sys.maxsize,
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
    head = family.new_head(target, options.chain_steps, options.seed)
    trainer = Trainer(family, head, target, text, draft_to_target, counted, settings)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.is_file():
        trainer.resume(checkpoint)
        report(f"resumed at step {trainer.step}")
    is_done = train(
        trainer,
        checkpoint,
        seconds=options.seconds - (time.monotonic() - _began),
        report=report,
        fits_time=options.steps is None,
        snapshot=options.output,
    )
    family.save(options.work / "head.safetensors", head, draft_to_target)
    last = trainer.settings.num_steps
    report("done" if is_done else f"stopped at step {trainer.step} of {last}; run again")


def run_evaluate(options: argparse.Namespace) -> None:
    source, family = load_source(options.model), new_family(options.method)
    target = frozen(source, options.device, torch.float32)
    head, draft_to_target = family.load(options.work / "head.safetensors")
    head, draft_to_target = head.to(options.device), draft_to_target.to(options.device)
    output = options.output or options.work / f"{options.method}.safetensors"
    family.save(output, head, draft_to_target)
    figures: dict[str, DepthReport] = {}

    def measure(name: str, ids: Tensor, counted: Tensor, groups: Tensor | None = None) -> None:
        figures[name] = result = acceptance_by_depth(
            family, head, target, draft_to_target, ids, counted, options.chain_steps, groups=groups
        )
        pairs = zip(result.conditional, result.standard_error, strict=True)
        shown = " ".join(f"{value:.3f}±{error:.3f}" for value, error in pairs)
        greedy = " ".join(f"{value:.3f}" for value in result.greedy)
        report(f"{name}: acceptance {shown}, greedy {greedy}")
        if result.confidence is not None:
            auc = " ".join(f"{value:.3f}" for value in result.confidence.auc)
            pooled = {key: round(value, 4) for key, value in result.confidence.pooled.items()}
            report(f"{name}: confidence AUC {auc}, pooled {pooled}")
        rows = {name: asdict(result) for name, result in figures.items()}
        output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")

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


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", choices=("generate", "train", "evaluate"))
    add("--work", type=Path, required=True, help="folder of text, checkpoint and head")
    add("--method", choices=FAMILIES, default="eagle", help="family of drafter")
    add("--model", default="smollm2", help="target: smollm2 or a Hugging Face folder")
    add("--device", type=torch.device, default=torch.device("cuda"))
    add("--seed", type=int, default=0)
    add("--prompts", type=Path, help="folder of evaluation prompts")
    add("--batch", type=int, help="sequences at once (generate 4096, train 64)")
    add("--tokens", type=int, default=50_000_000, help="tokens of answers to write")
    add("--length", type=int, help="tokens of a sequence (512 + chain steps + 1)")
    add("--encode-batch", type=int, default=32, help="sequences the target reads at once")
    add("--held-out", type=int, default=256, help="sequences kept for evaluation")
    add("--steps", type=int, help="updates of the whole training (default: what the time allows)")
    add("--seconds", type=float, default=600, help="train: stop and save after this time")
    add("--chain-steps", type=int, help="depth that is trained and measured (eagle 5, dspark 7)")
    add("--learning-rate", type=float, default=2e-3)
    add("--draft-vocab", type=int, default=16384, help="draft ids, the most frequent ones")
    add("--samples", type=int, default=8, help="answers to each evaluation prompt")
    add("--answer-tokens", type=int, default=256)
    add("--output", type=Path, help="where the weights go: with every checkpoint, and at the end")
    options = parser.parse_args(arguments)
    options.chain_steps = options.chain_steps or new_family(options.method).num_steps
    options.length = options.length or 512 + options.chain_steps + 1
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    for folder in (options.work, options.output.parent if options.output else options.work):
        folder.mkdir(parents=True, exist_ok=True)
    commands = {"generate": run_generate, "train": run_train, "evaluate": run_evaluate}
    try:
        commands[options.command](options)
    except AdaptiveVerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
