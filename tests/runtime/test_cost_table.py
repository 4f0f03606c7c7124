"""Bad cost tables: each is one line with the value and the remedy, before the first round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.closed_loop import COST_PROFILE
from trtllm_av.runtime.cost_table import CostTable, ProfileKey
from trtllm_av.runtime.errors import CostTableError

KEY = ProfileKey("digest", "torch", "cpu", "float32", 2)


def good() -> dict[str, Any]:
    return {
        "unit": "ms",
        "graph_limit_tokens": 4,
        "verify_ms_by_tokens": [[1, 1.0], [4, 2.0], [8, 4.0]],
        "draft_ms_by_requests": [[1, 0.5], [2, 0.75]],
    }


def put(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.__setitem__(key, value)


BAD: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (put("verify_ms_by_tokens", [[1, 2.0], [8, 2.0]]), "flat at 2.0 ms"),
    (put("verify_ms_by_tokens", [[1, 2.0], [8, 1.0]]), "flat at 2.0 ms"),
    (put("verify_ms_by_tokens", [[8, 2.0]]), "flat at 2.0 ms"),
    (put("verify_ms_by_tokens", [[1, 0.0], [8, 0.0]]), "0 ms at 1 tokens"),
    (put("verify_ms_by_tokens", []), r"verify_ms_by_tokens=\[\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [8, -1.0]]), r"-1.0 ms at \[8\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [8, float("nan")]]), r"nan ms at \[8\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [8, float("inf")]]), r"inf ms at \[8\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [8, 10**400]]), r"000 ms at \[8\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [8, "2"]]), r"'2' ms at \[8\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [8, True]]), r"True ms at \[8\]"),
    (put("verify_ms_by_tokens", [[0, 1.0], [8, 2.0]]), r"size \[0\]"),
    (put("verify_ms_by_tokens", [[1.5, 1.0], [8, 2.0]]), r"size \[1.5\]"),
    (put("verify_ms_by_tokens", [[1, 1.0], [1, 2.0]]), r"\[1\] twice"),
    (put("verify_ms_by_tokens", [[1, 1.0, 3], [8, 2.0]]), "each entry holds 2 numbers"),
    (put("verify_ms_by_tokens", {"1": 1.0}), "verify_ms_by_tokens={'1': 1.0}"),
    (put("draft_ms_by_requests", [[1, -0.5]]), r"-0.5 ms at \[1\]"),
    (put("draft_ms_by_requests_and_depth", [[1, 1, 0.5]]), "exactly one of"),
    (lambda table: table.pop("draft_ms_by_requests"), "exactly one of"),
    (put("unit", "us"), "unit='us'"),
    (put("graph_limit_tokens", -1), "graph_limit_tokens=-1"),
    (put("graph_limit_tokens", None), "graph_limit_tokens=None"),
    (put("grapf_limit", 1), "unknown key 'grapf_limit'"),
    (put("key", {"executor": "torch"}), "must hold exactly"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_bad_tables_are_refused(spoil: Callable[[dict[str, Any]], object], message: str) -> None:
    """Guards against case 13: a table that cannot steer and silently verifies everything or nothing."""
    table = good()
    spoil(table)
    with pytest.raises(CostTableError, match=message) as error:
        CostTable.load(table)
    assert "\n" not in str(error.value)


def test_only_depth_zero_is_refused() -> None:
    """Guards against a drafter that would be free at every depth."""
    table = good()
    del table["draft_ms_by_requests"]
    table["draft_ms_by_requests_and_depth"] = [[1, 0, 0.5]]
    with pytest.raises(CostTableError, match="no depth above 0"):
        CostTable.load(table)


def test_a_foreign_table_is_refused_by_name() -> None:
    """Guards against costs of another machine, model or thread count steering this one."""
    table = CostTable.load({**good(), "key": {**vars_of(KEY), "num_threads": 8}})
    with pytest.raises(CostTableError, match=r"num_threads=8 \(this engine: 2\)"):
        CostTable.load(table.to_json(), KEY)
    assert CostTable.load({**good(), "key": vars_of(KEY)}, KEY).key == KEY
    assert CostTable.load(good(), KEY).key is None  # written by hand


def vars_of(key: ProfileKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in key.__slots__}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ('{"unit": "ms", "unit": "s"}', "key 'unit' stands twice"),
        ("[]", "holds a list"),
        ("\xff", "cannot read"),
        (None, "cannot read"),
    ],
)
def test_unreadable_files_are_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    """Guards against a traceback where the user's file is at fault."""
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CostTableError, match=message) as error:
        CostTable.load(path)
    assert "costs.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_to_json_is_what_load_reads(tmp_path: Path) -> None:
    """Guards against a cache that loses a field or mixes the two forms of draft cost."""
    table = CostTable.load(COST_PROFILE)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(table.to_json()))
    assert CostTable.load(path) == table
    by_depth = good()
    del by_depth["draft_ms_by_requests"]
    by_depth["draft_ms_by_requests_and_depth"] = [[2, 1, 0.2], [1, 1, 0.1], [1, 3, 0.3]]
    table = CostTable.load(by_depth)
    assert table.draft == ((1, 1, 0.1), (1, 3, 0.3), (2, 1, 0.2))
    assert CostTable.load(table.to_json()) == table
