"""A table of step costs as a user writes it or a profile measures it, checked once.

Format (JSON): ``{"unit": "ms", "graph_limit_tokens": int, "verify_ms_by_tokens": [[tokens, ms], …]}`` and
one of ``"draft_ms_by_requests": [[requests, ms], …]`` (a draft of full depth) or
``"draft_ms_by_requests_and_depth": [[requests, depth, ms], …]`` (depth 0: keeping the drafter's cache up
to date). ``"source"`` is free text; ``"key"`` names what was measured, see ``ProfileKey``.

Invariants: whatever is wrong with a table is one line with the value and the remedy, raised before the
first round; a table that cannot steer (flat after the running maximum) is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

from trtllm_av.runtime.errors import CostTableError
from trtllm_av.runtime.strict_json import parse_json

_KEYS = {
    "source",
    "key",
    "unit",
    "graph_limit_tokens",
    "verify_ms_by_tokens",
    "draft_ms_by_requests",
    "draft_ms_by_requests_and_depth",
}


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a cost table was measured on; any difference makes it foreign."""

    model_digest: str
    executor: str
    device: str
    dtype: str
    num_threads: int

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """The first field in which ``other`` differs, as ``name='theirs' (this engine: 'ours')``."""
        for name, ours in asdict(self).items():
            if other.get(name) != ours:
                return f"{name}={other.get(name)!r} (this engine: {ours!r})"
        return None


@dataclass(frozen=True, slots=True)
class CostTable:
    """Checked measurements, in ms, sorted by size.

    ``verify`` holds (tokens, ms), ``draft`` (requests, depth, ms) where ``depth`` is None for a draft of
    full depth. Up to ``graph_limit_tokens`` the tokens listed are the captured sizes (0: none captured).
    """

    graph_limit_tokens: int
    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, int | None, float], ...]
    key: ProfileKey | None = None

    def to_json(self) -> dict[str, Any]:
        """The format of the module docstring."""
        table: dict[str, Any] = {
            "unit": "ms",
            "graph_limit_tokens": self.graph_limit_tokens,
            "verify_ms_by_tokens": [list(point) for point in self.verify],
        }
        if self.draft[0][1] is None:
            table["draft_ms_by_requests"] = [[requests, ms] for requests, _, ms in self.draft]
        else:
            table["draft_ms_by_requests_and_depth"] = [list(point) for point in self.draft]
        if self.key is not None:
            table["key"] = asdict(self.key)
        return table

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any], key: ProfileKey | None = None
    ) -> CostTable:
        """Read and check a file or an object; ``key`` refuses a table measured on something else."""
        if isinstance(source, Mapping):
            return cls._parse(source, "cost table", key)
        try:
            data = parse_json(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise CostTableError(
                f"cannot read cost table {str(source)!r} ({error.strerror}); give the path of a JSON file"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CostTableError(
                f"cannot read cost table {str(source)!r} ({error}); measure it again"
            ) from None
        if not isinstance(data, Mapping):
            raise CostTableError(
                f"cost table {str(source)!r} holds a {type(data).__name__}, not an object"
            )
        return cls._parse(data, f"cost table {str(source)!r}", key)

    @classmethod
    def _parse(cls, data: Mapping[str, Any], name: str, key: ProfileKey | None) -> CostTable:
        for unknown in data.keys() - _KEYS:
            raise CostTableError(f"{name}: unknown key {unknown!r}; remove it")
        if data.get("unit") != "ms":
            raise CostTableError(f"{name}: unit={data.get('unit')!r}; convert the costs to 'ms'")
        limit = data.get("graph_limit_tokens")
        if not _is_int(limit) or limit < 0:
            raise CostTableError(
                f"{name}: graph_limit_tokens={limit!r}; give the largest captured size, 0 without graphs"
            )
        verify = [(tokens, ms) for (tokens,), ms in _points(data, "verify_ms_by_tokens", 1, name)]
        for tokens, ms in verify:
            if ms == 0.0:
                raise CostTableError(
                    f"{name}: verify_ms_by_tokens has 0 ms at {tokens} tokens; no step is free, measure it"
                )
        if max(ms for _, ms in verify) == verify[0][1]:
            raise CostTableError(
                f"{name}: verify_ms_by_tokens is flat at {verify[0][1]} ms, so more drafts would never cost"
                " anything; measure more sizes, or switch adaptive verification off"
            )
        draft: list[tuple[int, int | None, float]]
        has_depth = "draft_ms_by_requests_and_depth" in data
        if has_depth == ("draft_ms_by_requests" in data):
            raise CostTableError(
                f"{name}: give exactly one of draft_ms_by_requests and draft_ms_by_requests_and_depth"
            )
        if has_depth:
            points = _points(data, "draft_ms_by_requests_and_depth", 2, name)
            draft = [(requests, depth, ms) for (requests, depth), ms in points]
            if all(depth == 0 for _, depth, _ in draft):
                raise CostTableError(
                    f"{name}: draft_ms_by_requests_and_depth lists no depth above 0"
                )
        else:
            points = _points(data, "draft_ms_by_requests", 1, name)
            draft = [(requests, None, ms) for (requests,), ms in points]
        return cls(limit, tuple(verify), tuple(draft), _parse_key(data.get("key"), name, key))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_key(data: object, name: str, expected: ProfileKey | None) -> ProfileKey | None:
    """The table's key; a hand-written table may have none, a wrong one is refused."""
    if data is None:
        return None
    names = {field.name for field in fields(ProfileKey)}
    if not isinstance(data, Mapping) or set(data) != names:
        raise CostTableError(f"{name}: key={data!r}; it must hold exactly {sorted(names)}")
    difference = expected.difference(data) if expected is not None else None
    if difference is not None:
        raise CostTableError(f"{name} was measured on {difference}; measure it here")
    return ProfileKey(**data)


def _points(
    data: Mapping[str, Any], field: str, num_sizes: int, name: str
) -> list[tuple[tuple[int, ...], float]]:
    """The points of one curve as ((sizes …), ms), sorted; each is checked."""
    rows = data.get(field)
    if not isinstance(rows, list | tuple) or not rows:
        raise CostTableError(f"{name}: {field}={rows!r}; list at least one measurement")
    points: dict[tuple[int, ...], float] = {}
    for row in rows:
        if not isinstance(row, list | tuple) or len(row) != num_sizes + 1:
            raise CostTableError(
                f"{name}: {field} has {row!r}; each entry holds {num_sizes + 1} numbers"
            )
        *sizes, ms = row
        # A depth, the second size, may be 0.
        if not all(_is_int(size) and size >= 0 for size in sizes) or sizes[0] == 0:
            raise CostTableError(
                f"{name}: {field} has the size {sizes!r}; sizes are positive integers"
            )
        is_number = isinstance(ms, int | float) and not isinstance(ms, bool)
        if not is_number or not 0 <= ms <= sys.float_info.max:
            raise CostTableError(
                f"{name}: {field} has {ms!r} ms at {sizes!r}; costs are finite and ≥ 0"
            )
        if tuple(sizes) in points:
            raise CostTableError(f"{name}: {field} lists {sizes!r} twice; keep one")
        points[tuple(sizes)] = float(ms)
    return sorted(points.items())
