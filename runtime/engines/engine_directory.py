"""An engine directory as a build left it: its ``config.json`` and the files that this names.

Layout of ``config.json``, after TensorRT-LLM's: ``pretrained_config`` (the network), ``build_config`` (the
sizes, the backend and the device it was built for) and ``adaptive_verification`` (draft positions,
drafter, digests, versions). Invariants: a directory loads only if its format is this package's, every
named file and ``config.json`` itself have the digest of the build, and, where the caller knows the
checkpoint, the engine was built from that one; its plans run only on the compute capability and under
the version they were built for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_av.runtime.digest import file_digest
from trtllm_av.runtime.engines.gpu import Gpu
from trtllm_av.runtime.errors import CheckpointError, UsageError

CONFIG = "config.json"
#: Counts changes after which an older or newer directory would be misread.
FORMAT = 3
#: Map of a reduced draft vocabulary, [V_d] int32.
DRAFT_TO_TARGET = "draft_to_target.npy"


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """A directory that passed all checks of ``load``."""

    folder: Path
    pretrained_config: dict[str, Any]
    build_config: dict[str, Any]
    adaptive_verification: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, *, model_digest: str | None = None) -> EngineDirectory:
        """Read and check; ``model_digest`` is that of the checkpoint the engine must come from.

        Raises CheckpointError naming both sides of whatever does not match.
        """
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            found = config["adaptive_verification"]["format"]
            if found == FORMAT:
                sections = (config["pretrained_config"], config["build_config"])
                engine = cls(folder, *sections, config["adaptive_verification"])
                files = dict(engine.adaptive_verification["files"])
                built_from = str(engine.adaptive_verification["model_digest"])
                signed = str(engine.adaptive_verification["config_digest"])
        except OSError as error:
            raise CheckpointError(
                f"{str(folder)!r} is no engine directory: cannot read {CONFIG} ({error.strerror}); "
                "build one with trtllm-av-build"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(
                f"{str(folder / CONFIG)!r} is not the configuration of an engine; build one with "
                "trtllm-av-build"
            ) from None
        if found != FORMAT:
            raise CheckpointError(
                f"engine directory {str(folder)!r} has format {found!r}, this package reads format "
                f"{FORMAT}; build the engine again"
            )
        if (actual := config_digest(config)) != signed:
            raise CheckpointError(
                f"{str(folder / CONFIG)!r} was changed after the build (SHA-256 {actual[:12]}, it says "
                f"{signed[:12]}); build the engine again"
            )
        if model_digest is not None and model_digest != built_from:
            raise CheckpointError(
                f"engine directory {str(folder)!r} was built from the checkpoint "
                f"{built_from[:12]}, not from {model_digest[:12]}; build the engine again"
            )
        for name, expected in files.items():
            actual = file_digest(folder / name) if (folder / name).is_file() else "missing"
            if actual != expected:
                raise CheckpointError(
                    f"{str(folder / name)!r} is not the file that was built (SHA-256 "
                    f"{actual[:12]}, {CONFIG} says {str(expected)[:12]}); build the engine again"
                )
        return engine

    @property
    def backend(self) -> str:
        return str(self.build_config["backend"])

    def check_device(self, gpu: Gpu | None, version: str) -> None:
        """Raises CheckpointError unless the plans run on ``gpu`` under ``version`` of their backend."""
        device, place = self.build_config["device"], f"engine directory {str(self.folder)!r}"
        built_for = f"compute capability {device['compute_capability']}"
        if device["name"] is not None:
            built_for += f" ({device['name']})"
        if gpu is None:
            raise CheckpointError(
                f"{place} holds plans for {built_for}, and there is no GPU here; build one with "
                "--backend onnx"
            )
        if gpu.compute_capability != device["compute_capability"]:
            raise CheckpointError(
                f"{place} holds plans for {built_for}, this GPU has {gpu.compute_capability} "
                f"({gpu.name}); build the engine again for it"
            )
        built_by = str(self.adaptive_verification["versions"].get(self.backend))
        if version != built_by:
            raise CheckpointError(
                f"{place} was built by {self.backend} {built_by}, {version} is installed; build the "
                "engine again or install that version"
            )

    @property
    def num_positions(self) -> int:
        """K, the most drafts per request and round."""
        return int(self.build_config["max_draft_len"])

    def check_draft_len(self, num_speculative_tokens: int) -> None:
        """Raises UsageError for more drafts than the engine was built for."""
        if num_speculative_tokens > self.num_positions:
            raise UsageError(
                f"num_speculative_tokens={num_speculative_tokens} exceeds max_draft_len="
                f"{self.num_positions} of the engine {str(self.folder)!r}; lower it or build again"
            )


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256, hex, of what ``config.json`` says, whatever its layout and the digest in it."""
    section = {k: v for k, v in config["adaptive_verification"].items() if k != "config_digest"}
    text = json.dumps(config | {"adaptive_verification": section}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def is_engine(folder: Path) -> bool:
    """True if ``folder`` holds an engine of any format, intact or not."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "adaptive_verification" in config
