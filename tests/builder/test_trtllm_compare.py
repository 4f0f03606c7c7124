"""The comparison of an installed TensorRT-LLM with the assumptions, on doubles that differ in one thing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builder.trtllm_double import TrtllmDouble
from trtllm_av.builder import doctor, doctor_cli
from trtllm_av.builder.trtllm.assumptions import assumptions
from trtllm_av.builder.trtllm.compare import Difference, compare_installed
from trtllm_av.runtime.errors import BuildError, MissingDependencyError


def differences(double: TrtllmDouble) -> list[Difference]:
    def load(name: str) -> Any:
        if name not in double.modules:
            raise ImportError(f"no module {name}")
        return double.modules[name]

    return compare_installed(load)


def right_double(**changes: Any) -> TrtllmDouble:
    """A double with the TensorRT and the BuildConfig of its version."""
    double = TrtllmDouble(**changes)
    entry = assumptions().versions.get(".".join(double.version.split(".")[:2]))
    if entry is not None:
        double.modules["tensorrt"].__dict__["__version__"] = f"{entry.tensorrt}.0.33"
    return double


@pytest.mark.parametrize(
    ("version", "form"), [("1.0.0", "dataclass"), ("1.1.0", "dataclass"), ("1.2.1", "pydantic")]
)
def test_what_is_assumed_has_no_differences(version: str, form: str) -> None:
    """Guards against a comparison that cries wolf, and doubles that are not what the data file says."""
    assert differences(right_double(version=version, build_config_form=form)) == []


def replace_function(module: str, name: str, value: Any) -> Callable[[TrtllmDouble], None]:
    def change(double: TrtllmDouble) -> None:
        owner: Any = double.modules[module]
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, value)

    return change


def remove(module: str, name: str) -> Callable[[TrtllmDouble], None]:
    def change(double: TrtllmDouble) -> None:
        delattr(double.modules[module], name)

    return change


def without_plugin(double: TrtllmDouble) -> None:
    registry = double.modules["tensorrt"].get_plugin_registry()
    get = type(registry).get_creator
    registry.get_creator = lambda name, *key: (
        None if name == "EaglePrepareDrafterInputs" else get(registry, name, *key)
    )


def other_fields(double: TrtllmDouble) -> None:
    registry = double.modules["tensorrt"].get_plugin_registry()
    fields = [SimpleNamespace(name="type_id"), SimpleNamespace(name="is_new")]
    registry.get_plugin_creator = lambda *key: SimpleNamespace(field_names=fields)


def plain_plugin_config(double: TrtllmDouble) -> None:
    @dataclasses.dataclass
    class PluginConfig:
        dtype: str = "float16"

    double.modules["tensorrt_llm.plugin.plugin"].__dict__["PluginConfig"] = PluginConfig


def other_plugin_defaults(double: TrtllmDouble) -> None:
    config = double.modules["tensorrt_llm.plugin.plugin"].PluginConfig
    config.model_fields["tokens_per_block"].default = 64
    config.model_config["extra"] = "forbid"


def other_build_config(double: TrtllmDouble) -> None:
    made = TrtllmDouble(build_config_form="dataclass")
    build_config = made.modules["tensorrt_llm.builder"].BuildConfig
    double.modules["tensorrt_llm.builder"].__dict__["BuildConfig"] = build_config


def without_build_option(double: TrtllmDouble) -> None:
    double.modules["tensorrt_llm.builder"].BuildConfig.model_fields.pop("max_draft_len")


def without_eagle_mode(double: TrtllmDouble) -> None:
    def parse_arguments() -> argparse.ArgumentParser:
        parser = double._parse_arguments()
        (mode,) = (a for a in parser._actions if a.dest == "speculative_decoding_mode")
        mode.choices = ["medusa"]
        return parser

    double.modules["tensorrt_llm.commands.build"].__dict__["parse_arguments"] = parse_arguments


def other_version(double: TrtllmDouble) -> None:
    double.modules["tensorrt_llm"].__dict__["__version__"] = "1.3.0"


def bound_class(double: TrtllmDouble) -> None:
    """A class of a binding, whose signature is text."""

    class Meta(type):
        @property
        def __signature__(cls) -> Any:
            raise ValueError("no signature")

    class Request(metaclass=Meta):
        def __init__(self, *args: Any) -> None:
            """__init__(self, input_token_ids: list, max_tokens: int, *, streaming: bool = False)"""

    double.modules["tensorrt_llm.bindings.executor"].__dict__["Request"] = Request


CHANGES: dict[str, tuple[Callable[[TrtllmDouble], None], str, str]] = {
    "missing module": (
        lambda double: double.modules.pop("tensorrt_llm.functional"),
        "tensorrt_llm.functional.where",
        "nothing",
    ),
    "missing function": (
        remove("tensorrt_llm.models.eagle.model", "eagle_draft_decoder_plugin"),
        "tensorrt_llm.models.eagle.model.eagle_draft_decoder_plugin",
        "nothing",
    ),
    "parameter gone": (
        replace_function("tensorrt_llm.functional", "unsqueeze", lambda input, dim: None),
        "tensorrt_llm.functional.unsqueeze",
        "(input, dim)",
    ),
    "one more required parameter": (
        replace_function(
            "tensorrt_llm.models.eagle.model", "TreeParams", lambda paths, topology: None
        ),
        "tensorrt_llm.models.eagle.model.TreeParams",
        "topology",
    ),
    "parse_arguments parses": (
        replace_function(
            "tensorrt_llm.commands.build", "parse_arguments", lambda: argparse.Namespace()
        ),
        "trtllm-build: parse_arguments()",
        "Namespace",
    ),
    "flags gone": (
        replace_function(
            "tensorrt_llm.commands.build", "parse_arguments", lambda: argparse.ArgumentParser()
        ),
        "trtllm-build --max_draft_len",
        "no such flag",
    ),
    "plain plugin configuration": (
        plain_plugin_config,
        "tensorrt_llm.plugin.plugin.PluginConfig",
        "dataclass",
    ),
    "other default of a plugin option": (
        other_plugin_defaults,
        "tensorrt_llm.plugin.plugin.PluginConfig.tokens_per_block",
        "64",
    ),
    "plugin configuration that refuses our fields": (
        other_plugin_defaults,
        "tensorrt_llm.plugin.plugin.PluginConfig extra",
        "forbid",
    ),
    "other form of BuildConfig": (
        other_build_config,
        "tensorrt_llm.builder.BuildConfig",
        "a dataclass",
    ),
    "BuildConfig without an option": (
        without_build_option,
        "tensorrt_llm.builder.BuildConfig.max_draft_len",
        "no such field",
    ),
    "no EAGLE mode": (
        without_eagle_mode,
        "trtllm-build --speculative_decoding_mode",
        "medusa",
    ),
    "plugin gone": (
        without_plugin,
        "TensorRT plugin tensorrt_llm::EaglePrepareDrafterInputs",
        "not registered",
    ),
    "plugin with other fields": (
        other_fields,
        "TensorRT plugin tensorrt_llm::EagleDecodeDraftTokens",
        "is_new",
    ),
    "parse_arguments fails": (
        replace_function("tensorrt_llm.commands.build", "parse_arguments", lambda: 1 // 0),
        "parser",
        "ZeroDivisionError",
    ),
    "unknown version": (other_version, "tensorrt_llm.__version__", "1.3.0"),
    "binding without a parameter": (
        bound_class,
        "tensorrt_llm.bindings.executor.Request",
        "none of that name",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_kind_of_difference_is_found(what: str) -> None:
    """Guards against a doctor that calls an installation healthy on which the build would fail."""
    change, where, found = CHANGES[what]
    double = right_double(version="1.2.1", build_config_form="pydantic")
    change(double)
    matching = [d for d in differences(double) if d.where == where]
    assert matching, differences(double)
    assert any(found in difference.found for difference in matching)
    assert str(matching[0]).startswith(f"{where}: expected ")


def set_source(monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    """The text of functions by their names."""
    module = importlib.import_module("trtllm_av.builder.trtllm.compare")
    monkeypatch.setattr(module.inspect, "getsource", lambda value: sources.get(value.__name__, ""))


def test_tensors_of_the_engine_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an input or output under another name, which no executor would find."""
    double = right_double(version="1.2.1", build_config_form="pydantic")
    inputs = [tensor.name for tensor in assumptions().engine_inputs]
    outputs = list(assumptions().engine_outputs)

    def source(names: list[str]) -> str:
        return "\n".join(f"Tensor(name='{name}')" for name in names)

    set_source(monkeypatch, prepare_inputs=source(inputs), _eagle_fwd_helper=source(outputs))
    assert differences(double) == []
    set_source(
        monkeypatch, prepare_inputs=source(inputs[1:]), _eagle_fwd_helper=source(outputs[:-1])
    )
    assert {(d.where, d.expected) for d in differences(double)} == {
        ("EagleForCausalLM.prepare_inputs", f"the input {inputs[0]}"),
        ("EagleForCausalLM._eagle_fwd_helper", f"the output {outputs[-1]}"),
    }


def test_inputs_that_the_helper_reads_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a new input of the stock helper that our network would not pass on."""
    double = right_double(version="1.2.1", build_config_form="pydantic")
    reads = "".join(f"kwargs['{name}']\n" for name in assumptions().helper_inputs[:-1])
    source = f'def helper():\n{reads}kwargs["new_input"]\n'
    set_source(monkeypatch, _eagle_fwd_helper=source)
    found = {(d.expected, d.found) for d in differences(double)}
    missing = assumptions().helper_inputs[-1]
    assert found == {
        ("no further input", "new_input"),
        (f"the input {missing}", "it is not read"),
    }


def test_other_tensorrt_is_a_difference() -> None:
    """Guards against engines that are built and run with a TensorRT nobody looked at."""
    double = right_double(version="1.0.0")
    double.modules["tensorrt"].__dict__["__version__"] = "10.1.0"
    (difference,) = differences(double)
    assert (difference.where, difference.expected) == ("tensorrt.__version__", "10.11.x")


def test_doctor_prints_every_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a doctor that finds differences and shows the first of them, or none."""
    double = right_double(version="1.2.1", build_config_form="pydantic")
    without_eagle_mode(double)
    without_build_option(double)
    double.install(monkeypatch)
    monkeypatch.setattr(doctor, "SECTIONS", [doctor.trtllm])
    monkeypatch.setattr(sys, "argv", ["trtllm-av-doctor", "--json"])
    with pytest.raises(SystemExit) as exit_info:
        doctor_cli.main()
    assert not exit_info.value.code
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    assert section["title"] == "TensorRT-LLM interface"
    shown = {check["name"]: check["detail"] for check in section["checks"]}
    assert shown.keys() == {d.where for d in differences(double)} and len(shown) == 2
    expected = ", ".join(assumptions().raw["parser"]["speculative_decoding_modes"])
    mode = shown["trtllm-build --speculative_decoding_mode"]
    assert mode == f"expected {expected}, found medusa"


def test_nothing_installed_is_no_difference() -> None:
    """Guards against a list of a hundred differences where the package is simply not there."""
    double = TrtllmDouble()
    double.modules.clear()
    with pytest.raises(MissingDependencyError, match=r"tensorrt-llm>=1\.0,<1\.3"):
        differences(double)


def test_patch_releases_and_candidates_share_an_entry() -> None:
    """Guards against a refused 1.2.1 or an accepted 1.20."""
    known = assumptions()
    assert known.version("1.2.1").name == known.version("1.2.0rc6").name == "1.2"
    for version in ("1.20.0", "1", "0.9.0"):
        with pytest.raises(BuildError, match="not supported"):
            known.version(version)
