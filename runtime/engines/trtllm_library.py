"""The plugins of TensorRT-LLM engines in a process, registered before an engine names them.

An engine is deserialised with the plugin creators that its process has registered. In a process of ours
``load_plugin_library`` registers them; a process that something else starts (an MPI worker, Triton's C++
backend) loads the library by ``LD_PRELOAD`` and the library registers itself. The Python form of the plugins
serves where one Python process builds or holds the engine, and nowhere else.

Invariants: a library is loaded once a process and never unloaded; which one is never a guess: an argument,
``TRTLLM_AV_PLUGIN`` or the file that ``trtllm-av-doctor --build-plugin`` writes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Literal

from trtllm_av.plugins import tensorrt_plugin
from trtllm_av.plugins.control_block import ControlBlock, process_block
from trtllm_av.plugins.plugin_build import default_library
from trtllm_av.runtime.errors import BuildError, MissingDependencyError

#: "library": the C++ form; "python": the one of ``plugins/tensorrt_plugin.py``.
PluginForm = Literal["library", "python"]
#: Makes a preloaded library register its creators.
LOAD_VARIABLE = "TRTLLM_AV_LOAD_PLUGINS"
#: Names the shared memory in which a preloaded library finds its control block.
CONTROL_VARIABLE = "TRTLLM_AV_CONTROL_BLOCK"

logger = logging.getLogger(__name__)


def find_plugin_library(path: Path | None = None) -> Path:
    """The file to load; MissingDependencyError if there is none."""
    library = path or default_library()
    if not library.is_file():
        raise MissingDependencyError(
            f"plugin library {str(library)!r} does not exist; build it with `trtllm-av-doctor "
            "--build-plugin INCLUDE_FOLDER`, or name it in TRTLLM_AV_PLUGIN"
        )
    return library.resolve()


def register_plugins(form: PluginForm, path: Path | None = None) -> ControlBlock:
    """Register the plugins in this process; returns the control block that they read.

    Raises as ``load_plugin_library`` does; MissingDependencyError without a TensorRT for the Python form, and
    UsageError for one that cannot hold plugins.
    """
    if form == "library":
        return ControlBlock.of_library(load_plugin_library(path))
    _register_python_form()
    return process_block()


def register_for_build() -> PluginForm:
    """Register the plugins for building an engine: the library, without one the Python form.

    Either gives the same engine. Returns which it is.
    """
    try:
        load_plugin_library()
    except MissingDependencyError as error:
        logger.warning("building with the Python form of the plugins: %s", error)
        _register_python_form()
        return "python"
    return "library"


def _register_python_form() -> None:
    try:
        module = importlib.import_module("tensorrt")
    except ImportError as error:
        raise MissingDependencyError(
            f"tensorrt cannot be imported ({error}); install tensorrt-llm>=1.0,<1.3, which brings it"
        ) from None
    tensorrt_plugin.register(module)


def load_plugin_library(path: Path | None = None) -> Path:
    """Load the library into this process and register its plugins; returns its path.

    Raises MissingDependencyError if there is none and BuildError if it does not load here.
    """
    library = find_plugin_library(path)
    _load(library)
    return library


@cache
def _load(library: Path) -> ctypes.CDLL:
    try:
        # Global, as TensorRT-LLM loads its own: a plugin finds the one registry of the process.
        handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        register = handle.initAvPlugins
    except (OSError, AttributeError) as error:
        raise BuildError(
            f"plugin library {str(library)!r} does not load ({error}); build it again with "
            "`trtllm-av-doctor --build-plugin INCLUDE_FOLDER`, that of the TensorRT installed here"
        ) from None
    register.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    register.restype = ctypes.c_bool
    if not register(None, None):
        raise BuildError(
            f"plugin library {str(library)!r} found no plugin registry; import tensorrt_llm before it"
        )
    return handle


def worker_environment(library: Path, control_block: str | None = None) -> dict[str, str]:
    """Variables for a process that is not ours and runs an engine: preload, register, map the block.

    ``control_block`` is the name of the shared memory, None for a process that writes its own block.
    """
    preloaded = os.environ.get("LD_PRELOAD")
    environment = {
        "LD_PRELOAD": f"{library}:{preloaded}" if preloaded else str(library),
        LOAD_VARIABLE: "1",
    }
    if control_block is not None:
        environment[CONTROL_VARIABLE] = control_block
    return environment
