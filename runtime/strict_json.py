"""JSON that a user wrote, where a key that stands twice is a mistake and not a choice.

``json.loads`` takes the last value of such a key and drops the others without a word.
"""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """As ``json.loads``; ValueError for a key that an object has twice. RecursionError if nested too deeply."""
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice; keep one")
    return found
