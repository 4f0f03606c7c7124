"""Exact joint law of what an engine emits, by enumerating every random draw of its own rounds.

The product's engine runs unchanged; only its random source is replaced by one that follows a script of
choices and records which others were possible. After each step equal states are merged, so that the
enumeration grows with the number of states, not of paths.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trtllm_av.runtime.random_source import RandomKeys
from trtllm_av.runtime.scheduler import Engine

Outputs = tuple[tuple[int, ...], ...]


@dataclass
class EnumeratingSource:
    """Follows ``script``, then always takes the first possible outcome; records the alternatives."""

    script: list[int] = field(default_factory=list)
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def restart(self, script: list[int]) -> None:
        self.script, self.probability, self.taken, self.widths = script, 1.0, [], []

    def _choose(self, probabilities: list[float]) -> int:
        place = len(self.taken)
        choice = self.script[place] if place < len(self.script) else 0
        self.taken.append(choice)
        self.widths.append(len(probabilities))
        self.probability *= probabilities[choice]
        return choice

    def _uniforms(self, thresholds: list[list[float]], keys: RandomKeys) -> list[float]:
        """A number in [0, 1) for each row, one per cell between the thresholds of all rows with its key.

        Rows with equal keys read one number, as they would from the product's own source.
        """
        names = _names(keys)
        values: list[float] = []
        drawn: dict[tuple[int, ...], float] = {}
        for name in names:
            if name not in drawn:
                cuts = {
                    cut
                    for row, other in zip(thresholds, names, strict=True)
                    if other == name
                    for cut in row
                    if 0.0 < cut < 1.0
                }
                edges = [0.0, *sorted(cuts), 1.0]
                place = self._choose([b - a for a, b in itertools.pairwise(edges)])
                drawn[name] = 0.5 * (edges[place] + edges[place + 1])
            values.append(drawn[name])
        return values

    def categorical(self, probabilities: Tensor, keys: RandomKeys) -> Tensor:
        cumulative = [_running_sums(row) for row in probabilities.tolist()]
        uniforms = self._uniforms(cumulative, keys)
        return torch.tensor(
            [
                next((token for token, edge in enumerate(edges) if u < edge), len(edges) - 1)
                for u, edges in zip(uniforms, cumulative, strict=True)
            ],
            dtype=torch.int64,
        )

    def accept(
        self, target_probability: Tensor, draft_probability: Tensor, keys: RandomKeys
    ) -> Tensor:
        chances = (target_probability / draft_probability).tolist()
        uniforms = self._uniforms([[chance] for chance in chances], keys)
        return torch.tensor([u < chance for u, chance in zip(uniforms, chances, strict=True)])

    def alternatives(self) -> list[list[int]]:
        """Scripts of all paths that leave this one at a choice it was free to make."""
        return [
            [*self.taken[:place], other]
            for place in range(len(self.script), len(self.taken))
            for other in range(1, self.widths[place])
        ]


def _names(keys: RandomKeys) -> list[tuple[int, ...]]:
    columns = (keys.seeds, keys.requests, keys.rounds, keys.positions)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _running_sums(row: list[float]) -> list[float]:
    """Cumulative probabilities; the last token that has any ends at 1."""
    sums = list(itertools.accumulate(row))
    last = max(token for token, p in enumerate(row) if p > 0.0)
    return [1.0 if token >= last else value for token, value in enumerate(sums)]


@dataclass
class Enumeration:
    """``law``: probability of each joint output; ``num_paths``: rounds that were run to get it.

    ``refit_rounds``: rounds that ran with refitted coefficients.
    """

    law: dict[Outputs, float]
    num_paths: int
    num_rounds: int
    depths: set[int]
    trimmed_rounds: int
    refit_rounds: int
    explored_rounds: int = 0
    uniform_rounds: int = 0
    early_stops: int = 0


class _Pickler(pickle.Pickler):
    """Stores tensors as arrays: torch's own way is meant for files and takes most of the time."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _store(engine: Engine) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(engine)
    return buffer.getvalue()


def enumerate_engine(engine: Engine, num_requests: int, *, max_steps: int = 64) -> Enumeration:
    """The joint law of the outputs of requests 1 … ``num_requests``, already submitted to ``engine``."""
    source = engine.source
    assert isinstance(source, EnumeratingSource)
    start: Outputs = ((),) * num_requests
    level: dict[bytes, tuple[bytes, Outputs, float]] = {b"": (_store(engine), start, 1.0)}
    law: dict[Outputs, float] = defaultdict(float)
    result = Enumeration(law, 0, 0, set(), 0, 0)
    while level:
        result.num_rounds += 1
        assert result.num_rounds <= max_steps, "the engine does not finish"
        following: dict[bytes, tuple[bytes, Outputs, float]] = {}
        for state, outputs, weight in level.values():
            scripts: list[list[int]] = [[]]
            while scripts:
                script = scripts.pop()
                run: Engine = pickle.loads(state)
                run_source = run.source
                assert isinstance(run_source, EnumeratingSource)
                run_source.restart(script)
                result.refit_rounds += run.controller.estimator.num_refits > 0
                counted = _counts(run)
                events = run.step()
                explored, uniform, stopped = (
                    after - before for before, after in zip(counted, _counts(run), strict=True)
                )
                result.explored_rounds += explored
                result.uniform_rounds += uniform
                result.early_stops += stopped
                result.num_paths += 1
                scripts += run_source.alternatives()
                probability = weight * run_source.probability
                report = run.report()
                if report.rounds:
                    result.depths.add(report.depth_sum)
                    result.trimmed_rounds += report.trimmed > 0
                grown = [list(tokens) for tokens in outputs]
                for event in events:
                    grown[event.request_id - 1] += event.token_ids
                after = tuple(tuple(tokens) for tokens in grown)
                if not run.has_work:
                    law[after] += probability
                    continue
                _forget(run)
                key = pickle.dumps((after, _state_of(run)))
                merged = following.get(key)
                if merged is None:
                    following[key] = (_store(run), after, probability)
                else:
                    following[key] = (merged[0], after, merged[2] + probability)
        level = following
    return result


def _counts(engine: Engine) -> tuple[int, int, int]:
    """Rounds so far that explored, that verified all for want of a gain, and that stopped drafting."""
    controller = engine.controller
    explored = 0 if controller.exploration is None else controller.exploration.num_rounds
    return explored, controller.num_uniform_rounds, engine.round.num_early_stops


def _forget(engine: Engine) -> None:
    """Drop what records the past and does not shape the future."""
    engine.reset_report()
    engine.source.restart([])  # type: ignore[attr-defined]


def _state_of(engine: Engine) -> object:
    """Everything that later rounds read, as plain values."""
    table = engine.slots
    live = [
        (slot, table.history[slot, : int(table.lens[slot])].tolist(), int(table.rounds[slot]))
        for slot in sorted(engine._live)
    ]
    controller = engine.controller
    feedback = controller.feedback
    assert feedback is not None
    rows = feedback._num_rows
    pending = [
        feedback._features[:rows].tolist(),
        feedback._confidence[:rows].tolist(),
        feedback._overlap[:rows].tolist(),
        feedback._lens[:, :rows].tolist(),
        None if feedback._overlaps is None else feedback._overlaps[:rows].tolist(),
    ]
    return (
        live,
        pending,
        [_plain(part) for part in (controller.history, controller.depth, feedback)],
        None if controller.recent is None else _plain(controller.recent),
        # What it explored so far is only told, never read.
        None if controller.exploration is None else _plain(controller.exploration, is_private=True),
        controller.estimator.state_dict(),
        controller.estimator.label_counts.tolist(),
    )


WORK_SPACE = ("_features", "_confidence", "_overlap", "_overlaps", "_lens")


def _plain(part: object, *, is_private: bool = False) -> dict[str, object]:
    """The attributes of ``part`` that are values; sub-objects and work space are not its state.

    ``is_private`` leaves public ones out.
    """
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(part).items()
        if isinstance(value, (int, float, np.ndarray, type(None)))
        and name not in WORK_SPACE
        and (name.startswith("_") or not is_private)
    }


def product_law(
    next_law: Callable[[tuple[int, ...]], list[float]], max_tokens: int
) -> dict[tuple[int, ...], float]:
    """The target's own law of ``max_tokens`` tokens; ``next_law`` maps an output to probabilities."""
    law = {(): 1.0}
    for _ in range(max_tokens):
        law = {
            (*output, token): weight * p
            for output, weight in law.items()
            for token, p in enumerate(next_law(output))
            if p > 0.0
        }
    return law
