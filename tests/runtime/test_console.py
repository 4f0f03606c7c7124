"""How every command ends: one line, an exit code, nothing lost in silence."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_av.runtime.console import run_console
from trtllm_av.runtime.errors import BuildError, RequestError, UsageError

COMMANDS = (
    "trtllm_av.runtime.cli",
    "trtllm_av.runtime.bench_cli",
    "trtllm_av.builder.cli",
    "trtllm_av.builder.doctor_cli",
    "trtllm_av.triton_model_repo.serve",
)


def raising(error: Exception) -> Callable[[], object]:
    def command() -> object:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("a\nb"), 2, "error: a b"),
        (RequestError("too long"), 2, "error: too long"),
        (BuildError("no"), 1, "error: no"),
        (OSError(errno.ENOSPC, "full"), 1, "error: cannot write the output: full"),
        (
            PermissionError(errno.EACCES, "denied", "/x"),
            1,
            "error: cannot use '/x': denied; mend it or name another",
        ),
    ],
)
def test_an_expected_error_is_one_line(
    error: Exception,
    code: int,
    line: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a traceback for a user's mistake, and a file's trouble blamed on the output."""
    monkeypatch.setattr("trtllm_av.runtime.console._discard_output", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of the process that tests
    with pytest.raises(SystemExit) as exit_info:
        run_console(raising(error))
    assert exit_info.value.code == code
    assert capfd.readouterr().err == line + "\n"


def test_output_on_a_full_disk_is_a_failed_job() -> None:
    """Guards against exit code 0 or 120 for a report that nobody got."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    code = "from trtllm_av.runtime.console import run_console; run_console(lambda: print('x'))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_a_closed_pipe_ends_quietly() -> None:
    """Guards against a traceback behind `| head`."""
    code = "from trtllm_av.runtime.console import run_console; run_console(lambda: print('x'))"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_sigterm_lets_a_command_tidy_up() -> None:
    """Guards against half a build that stays on the disk."""
    code = (
        "import os, signal, time\n"
        "from trtllm_av.runtime.console import run_console\n"
        "def command():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(10)\n"
        "    finally:\n"
        "        print('tidy')\n"
        "run_console(command)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "tidy\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_this_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command whose errors are tracebacks."""
    module = importlib.import_module(name)
    ended: list[object] = []
    monkeypatch.setattr(module, "run_console", ended.append)
    module.main()
    assert len(ended) == 1
