"""An engine directory of ``trtllm-build`` as the runtime has to know it, refused unless it trims its drafts.

Invariants: nothing of TensorRT-LLM is imported; an engine says itself that its network has the plugins, since
its settings alone may come from the checkpoint; what is wrong is one line with the file, the value and the
remedy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_av.plugins.plugin_spec import VERSION
from trtllm_av.runtime.engines.trtllm_tree import DraftTree
from trtllm_av.runtime.errors import CheckpointError, UsageError

ARCHITECTURE = "EagleForCausalLM"
#: Key of ``pretrained_config`` that a network with the plugins writes: their version.
VERSION_KEY = "adaptive_verification_version"


@dataclass(frozen=True, slots=True)
class TrtllmEngine:
    """Sizes of an engine: ``num_levels`` L EAGLE levels, ``max_draft_len`` K drafts a request."""

    folder: Path
    version: str
    num_levels: int
    max_draft_len: int
    max_non_leaves: int
    world_size: int
    min_draft_len: int
    has_trace: bool

    @classmethod
    def load(cls, folder: Path) -> TrtllmEngine:
        """Read ``config.json``; CheckpointError if it is not that of an engine that trims."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            model, build = config["pretrained_config"], config["build_config"]
            architecture = model["architecture"]
        except OSError as error:
            raise CheckpointError(
                f"cannot read {str(path)!r} ({error.strerror}); give the folder of an engine"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{str(path)!r} is not the configuration of a TensorRT-LLM engine"
            ) from None
        found = model.get(VERSION_KEY)
        if architecture != ARCHITECTURE or found is None:
            raise CheckpointError(
                f"engine {str(folder)!r} ({architecture}) does not trim its drafts; build it with "
                "trtllm-av-build --backend trtllm --adaptive_verification_plugin enable"
            )
        if found != VERSION:
            raise CheckpointError(
                f"engine {str(folder)!r} has plugins of version {found}, here is {VERSION}; build it again"
            )
        try:
            settings = model["adaptive_verification"]
            return cls(
                folder=folder,
                version=str(config.get("version", "")),
                num_levels=int(model["num_eagle_layers"]),
                max_draft_len=int(build.get("max_draft_len") or model["max_draft_len"]),
                max_non_leaves=int(model["max_non_leaves_per_layer"]),
                world_size=int(model.get("mapping", {}).get("world_size", 1)),
                min_draft_len=int(settings["min_draft_len"]),
                has_trace=bool(settings["trace"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{str(path)!r} lacks what an EAGLE engine has ({error}); build the engine again"
            ) from None

    def check_version(self, installed: str) -> None:
        """CheckpointError if the engine is of another minor version than the ``installed`` package."""
        if self.version.split(".")[:2] != installed.split(".")[:2]:
            raise CheckpointError(
                f"engine {str(self.folder)!r} was built by TensorRT-LLM {self.version}, {installed} is "
                "installed; build it again"
            )

    def tree(self, choices: Sequence[Sequence[int]] | None) -> DraftTree:
        """The tree of ``choices``; a chain by default, if the engine was built for one."""
        if choices is None:
            if self.max_draft_len != self.num_levels:
                raise UsageError(
                    f"engine of {self.max_draft_len} drafts over {self.num_levels} levels needs its tree; "
                    "give eagle_choices"
                )
            return DraftTree.chain(self.num_levels)
        tree = DraftTree(choices, num_levels=self.num_levels, max_draft_len=self.max_draft_len)
        if tree.most_non_leaves > self.max_non_leaves:
            raise UsageError(
                f"eagle_choices has {tree.most_non_leaves} nodes with children in one level, the engine "
                f"takes {self.max_non_leaves}; make the tree narrower or build for more"
            )
        return tree
