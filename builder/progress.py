"""What a build is doing, on standard error: its stages as lines, TensorRT's phases as a bar.

Invariants: TensorRT may report from several threads; on anything but a terminal no bar is drawn; a stopped
bar leaves no line behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class PhaseObserver(Protocol):
    """Told of TensorRT's phases, which nest."""

    def start(self, phase: str, parent: str | None, num_steps: int) -> None: ...

    def advance(self, phase: str, step: int) -> None: ...

    def finish(self, phase: str) -> None: ...


class BuildProgress:
    """Stages and phases of one build."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(
            *columns,
            console=console,
            transient=True,
            disable=is_quiet or not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> BuildProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Says that ``name`` begins; bars of phases that it leaves unfinished are removed at its end."""
        self.say(f"{name} …")
        try:
            yield
        finally:
            for phase in list(self._tasks):
                self.finish(phase)

    def say(self, line: str) -> None:
        """One line about the build."""
        if not self._is_quiet:
            print(line, file=sys.stderr, flush=True)

    def start(self, phase: str, parent: str | None, num_steps: int) -> None:
        indent = "  " if parent else ""
        self._tasks[phase] = self._bar.add_task(indent + phase, total=num_steps)

    def advance(self, phase: str, step: int) -> None:
        if phase in self._tasks:
            self._bar.update(self._tasks[phase], completed=step + 1)

    def finish(self, phase: str) -> None:
        task = self._tasks.pop(phase, None)
        if task is not None:
            self._bar.remove_task(task)


def progress_monitor(trt: Any, observer: PhaseObserver) -> Any:
    """TensorRT's ``IProgressMonitor`` in front of ``observer``; it has to outlive the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            observer.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            observer.advance(phase_name, step)
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            observer.finish(phase_name)

    return Monitor()
