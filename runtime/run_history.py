"""What an engine did round by round, as JSON Lines: written while it runs, read by the report.

One object a line: ``run`` first (format, mode, K, features), then ``round`` and ``refit`` in order, and
``report`` (all totals) last; a file whose writer was ended lacks the last line and is still readable.

Invariants: a round stands in the file once; what a line lacks, or says in another type, is an error with
its number, never a guess; a disk that takes no more ends the run with an error that names the recording.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.errors import RecordingError, UsageError
from trtllm_av.runtime.observability import Refit
from trtllm_av.runtime.round_log import RoundBatch
from trtllm_av.runtime.scheduler import Engine

_FORMAT = 1
_WHOLE = (
    "live", "depth", "budget", "decided_budget", "drafted", "verified", "accepted", "emitted",
    "explored", "version",
)  # fmt: skip
_TIMES = ("predicted_ms", "measured_ms")


class RunRecorder:
    """Writes the rounds of ``engine`` to ``path`` until it is closed.

    UsageError if that cannot be opened, RecordingError where it cannot be written any more.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        controller = engine.controller
        self._path = path
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write the recording {str(path)!r} ({error.strerror}); name another file"
            ) from None
        engine.report()  # leaves nothing in the log that ran before
        self._engine, self._num_rounds = engine, 0
        self._first_round = engine.observer.num_rounds
        self._write(
            "run",
            {
                "format": _FORMAT,
                "mode": controller.mode,
                "num_positions": controller.num_positions,
                "num_features": controller.estimator.coefficients.size
                - controller.estimator.num_positions,
            },
        )
        estimator = controller.estimator
        self._write_refit(Refit(self._first_round, estimator.version, estimator.coefficients))
        engine.observer.listener = self._take

    def close(self) -> None:
        """Write what is still in the engine's log, and the report."""
        try:
            report = self._engine.report()
            self._write("report", report.to_dict())
        finally:
            self._engine.observer.listener = None
            self._close_file()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, batch: RoundBatch, refits: list[Refit]) -> None:
        for index in range(len(batch)):
            self._num_rounds += 1
            line: dict[str, object] = {"round": self._num_rounds}
            line |= {name: int(getattr(batch, name)[index]) for name in _WHOLE}
            line |= {"probe": bool(batch.is_probe[index])}
            line |= {name: _number(getattr(batch, name)[index]) for name in _TIMES}
            line["verify_lens"] = batch.verify_lens[index].tolist()
            self._write("round", line)
        for refit in refits:
            self._write_refit(refit)

    def _write_refit(self, refit: Refit) -> None:
        coefficients = [float(value) for value in refit.coefficients]
        round_ = refit.round - self._first_round
        self._write(
            "refit", {"round": round_, "version": refit.version, "coefficients": coefficients}
        )

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        except OSError as error:
            raise self._failure(error) from None

    def _close_file(self) -> None:
        try:
            self._file.close()  # writes what is buffered
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> RecordingError:
        return RecordingError(
            f"cannot write the recording {str(self._path)!r} ({error.strerror}); free space there or "
            "name another file"
        )


def _number(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None


def _check_whole(line: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(line[name], int) or line[name] < 0:
            raise ValueError(f"{name}={line[name]!r} is no whole number")


def _check_finite(name: str, values: object) -> None:
    """Raise ValueError unless ``values`` is a list of finite numbers."""
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    ):
        raise ValueError(f"{name}={values!r} are no finite numbers")


def _check_round(line: dict[str, Any]) -> None:
    _check_whole(line, (*_WHOLE, "round", "probe"))
    for name in _TIMES:
        _check_finite(name, [] if line[name] is None else [line[name]])
    _check_finite("verify_lens", line["verify_lens"])


def _check_calibration(line: dict[str, Any]) -> None:
    """What the reliability diagram reads of a report."""
    bins = line.get("calibration") or []
    if not isinstance(bins, list) or not all(isinstance(one, dict) for one in bins):
        raise ValueError(f"calibration={bins!r} is no list of bins")
    for one in bins:
        _check_finite("a bin", [one["confidence"], one["acceptance"], one["count"]])
    _check_finite("calibration_error", [line["calibration_error"]] if bins else [])


@dataclass(slots=True)
class RecordedRun:
    """A recording: ``rounds`` maps each name of a ``round`` line to its values [N] (f64, NaN for null;
    ``verify_lens`` [N, K+1]); ``refits`` are (round, coefficients); ``report`` is empty if the writer was
    ended before it could close."""

    name: str
    num_positions: int
    num_features: int
    mode: str
    rounds: dict[str, NDArray[np.float64]]
    refits: list[tuple[int, list[float]]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> RecordedRun:
        """Read a file of ``RunRecorder``; UsageError with the line for anything else."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise UsageError(
                f"cannot read the recording {str(path)!r} ({reason}); name a file written by "
                "trtllm-av-run --record"
            ) from None
        if not lines:
            raise UsageError(f"the recording {str(path)!r} is empty; record a run again")
        head: dict[str, Any] = {}
        table: dict[str, list[Any]] = {name: [] for name in (*_WHOLE, *_TIMES, "round", "probe")}
        table["verify_lens"] = []
        run = cls(path.stem, 0, 0, "", {})
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                kind = line["kind"]
                if number == 1 and (kind != "run" or line["format"] != _FORMAT):
                    raise ValueError(f"it does not start a recording of format {_FORMAT}")
                if kind == "run":
                    _check_whole(line, ("num_positions", "num_features"))
                    head = line
                elif kind == "round":
                    _check_round(line)
                    for name, values in table.items():
                        values.append(line[name])
                elif kind == "refit":
                    _check_finite("coefficients", line["coefficients"])
                    run.refits.append(
                        (int(line["round"]), [float(c) for c in line["coefficients"]])
                    )
                elif kind == "report":
                    _check_calibration(line)
                    run.report = line
                else:
                    raise ValueError(f"unknown kind {kind!r}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if number == len(lines) and number > 1 and not text.endswith(("}", "]")):
                    break  # the writer was ended in the middle of its last line
                reason = f"no {error}" if isinstance(error, KeyError) else error
                raise UsageError(
                    f"line {number} of the recording {str(path)!r} cannot be read: {reason}; "
                    "record the run again"
                ) from None
        try:
            run.num_positions, run.num_features = head["num_positions"], head["num_features"]
            run.mode = head["mode"]
            run.rounds = {
                name: np.array([np.nan if value is None else value for value in values], np.float64)
                for name, values in table.items()
            }
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(
                f"the recording {str(path)!r} does not hold what it should ({error}); record it again"
            ) from None
        return run
