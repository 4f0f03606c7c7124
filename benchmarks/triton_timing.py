"""One timed run of requests, and the figures that are read off it: the same for the API and for a server.

Invariants: a run knows only what a client sees, when each request started and when which tokens arrived, so
no figure can favour one side; ``full_tokens_per_second`` looks at the time in which every place is taken,
``tokens_per_second`` at the whole run with its end, when the last requests run in a small batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean


@dataclass
class RequestTiming:
    """``responses`` are (second, tokens that it brought); an end-of-sequence token counts."""

    start: float
    responses: list[tuple[float, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.responses[-1][0]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.responses)


@dataclass
class LoadRun:
    """``concurrency`` places, each of which takes the next request as soon as its last one ended.

    ``cpu_seconds``: by process, what the run took of the cores.
    """

    concurrency: int
    requests: list[RequestTiming]
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        return max(r.end for r in self.requests) - min(r.start for r in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def full_window(self) -> tuple[float, float]:
        """From the start of the request that takes the last place to the first end that no request follows."""
        starts = sorted(request.start for request in self.requests)
        ends = sorted(request.end for request in self.requests)
        return starts[self.concurrency - 1], ends[-self.concurrency]

    @property
    def full_tokens_per_second(self) -> float:
        """Over ``full_window``."""
        begin, end = self.full_window
        arrived = sum(
            tokens
            for request in self.requests
            for second, tokens in request.responses
            if begin < second <= end
        )
        return arrived / (end - begin)

    @property
    def mean_in_flight(self) -> float:
        """Requests in flight in ``full_window``; less than ``concurrency`` if the client leaves places empty."""
        begin, end = self.full_window
        overlaps = (
            min(request.end, end) - max(request.start, begin)
            for request in self.requests
            if request.start < end and request.end > begin
        )
        return sum(overlaps) / (end - begin)

    @property
    def first_token_ms(self) -> float:
        """Mean over the requests."""
        return 1e3 * fmean(request.responses[0][0] - request.start for request in self.requests)

    @property
    def inter_token_ms(self) -> float:
        """From the first response to the last, over the tokens after the first response."""
        spans = sum(request.end - request.responses[0][0] for request in self.requests)
        return 1e3 * spans / max(self.tokens - sum(r.responses[0][1] for r in self.requests), 1)
