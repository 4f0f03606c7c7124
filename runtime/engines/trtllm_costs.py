"""What a step of a TensorRT-LLM engine costs, by the tokens it verifies, from the executor's statistics.

The executor reports a latency for every iteration but not which drafts it verified; ``av_trace`` says that
for every step of the engine. Both count steps, so one shift brings them together; it is right while the
number of generating requests agrees.

Invariants: a step that had prompt tokens is no sample; a shift that stops agreeing is dropped with its
pending steps and searched again, counted in ``num_realigned``; the costs contain the drafter's, whose
levels all run whatever is verified.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median
from typing import NamedTuple

from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.cost_table import CostTable
from trtllm_av.runtime.engines.trtllm_trace import ROUND_MODULUS, is_later

#: Sizes are rounded up to a multiple of this, as the plugin rounds totals so that graphs are reused.
TOKEN_MULTIPLE = 8
MIN_SIZES = 3
MIN_SAMPLES = 3
_KEPT_SAMPLES = 32
_KEPT_STEPS = 256
_LARGEST_SHIFT = 8
_AGREEMENTS = 4
_COMPLETE_AFTER = 2  # results of one step arrive over this many steps
_SEARCHED_ITERATIONS = _LARGEST_SHIFT + _AGREEMENTS + _COMPLETE_AFTER


class Iteration(NamedTuple):
    """One iteration of the executor that scheduled something: its number among those, and its cost."""

    ordinal: int
    generating: int
    context_tokens: int
    latency_ms: float


class _Step(NamedTuple):
    requests: int
    tokens: int


class StepCosts:
    """Collects samples and makes a cost model of them; ``num_positions`` K is that of the engine."""

    def __init__(self, num_positions: int) -> None:
        self.num_realigned = 0
        self.num_samples = 0
        self._num_positions = num_positions
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._iterations: deque[Iteration] = deque(maxlen=_KEPT_STEPS)
        self._shift: int | None = None
        self._newest: int | None = None
        self._samples: dict[int, deque[float]] = {}

    def add_row(self, round: int, verified_len: int) -> None:
        """A request took part in ``round`` with ``verified_len`` drafts and one token beside them."""
        step = self._steps.get(round, _Step(0, 0))
        self._steps[round] = _Step(step.requests + 1, step.tokens + 1 + verified_len)
        if self._newest is None or is_later(round, self._newest):
            self._newest = round
        while len(self._steps) > _KEPT_STEPS:
            self._steps.popitem(last=False)

    def add_iterations(self, iterations: list[Iteration]) -> None:
        """Iterations in their order, then match what can be matched."""
        self._iterations.extend(iterations)
        if self._shift is None:
            self._shift = self._find_shift()
        while self._shift is not None and self._iterations:
            iteration = self._iterations[0]
            round = (iteration.ordinal + self._shift) % ROUND_MODULUS
            if not self._is_complete(round):
                return
            self._iterations.popleft()
            step = self._steps.get(round)
            if step is None or iteration.context_tokens:
                continue
            if step.requests != iteration.generating:
                self._shift = None
                self.num_realigned += 1
                self._iterations.clear()
                self._steps.clear()
                return
            size = -(-step.tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
            kept = self._samples.setdefault(size, deque(maxlen=_KEPT_SAMPLES))
            kept.append(iteration.latency_ms)
            self.num_samples += 1

    def _is_complete(self, round: int) -> bool:
        if self._newest is None:
            return False
        return 0 <= (self._newest - _COMPLETE_AFTER - round) % ROUND_MODULUS < ROUND_MODULUS // 2

    def _find_shift(self) -> int | None:
        """The smallest shift from round to ordinal at which the counts agree, None if there is none yet."""
        # With fewer, only shifts far off would have enough steps to agree on.
        if self._newest is None or len(self._iterations) < _SEARCHED_ITERATIONS:
            return None
        guess = self._newest - self._iterations[-1].ordinal
        for distance in sorted(range(-_LARGEST_SHIFT, _LARGEST_SHIFT + 1), key=abs):
            pairs = [
                (iteration.generating, self._steps[round].requests)
                for iteration in self._iterations
                if not iteration.context_tokens
                and (round := (iteration.ordinal + guess + distance) % ROUND_MODULUS) in self._steps
                and self._is_complete(round)
            ]
            if len(pairs) >= _AGREEMENTS and all(ours == theirs for theirs, ours in pairs):
                return guess + distance
        return None

    def model(self) -> CostModel | None:
        """Costs from the samples, None before ``MIN_SIZES`` sizes have ``MIN_SAMPLES`` of them.

        Raises CostTableError if they cannot steer, for instance because they are flat.
        """
        points = [
            [size, median(kept)]
            for size, kept in sorted(self._samples.items())
            if len(kept) >= MIN_SAMPLES
        ]
        if len(points) < MIN_SIZES:
            return None
        table = {
            "unit": "ms",
            "graph_limit_tokens": 0,
            "verify_ms_by_tokens": points,
            "draft_ms_by_requests": [[1, 0.0]],
        }
        return CostModel(CostTable.load(table), num_positions=self._num_positions, is_block=True)
