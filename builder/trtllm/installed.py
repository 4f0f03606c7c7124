"""The classes made from the installed TensorRT-LLM, under names that a worker process can import.

Builds with ``--workers`` above 1 pickle the model class and the plugin configuration by module and name;
importing this module in the worker makes them there, after registering the plugins.

Raises on import: MissingDependencyError without TensorRT-LLM, BuildError for an unknown version or a plugin
library that does not load.
"""

from __future__ import annotations

import importlib

from trtllm_av.builder.trtllm.eagle import make_adaptive_eagle
from trtllm_av.builder.trtllm.modules import installed_modules
from trtllm_av.builder.trtllm.plugin_config import make_plugin_config
from trtllm_av.runtime.engines.trtllm_library import register_for_build

_modules = installed_modules()
register_for_build()

AdaptiveEagleForCausalLM = make_adaptive_eagle(_modules, __name__)
AdaptivePluginConfig = make_plugin_config(
    importlib.import_module("tensorrt_llm.plugin").PluginConfig, __name__
)
