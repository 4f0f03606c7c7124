"""What differs between the assumptions and the TensorRT-LLM that is installed, one line a difference.

Invariants: a difference never stops the comparison; what cannot be looked at (a binding without a text
signature, a function without source) is not reported as right, it is left out; nothing is built or run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trtllm_av.builder.trtllm.assumptions import Symbol, Version, assumptions
from trtllm_av.runtime.errors import BuildError, MissingDependencyError

Importer = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One assumption that does not hold: where, what was expected, what is there."""

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


def compare_installed(import_module: Importer = importlib.import_module) -> list[Difference]:
    """All differences of the installed TensorRT-LLM, in the order of the data file.

    MissingDependencyError if there is none. ``import_module`` is for doubles.
    """
    known = assumptions()
    try:
        package = import_module("tensorrt_llm")
    except Exception as error:  # importing it loads libraries, which fail in many ways
        raise MissingDependencyError(
            f"TensorRT-LLM cannot be imported ({error}); install tensorrt-llm>=1.0,<1.3"
        ) from None
    differences: list[Difference] = []
    version: Version | None = None
    try:
        version = known.version(str(package.__version__))
    except BuildError:
        versions = ", ".join(f"{name}.x" for name in known.versions)
        differences.append(Difference("tensorrt_llm.__version__", versions, package.__version__))
    for symbol in known.symbols:
        differences += _symbol(symbol, import_module)
    for compare in (_parser, _plugin_config, _engine_tensors, _helper_inputs, _registry):
        differences += _guarded(compare, import_module)
    if version is not None:
        entry = version

        def of_version(load: Importer) -> Iterator[Difference]:
            yield from _build_config(load, entry)
            yield from _tensorrt(load, entry)

        differences += _guarded(of_version, import_module)
    return differences


def _guarded(
    compare: Callable[[Importer], Iterator[Difference]], import_module: Importer
) -> list[Difference]:
    """What ``compare`` finds; a module or name that is missing was reported as a symbol already."""
    found: list[Difference] = []
    try:
        found.extend(compare(import_module))
    except (ImportError, AttributeError):
        return found
    except Exception as error:  # whatever an unknown version does
        what = f"{type(error).__name__}: {error}"
        found.append(Difference(compare.__name__.strip("_"), "something to compare", what))
    return found


def _symbol(symbol: Symbol, import_module: Importer) -> Iterator[Difference]:
    where = f"{symbol.module}.{symbol.name}"
    try:
        value: Any = import_module(symbol.module)
        for part in symbol.name.split("."):
            value = getattr(value, part)
    except Exception as error:  # importing a module runs it
        yield Difference(where, f"a {symbol.kind}", f"nothing ({error})")
        return
    if symbol.kind != "value" and not callable(value):
        yield Difference(where, f"a {symbol.kind}", type(value).__name__)
    elif symbol.parameters is not None:
        yield from _parameters(where, value, symbol.parameters)


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(where: str, value: Any, expected: tuple[str, ...]) -> Iterator[Difference]:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or (parameters and all(p.kind in _OPEN for p in parameters.values())):
        # Bindings show their signature as text, if at all.
        text = f"{value.__doc__ or ''}\n{getattr(value.__init__, '__doc__', None) or ''}"
        for name in expected:
            if "(" in text and "self" in text and re.search(rf"\b{name}\b", text) is None:
                yield Difference(where, f"a parameter {name}", "none of that name")
        return
    for name in expected:
        if name not in parameters:
            yield Difference(where, f"a parameter {name}", f"({', '.join(parameters)})")
    for name, parameter in parameters.items():
        is_required = parameter.default is inspect.Parameter.empty and parameter.kind not in _OPEN
        if is_required and name not in expected:
            yield Difference(
                where, f"({', '.join(expected)})", f"one more, {name}, that is required"
            )


def _parser(import_module: Importer) -> Iterator[Difference]:
    where, raw = "trtllm-build", assumptions().raw["parser"]
    parser = import_module("tensorrt_llm.commands.build").parse_arguments()
    if not isinstance(parser, argparse.ArgumentParser):
        yield Difference(f"{where}: parse_arguments()", "a parser", type(parser).__name__)
        return
    actions = {option: action for action in parser._actions for option in action.option_strings}
    for option in raw["options"]:
        if option not in actions:
            yield Difference(f"{where} {option}", "a flag", "no such flag")
    mode = actions.get("--speculative_decoding_mode")
    modes = list((mode.choices if mode is not None else None) or ())
    if modes != raw["speculative_decoding_modes"]:
        expected = ", ".join(raw["speculative_decoding_modes"])
        yield Difference(f"{where} --speculative_decoding_mode", expected, ", ".join(modes))


def _plugin_config(import_module: Importer) -> Iterator[Difference]:
    raw = assumptions().raw["plugin_config"]
    config = import_module(raw["module"]).PluginConfig
    where = f"{raw['module']}.PluginConfig"
    fields = getattr(config, "model_fields", None)
    if fields is None or _form(config) != raw["form"]:
        yield Difference(where, f"a {raw['form']} model", _form(config))
        return
    if config.model_config.get("extra") != raw["extra"]:
        yield Difference(f"{where} extra", raw["extra"], str(config.model_config.get("extra")))
    for name, (_, default) in raw["fields"].items():
        if name not in fields:
            yield Difference(f"{where}.{name}", "a field", "no such field")
        elif fields[name].default != default:
            yield Difference(f"{where}.{name}", f"default {default}", str(fields[name].default))


def _build_config(import_module: Importer, version: Version) -> Iterator[Difference]:
    raw = assumptions().raw["build_config"]
    config = import_module(raw["module"]).BuildConfig
    where = f"{raw['module']}.BuildConfig"
    if _form(config) != version.build_config_form:
        yield Difference(where, f"a {version.build_config_form}", f"a {_form(config)}")
    if hasattr(config, "model_fields"):
        names = set(config.model_fields)
    else:
        names = {field.name for field in dataclasses.fields(config)}
    for name in sorted({*raw["fields"], "plugin_config"} - names):
        yield Difference(f"{where}.{name}", "a field", "no such field")


def _form(config: type[Any]) -> str:
    if hasattr(config, "model_fields"):
        return "pydantic"
    return "dataclass" if dataclasses.is_dataclass(config) else "plain class"


def _engine_tensors(import_module: Importer) -> Iterator[Difference]:
    """Inputs and outputs of the engine, by the names that the installed model class gives them."""
    model = import_module("tensorrt_llm.models.eagle.model").EagleForCausalLM
    inputs = [tensor.name for tensor in assumptions().engine_inputs]
    for method, what, names in (
        ("prepare_inputs", "input", inputs),
        ("_eagle_fwd_helper", "output", assumptions().engine_outputs),
    ):
        quoted = set(re.findall(r"[\"'](\w+)[\"']", _source(getattr(model, method)) or ""))
        if quoted.isdisjoint(names):
            continue  # wrapped, or written in another way
        for name in names:
            if name not in quoted:
                where = f"EagleForCausalLM.{method}"
                yield Difference(where, f"the {what} {name}", "no such name")


def _source(function: Any) -> str | None:
    """The text of ``function``; None if there is none, as for a binding."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


def _helper_inputs(import_module: Importer) -> Iterator[Difference]:
    """The names that the installed method reads: a new one would have to be passed on by ours."""
    helper = import_module("tensorrt_llm.models.eagle.model").EagleForCausalLM._eagle_fwd_helper
    source = _source(helper)
    if source is None:
        return
    read = set(re.findall(r"kwargs\[[\"'](\w+)[\"']\]", source))
    if not read:
        return  # wrapped, or written in another way
    expected = set(assumptions().helper_inputs)
    where = "EagleForCausalLM._eagle_fwd_helper"
    for name in sorted(read - expected):
        yield Difference(where, "no further input", name)
    for name in sorted(expected - read):
        yield Difference(where, f"the input {name}", "it is not read")


def _registry(import_module: Importer) -> Iterator[Difference]:
    registry = import_module("tensorrt").get_plugin_registry()
    for name, plugin in assumptions().upstream_plugins.items():
        get = registry.get_creator if plugin.interface == "V3" else registry.get_plugin_creator
        creator = get(name, plugin.version, plugin.namespace)
        where = f"TensorRT plugin {plugin.namespace}::{name}"
        if creator is None:
            yield Difference(where, f"version {plugin.version}", "not registered")
            continue
        fields = tuple(field.name for field in creator.field_names)
        if fields and set(fields) != set(plugin.fields):
            yield Difference(where, f"fields {', '.join(plugin.fields)}", ", ".join(fields))


def _tensorrt(import_module: Importer, version: Version) -> Iterator[Difference]:
    installed = str(import_module("tensorrt").__version__)
    if not f"{installed}.".startswith(f"{version.tensorrt}."):
        yield Difference("tensorrt.__version__", f"{version.tensorrt}.x", installed)
