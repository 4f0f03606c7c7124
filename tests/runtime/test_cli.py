"""trtllm-av-run: output forms, exit codes and one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.tiny_checkpoint import cheap_draft_costs, write_tiny_checkpoint
from trtllm_av.runtime import compare as compare_module
from trtllm_av.runtime.cli import main
from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.prompts import demo_prompts, parse_prompts, read_prompts


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out.startswith("{") and self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run the command in this process on the tiny model, with given step costs and its own cache."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(cheap_draft_costs()))
    monkeypatch.setenv("TRTLLM_AV_CACHE", str(tmp_path / "cache"))

    def call(*args: str, model: str | None = None) -> Result:
        common = ["--model", model or str(folder)]
        if not any("av_mode" in arg for arg in args):  # costs are refused where nothing adapts
            common += ["--cost-table", str(costs)]
        monkeypatch.setattr(sys, "argv", ["trtllm-av-run", *common, *args])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return Result(int(exit_info.value.code or 0), captured.out, captured.err)

    return call


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_text_goes_to_stdout_and_figures_to_stderr(run: Run) -> None:
    """Guards against figures in the text that a pipe passes on."""
    result = run("--prompt", "abc", "--max-tokens", "5", "--raw")
    assert result.code == 0
    assert "tokens/s" in result.err and "tokens/s" not in result.out
    as_json = run("--prompt", "abc", "--max-tokens", "5", "--raw", "--json").json
    [output] = as_json["outputs"]
    assert result.out.strip("\n") == output["text"].strip("\n")


def test_json_is_one_object(run: Run) -> None:
    """Guards against missing prompts, and against anything else on standard output."""
    result = run("--prompt", "abc", "--prompt", "你好", "--max-tokens", "6", "--json")
    assert (result.code, result.err) == (0, "")
    outputs = result.json["outputs"]
    assert [output["prompt"] for output in outputs] == ["abc", "你好"]
    for output in outputs:
        assert len(output["token_ids"]) == 6 and output["finish_reason"] == "length"
    assert result.json["tokens"] == 12
    assert result.json["report"]["emitted"] == 12


def test_chat_template_unless_raw(run: Run) -> None:
    """Guards against an instruct model that is given bare text."""
    chat, raw = (
        run("--prompt", "abc", "--max-tokens", "1", "--json", *flags).json["outputs"][0]
        for flags in ([], ["--raw"])
    )
    assert raw["num_prompt_tokens"] == 1  # "abc" is one token
    assert chat["num_prompt_tokens"] == len("<user>") + 1 + len("\n<assistant>")


def test_input_file_in_all_forms(run: Run, tmp_path: Path) -> None:
    """Guards against lines that are skipped, and line parameters that are not applied."""
    path = write(
        tmp_path / "p.jsonl",
        '\ufeff{"prompt": "abc", "sampling_params": {"max_tokens": 2}}',
        "",
        '{"prompt_token_ids": [5, 6, 7]}',
        '{"messages": [{"role": "user", "content": "abc"}]}',
        '{"prompt": "abc"}\r',
    )
    result = run("--input", path, "--max-tokens", "4", "--json", "--concurrency", "2")
    outputs = result.json["outputs"]
    assert [len(output["token_ids"]) for output in outputs] == [2, 4, 4, 4]
    assert outputs[1]["num_prompt_tokens"] == 3
    assert outputs[2]["token_ids"] == outputs[3]["token_ids"]


def test_seeds_differ_by_prompt_and_reproduce(run: Run) -> None:
    """Guards against equal prompts with equal answers, and against a seed without effect."""
    args = ["--prompt", "abc", "--prompt", "abc", "--max-tokens", "12", "--temperature", "1"]
    args += ["--seed", "3", "--json", "--speculative-config", '{"av_mode": "fixed"}']
    first, second = (run(*args).json["outputs"] for _ in range(2))
    tokens = [output["token_ids"] for output in first]
    assert tokens == [output["token_ids"] for output in second]
    assert tokens[0] != tokens[1]


def test_costs_without_adaptation_are_refused(run: Run) -> None:
    """Guards against a cost table that the user believes to be in use."""
    config = ["--speculative-config", '{"av_mode": "fixed"}']
    result = run("--prompt", "abc", *config, "--cost-table", "costs.json")
    assert (result.code, result.out) == (2, "")
    assert "costs.json" in result.err and "'fixed'" in result.err


def test_compare_reports_every_mode(run: Run, folder: Path) -> None:
    """Guards against a figure that is missing where others read it."""
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    args = ["--compare", "--max-tokens", "8", "--speculative-config", json.dumps(config)]
    result = run(*args, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.json["identical"] is True and result.json["prompts"] == 10
    modes = result.json["modes"]
    assert list(modes) == ["none", "fixed", "adaptive"]
    for mode in modes.values():
        assert {
            "tokens_per_second", "tokens", "rounds", "drafted", "verified", "accepted",
            "mean_verify_len", "acceptance_by_position", "depth_min", "depth_max", "budget_min",
            "budget_max",
        } <= mode.keys()  # fmt: skip
    assert modes["fixed"]["acceptance_by_position"] == [1.0, 1.0, 1.0]

    table = run(*args)
    assert table.code == 0
    for text in ("adaptive", "acceptance, position 3", "none and transformers: identical tokens"):
        assert text in table.out


def test_compare_fails_if_tokens_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a difference that is printed and then exits with success."""
    monkeypatch.setattr(compare_module, "transformers_greedy", lambda *args, **options: [[1], [2]])
    result = run("--compare", "--prompt", "abc", "--prompt", "x", "--max-tokens", "3", "--json")
    assert result.code == 1 and result.json["identical"] is False
    assert result.json["differing_prompts"]["none_vs_transformers"] == [0, 1]
    sampled = ["--compare", "--prompt", "x", "--max-tokens", "3", "--temperature", "1", "--json"]
    result = run(*sampled)
    assert result.code == 0 and result.json["identical"] is None


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "no prompt; give --prompt"),
        (["--prompt", ""], 2, "--prompt 1 is empty"),
        (["--prompt", "x", "--input", "y"], 2, "exclude each other"),
        (["--input", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["--prompt", "x", "--temperature", "-1"], 2, "temperature=-1.0: must be ≥ 0"),
        (["--prompt", "x", "--temperature", "nan"], 2, "temperature=nan"),
        (["--prompt", "x", "--temperature", "1e39"], 2, "temperature=1e+39: must be ≤"),
        (["--prompt", "x", "--top-k", str(10**20)], 2, f"top_k={10**20}"),
        (["--prompt", "x", "--repetitions", "3"], 2, "--repetitions 3 has no use"),
        (["--prompt", "x", "--top-p", "0"], 2, "top_p=0.0"),
        (["--prompt", "x", "--max-tokens", "0"], 2, "max_tokens=0"),
        (["--prompt", "x", "--speculative-config", "{"], 2, "cannot read speculative config"),
        (["--prompt", "x", "--speculative-config", '{"k": 1}'], 2, "unknown key 'k'"),
        (["--prompt", "x", "--speculative-config", '{"self": 1}'], 2, "unknown key 'self'"),
        (
            ["--prompt", "x", "--speculative-config", "[" * 100_000],
            2,
            "cannot read speculative config",
        ),
        (
            ["--prompt", "x", "--speculative-config", "1" * 5000],
            2,
            "cannot read speculative config",
        ),
        (["--prompt", "x\udcff"], 2, "character 1, which is no Unicode character"),
        (["--prompt", "x", "--speculative-config", '{"method": "magic"}'], 2, "method='magic'"),
        (
            ["--prompt", "x", "--speculative-config", '{"num_speculative_tokens": 0}'],
            2,
            "num_speculative_tokens=0",
        ),
        (["--prompt", "x" * 3000], 2, "max_seq_len=256"),
        (["--compare", "--speculative-config", '{"av_mode": "fixed"}'], 2, "nothing to compare"),
        (["--prompt", "x", "--cost-table", "nowhere.json"], 1, "nowhere.json"),
    ],
)
def test_mistakes_are_one_line(run: Run, args: list[str], code: int, message: str) -> None:
    """Guards against tracebacks, and against mistakes that pass as success."""
    result = run(*args)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert message in result.err


def test_unreadable_models(run: Run, tmp_path: Path) -> None:
    """Guards against tracebacks from inside a loader."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in ("nowhere", "empty", "broken"):
        result = run("--prompt", "x", model=str(tmp_path / name))
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert result.err.startswith("error: ") and name in result.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ("{}", "line 2: .*exactly one of"),
        ('{"prompt": ""}', "line 2: prompt=''"),
        ('{"prompt": 5}', "line 2: prompt=5"),
        ('{"prompt": "x", "promt": "y"}', "line 2: unknown key 'promt'"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "line 2: .*exactly one of"),
        ('{"prompt_token_ids": [1, true]}', "line 2: prompt_token_ids.1=True"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages.0.content"),
        ("[" * 100_000, "line 2 is"),
        ('{"prompt_token_ids": [' + "1" * 5000 + "]}", "line 2 cannot be read"),
        ('{"prompt": "a", "prompt": "b"}', "line 2 cannot be read: key 'prompt' stands twice"),
    ],
)
def test_malformed_lines_are_named(line: str, message: str) -> None:
    """Guards against errors that do not say which of a thousand lines is wrong."""
    with pytest.raises(UsageError, match=f"^p.jsonl {message}") as error:
        parse_prompts('{"prompt": "fine"}\n' + line, "p.jsonl")
    assert len(str(error.value)) < 300


def test_unusable_prompt_files(run: Run, tmp_path: Path) -> None:
    """Guards against empty or binary files being taken for no work to do."""
    with pytest.raises(UsageError, match="holds no prompt"):
        read_prompts(Path(write(tmp_path / "empty.jsonl", "", "  ")))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    path = write(tmp_path / "p.jsonl", '{"prompt": "x", "sampling_params": {"top_p": 2}}')
    result = run("--input", path)
    assert result.code == 2 and "p.jsonl line 1" in result.err and "top_p=2" in result.err
    path = write(tmp_path / "p.jsonl", '{"messages": [{"role": "tool", "content": "x"}]}')
    result = run("--input", path)
    assert result.code == 2 and result.err.startswith("error: p.jsonl line 1: the chat template")


def test_a_recording_does_not_overwrite_the_prompts(run: Run, tmp_path: Path) -> None:
    """Guards against prompts that are lost to a slip of the command line."""
    path = write(tmp_path / "p.jsonl", '{"prompt": "x"}')
    result = run("--input", path, "--record", f"{tmp_path}/../{tmp_path.name}/p.jsonl")
    assert result.code == 2 and "would overwrite --input" in result.err
    assert Path(path).read_text() == '{"prompt": "x"}'


def test_ten_demo_prompts_are_shipped() -> None:
    """Guards against package data that stays behind in an installation."""
    texts = [record.prompt for record in demo_prompts()]
    assert len(texts) == len(set(texts)) == 10 and None not in texts


def test_fallbacks_are_json(run: Run, tmp_path: Path) -> None:
    """Guards against a report that cannot be printed as soon as an engine fell back."""
    params = {"allowed_token_ids": [5], "bad_words_ids": [[5, 5]]}
    path = write(tmp_path / "p.jsonl", json.dumps({"prompt": "x", "sampling_params": params}))
    result = run("--input", path, "--json")
    assert result.code == 0
    assert result.json["outputs"][0]["stop_reason"] == "no token is allowed"
    assert result.json["report"]["fallbacks"] == {"no token is allowed": 1}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_behind_stdout(folder: Path, form: list[str]) -> None:
    """Guards against lost output that is a traceback, or no error at all."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    config = ["--speculative-config", '{"av_mode": "off"}']
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trtllm_av.runtime.cli", "--model", str(folder), "--prompt", "x",
             "--max-tokens", "2", *config, *form],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_stdout_that_knows_no_unicode(folder: Path) -> None:
    """Guards against a text that is lost because a terminal cannot show one of its characters."""
    done = subprocess.run(
        [sys.executable, "-m", "trtllm_av.runtime.cli", "--model", str(folder), "--prompt", "é",
         "--prompt", "x", "--max-tokens", "2", "--speculative-config", '{"av_mode": "off"}'],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "\\xe9" in done.stdout


def test_usage_errors_come_before_heavy_imports() -> None:
    """Guards against a wrong flag that is reported only after seconds of loading."""
    code = (
        "import sys; sys.argv = ['trtllm-av-run', '--prompt', 'x', '--top-p', '0']\n"
        "from trtllm_av.runtime.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
