"""Everything that is assumed of an installed TensorRT-LLM, from one data file.

``assumptions.json`` is read by the code that builds, by the test doubles and by the comparison with what
is installed; nothing of it was executed where it was written. Axes of shapes: R requests, K drafts
(nodes of a tree), L EAGLE levels, G tokens of generation requests, N packed tokens.

Invariants: a version that is not listed is refused with the list of those that are; patch releases share
the entry of their minor version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from trtllm_av.runtime.errors import BuildError


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that has to exist; ``parameters`` None where the signature does not matter.

    ``name`` may be dotted, for an attribute of a class. ``kind`` is "function", "class" or "value".
    """

    module: str
    name: str
    kind: str
    parameters: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor; shapes are written with the axes of the module docstring."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A TensorRT plugin: its creator's key, its fields, and its inputs and outputs in order."""

    name: str
    version: str
    namespace: str
    interface: str
    fields: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What EAGLE engines cannot exceed."""

    max_batch_size: int
    max_draft_len: int
    max_beam_width: int
    pp_size: int


@dataclass(frozen=True, slots=True)
class Version:
    """One minor version: the TensorRT it brings, the image that holds it, the form of its BuildConfig."""

    name: str
    tensorrt: str
    container: str
    build_config_form: str


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The data file, checked and typed; ``raw`` keeps what only comparisons and doubles read."""

    versions: Mapping[str, Version]
    symbols: tuple[Symbol, ...]
    architecture: str
    helper_inputs: tuple[str, ...]
    engine_inputs: tuple[TensorSpec, ...]
    engine_outputs: tuple[str, ...]
    upstream_plugins: Mapping[str, PluginSpec]
    limits: Limits
    raw: Mapping[str, Any]

    def version(self, installed: str) -> Version:
        """The entry for ``installed`` ("1.2.1", "1.1.0rc3"); BuildError with the known ones otherwise."""
        name = ".".join(installed.split(".")[:2])
        if name not in self.versions:
            raise BuildError(
                f"TensorRT-LLM {installed} is not supported; install one of "
                f"{', '.join(f'{known}.x' for known in self.versions)} (later ones have no TensorRT backend)"
            )
        return self.versions[name]


@lru_cache(maxsize=1)
def assumptions() -> Assumptions:
    """The assumptions of this release."""
    raw = json.loads(
        files("trtllm_av.builder.trtllm").joinpath("assumptions.json").read_text(encoding="utf-8")
    )
    return Assumptions(
        versions={name: Version(name, **entry) for name, entry in raw["versions"].items()},
        symbols=tuple(
            Symbol(
                entry["module"],
                entry["name"],
                entry["kind"],
                tuple(entry["parameters"]) if "parameters" in entry else None,
            )
            for entry in raw["symbols"]
        ),
        architecture=raw["architecture"],
        helper_inputs=tuple(raw["helper_inputs"]),
        engine_inputs=tuple(_tensor(entry) for entry in raw["engine_inputs"]),
        engine_outputs=tuple(raw["engine_outputs"]),
        upstream_plugins=_plugins(raw["upstream_plugins"]),
        limits=Limits(**raw["limits"]),
        raw=raw,
    )


def _tensor(entry: list[Any]) -> TensorSpec:
    name, dtype, shape = entry
    return TensorSpec(name, dtype, tuple(shape))


def _plugins(entries: Mapping[str, Any]) -> dict[str, PluginSpec]:
    return {
        name: PluginSpec(
            name,
            entry["version"],
            entry["namespace"],
            entry["interface"],
            tuple(entry["fields"]),
            tuple(entry["inputs"]),
            tuple(_tensor(output) for output in entry["outputs"]),
        )
        for name, entry in entries.items()
    }
