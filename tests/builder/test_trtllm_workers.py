"""``--workers 2``: what is pickled for a worker is made again in a process that has imported nothing.

The worker finds a TensorRT-LLM on its path that is the double, and a plugin library that registers.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_trtllm_cli import EAGLE, build, install

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = """
import sys
from tests.builder.trtllm_double import TrtllmDouble
sys.modules.update(TrtllmDouble().modules)
"""
WORKER = """
import pickle, sys
model_cls, config = pickle.load(sys.stdin.buffer)
print(model_cls.__module__, model_cls.__name__, model_cls.__mro__[1].__name__)
print(config.av_settings)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_worker_process_makes_the_classes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a class that only the process which parsed the flags can import."""
    double = install(monkeypatch)
    build(tmp_path, *EAGLE, "--workers", "2", "--av_min_draft_len", "2")
    (call,) = double.builds
    sent: Any = (call["model_cls"], call["build_config"].plugin_config)

    packages = tmp_path / "packages"
    (packages / "tensorrt_llm").mkdir(parents=True)
    (packages / "tensorrt_llm" / "__init__.py").write_text(PACKAGE)
    source, library = tmp_path / "plugin.c", tmp_path / "libplugin.so"
    source.write_text("_Bool initAvPlugins(void* logger, char const* ns) { return 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = os.environ | {
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}",
        "TRTLLM_AV_PLUGIN": str(library),
    }
    worker = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=pickle.dumps(sent),
        capture_output=True,
        env=environment,
        timeout=120,
    )
    assert worker.returncode == 0, worker.stderr.decode()
    assert worker.stdout.decode().splitlines() == [
        "trtllm_av.builder.trtllm.installed AdaptiveEagleForCausalLM EagleForCausalLM",
        "AvSettings(plugin=True, min_draft_len=2, trace=True)",
    ]
