"""How a console script ends: every expected error as one line and an exit code.

Exit codes: 0 success, 1 a failed job, 2 wrong usage. Invariants: a user's mistake is one line on standard
error, never a traceback; output that could not be written, for instance on a full disk, is a failed job;
SIGTERM ends the command as an error does, so that what it was writing is tidied up.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from trtllm_av.runtime.errors import AdaptiveVerificationError, RequestError, UsageError


def run_console(command: Callable[[], object]) -> None:
    """Run ``command`` as a process does; leaves by SystemExit where it did not succeed."""
    signal.signal(signal.SIGTERM, _exit)
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts hold what a terminal's encoding may not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # here, where an error can still be told
    except AdaptiveVerificationError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (UsageError, RequestError)) else 1)
    except BrokenPipeError:  # who read the output has seen enough
        _discard_output()
        sys.exit(1)
    except OSError as error:
        reason = error.strerror or error
        line = f"cannot write the output: {reason}"
        if error.filename is not None:
            line = f"cannot use {str(error.filename)!r}: {reason}; mend it or name another"
        print(f"error: {line}", file=sys.stderr)
        _discard_output()
        sys.exit(1)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)  # as a shell names it


def _discard_output() -> None:
    """Drop what standard output still buffers: the interpreter's last flush would fail again, with 120."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), sys.stdout.fileno())
