"""The families of drafters by name; a new family is one file and one entry here."""

from __future__ import annotations

from collections.abc import Callable

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.base import Drafter
from trtllm_av.runtime.models.drafters.dflash import create_dflash
from trtllm_av.runtime.models.drafters.draft_model import create_draft_model
from trtllm_av.runtime.models.drafters.dspark import create_dspark
from trtllm_av.runtime.models.drafters.eagle import create_eagle, has_packaged_head
from trtllm_av.runtime.models.drafters.layer_skip import create_layer_skip
from trtllm_av.runtime.models.drafters.mtp import create_mtp
from trtllm_av.runtime.models.kv_cache import KVCache
from trtllm_av.runtime.params import SpeculativeConfig

DrafterFactory = Callable[[SpeculativeConfig, LoadedModel, KVCache], Drafter]

DRAFTERS: dict[str, DrafterFactory] = {
    "dflash": create_dflash,
    "draft_model": create_draft_model,
    "dspark": create_dspark,
    "eagle": create_eagle,
    "layer_skip": create_layer_skip,
    "mtp": create_mtp,
}


def check_method(method: str | None) -> None:
    """Raise UsageError naming the choices unless ``method`` is None or known."""
    if method is not None and method not in DRAFTERS:
        raise UsageError(
            f"method={method!r} is unknown; choose one of {', '.join(sorted(DRAFTERS))}"
        )


def create_drafter(config: SpeculativeConfig, target: LoadedModel, cache: KVCache) -> Drafter:
    """The drafter that ``config.method`` names, for ``target`` and its KV cache.

    Without a method: the trained head that ships for ``target``, else ``layer_skip``. Raises UsageError
    naming the choices for an unknown method, and whatever the family's factory raises.
    """
    check_method(config.method)
    method = config.method
    if method is None:
        is_head_shipped = config.skip_layers is None and has_packaged_head(target)
        method = "eagle" if is_head_shipped else "layer_skip"
    return DRAFTERS[method](config, target, cache)
