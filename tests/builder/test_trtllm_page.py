"""docs/trtllm.md: its code can be copied and runs on doubles, its flags are the command's."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.builder.toy_models import greedy
from tests.builder.trtllm_double import TrtllmDouble
from tests.runtime.engines.test_trtllm import Setup
from trtllm_av.builder.trtllm import cli
from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.runtime.engines import trtllm_tree

PAGE = (Path(__file__).parents[2] / "docs" / "trtllm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, re.M | re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [code for _, code in BLOCKS[1:3]]
COMMANDS = [
    shlex.split(line, comments=True)
    for language, code in BLOCKS
    if language == "bash"
    for line in code.replace("\\\n", " ").splitlines()
    if not line.startswith("#")
]


def test_nothing_is_left_out_of_code() -> None:
    """Guards against steps that cannot be copied because a part of them is an ellipsis."""
    assert len(PYTHON) == 2 and len(COMMANDS) > 10
    assert not [code for _, code in BLOCKS if "…" in code or "..." in code]


def test_every_version_has_a_line_that_runs_the_self_test() -> None:
    """Guards against an image on the page that is not the one the code was written against."""
    runs = [command for command in COMMANDS if command[:3] == ["docker", "run", "--rm"]]
    images = [entry.container for entry in assumptions().versions.values()]
    assert [next(word for word in run if word in images) for run in runs] == images
    for run in runs:
        installs, selftest = run[-1].rsplit(" && ", 1)
        assert selftest == "python -m trtllm_av.builder.trtllm.selftest"
    steps = installs.split(
        " && "
    )  # the shell that is opened for the other steps is the last image's
    assert [" && ".join(steps[:2]), steps[2]] == SHELL[1].splitlines()
    assert f" {images[-1]} bash" in SHELL[0]


@pytest.mark.parametrize("code", PYTHON)
def test_python_code_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against code with a wrong name, argument or tree. Engine, executor and tokenizer are doubles."""
    setup = Setup(tmp_path, monkeypatch)
    (tree,) = (
        eval(ast.unparse(node.value))
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "tree"
    )
    trtllm_tree.DraftTree(tree, num_levels=4, max_draft_len=63)  # the engine of the page
    setup.start(tree)
    ids = {"The sea is": [3, 1, 4], "Once upon a time": [1, 5, 9, 2]}

    class Tokenizer:
        eos_token_id = 99

        def __call__(self, text: str | list[str]) -> Any:
            found = ids[text] if isinstance(text, str) else [ids[one] for one in text]
            return SimpleNamespace(input_ids=found)

        def decode(self, token_ids: list[int]) -> str:
            return " ".join(map(str, token_ids))

    monkeypatch.setattr(
        transformers,
        "AutoTokenizer",
        SimpleNamespace(from_pretrained=lambda folder: Tokenizer()),
    )
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(code, "docs/trtllm.md", "exec"), {})
    finally:
        setup.close()
    printed = capsys.readouterr().out
    for prompt in ids.values():
        assert " ".join(map(str, greedy(prompt, 128))) in printed


def test_build_commands_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a flag of the page that the commands do not know, and defaults that differ."""
    TrtllmDouble().install(monkeypatch)
    parser = cli.make_parser()
    built = [command for command in COMMANDS if command[0] in ("trtllm-av-build", "trtllm-build")]
    assert len(built) == 2
    for command in built:
        arguments = parser.parse_args(cli.trtllm_arguments(command[1:]) or command[1:])
        assert (arguments.max_draft_len, arguments.speculative_decoding_mode) == (63, "eagle")
        assert arguments.max_batch_size <= 512 and arguments.output_dir == "engine"
    rows = re.findall(r"^\| `(--\w+)` \| `?(\w+)`? \|", PAGE, re.M)
    ours = {action.option_strings[0]: action.default for action in parser._actions}
    assert len(rows) == 4
    for flag, default in rows:
        assert default == ("off" if ours[flag] is False else str(ours[flag])), flag
