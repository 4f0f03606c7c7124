"""Fills the placeholders of a configuration template.

Invariants: the syntax is ``string.Template``'s, which TensorRT-LLM's tools/fill_template.py uses too; values
cannot break out of the quotes they stand in; what stays unfilled are placeholders inside quotes only, and
models take those for unset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template

from trtllm_av.runtime.errors import UsageError

_UNQUOTED = re.compile(r"^[^\"#]*\$\{(\w+)\}", re.MULTILINE)


def fill(template: str, values: Mapping[str, str]) -> str:
    """``template`` with ``values``; UsageError if a placeholder outside quotes is left."""
    escaped = {name: _escape(value) for name, value in values.items()}
    text = Template(template).safe_substitute(escaped)
    if left := _UNQUOTED.search(text):
        raise UsageError(f"placeholder {left.group(1)!r} has no value and no default; give it one")
    return text


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
