"""A double of the installed TensorRT-LLM package, made from the assumptions, for one test at a time.

Its ``trtllm-build`` goes the way of the real one (parse, PluginConfig, BuildConfig, ``parallel_build``) and
writes ``config.json`` where that would write an engine. BuildConfig comes in both known forms; the
pydantic one drops the fields of a subclass when it is dumped, as pydantic does.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal, Optional

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tests.builder.eagle_double import EagleDouble
from trtllm_av.builder.trtllm.assumptions import assumptions

RAW = assumptions().raw
_Dtype = Optional[Literal["auto", "float16", "float32", "bfloat16", None]]  # noqa: UP045
_TYPES: dict[str, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "optional_bool": Optional[bool],  # noqa: UP045
    "optional_dtype": _Dtype,
}


def with_signature(name: str, parameters: tuple[str, ...] | None, is_class: bool = False) -> Any:
    """A callable that keeps its keyword arguments as attributes, with the assumed signature."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(dict(zip(parameters or (), args, strict=False)), **kwargs)

    made: Any = type(name, (), {"__init__": __init__})
    if not is_class:

        def made(*args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(args=args, **kwargs)

        made.__name__ = name
    if parameters is not None:
        kinds = {
            "args": inspect.Parameter.VAR_POSITIONAL,
            "kwargs": inspect.Parameter.VAR_KEYWORD,
        }
        made.__signature__ = inspect.Signature(
            [
                inspect.Parameter(p, kinds.get(p, inspect.Parameter.POSITIONAL_OR_KEYWORD))
                for p in parameters
            ]
        )
    return made


def make_plugin_config() -> type[BaseModel]:
    """PluginConfig with the assumed fields: pydantic, extra keys ignored, "auto" read as the dtype."""

    class Base(BaseModel):
        model_config = ConfigDict(validate_assignment=True, extra=RAW["plugin_config"]["extra"])

        def __getattribute__(self, name: str) -> Any:
            value = object.__getattribute__(self, name)
            return self.dtype if name != "dtype" and value == "auto" else value

        @field_validator("*", mode="before")
        @classmethod
        def convert_enable_disable(cls, value: Any, info: Any) -> Any:
            if value not in ("enable", "disable"):
                return value
            annotation = cls.model_fields[info.field_name].annotation
            return True if value == "enable" else (False if annotation is bool else None)

        @classmethod
        def from_arguments(cls, args: argparse.Namespace) -> Any:
            return cls(**vars(args))

        def validate(self) -> None:  # type: ignore[override]
            pass

    body: dict[str, Any] = {"__module__": "tensorrt_llm.plugin.plugin", "__annotations__": {}}
    for name, (kind, default) in RAW["plugin_config"]["fields"].items():
        body["__annotations__"][name] = _TYPES[kind]
        body[name] = Field(default=default, description=name)
    return type(Base)("PluginConfig", (Base,), body)


def make_build_config(form: str, plugin_config: type[BaseModel]) -> type[Any]:
    """BuildConfig as a dataclass or as a pydantic model."""
    fields = RAW["build_config"]["fields"]

    def from_dict(cls: Any, config: dict[str, Any], plugin_config: Any = None) -> Any:
        config = copy.deepcopy(config)
        update = config.pop("plugin_config", {})
        known = {name: value for name, value in config.items() if name in fields}
        return cls(**known, plugin_config=plugin_config.model_copy(update=update, deep=True))

    if form == "pydantic":
        annotations: dict[str, Any] = dict.fromkeys(fields, Any) | {"plugin_config": plugin_config}
        body = {**fields, "__annotations__": annotations, "__module__": "tensorrt_llm.builder"}
        body["from_dict"] = classmethod(from_dict)
        body["to_dict"] = lambda self: self.model_dump()
        return type(BaseModel)("BuildConfig", (BaseModel,), body)
    made = dataclasses.make_dataclass(
        "BuildConfig",
        [(name, Any, dataclasses.field(default=value)) for name, value in fields.items()]
        + [("plugin_config", Any, dataclasses.field(default_factory=plugin_config))],
        namespace={
            "from_dict": classmethod(from_dict),
            "to_dict": lambda self: (
                self.__dict__ | {"plugin_config": self.plugin_config.model_dump()}
            ),
        },
    )
    made.__module__ = "tensorrt_llm.builder"
    return made


@dataclasses.dataclass
class TrtllmDouble:
    """The installed double; ``builds`` keeps what every ``parallel_build`` was called with."""

    version: str = "1.2.1"
    build_config_form: str = "dataclass"
    eagle: EagleDouble = dataclasses.field(default_factory=EagleDouble)
    builds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    modules: dict[str, ModuleType] = dataclasses.field(default_factory=dict)
    rank: int = 0

    NAMES: ClassVar[tuple[str, ...]] = (
        "tensorrt_llm",
        "tensorrt_llm.models",
        "tensorrt_llm.models.eagle",
        "tensorrt_llm.models.eagle.config",
        "tensorrt_llm.plugin",
        "tensorrt_llm.plugin.plugin",
        "tensorrt_llm.builder",
        "tensorrt_llm.commands",
        "tensorrt_llm.commands.build",
        "tensorrt_llm.bindings",
        "tensorrt_llm.bindings.executor",
    )

    def __post_init__(self) -> None:
        self.modules = {name: ModuleType(name) for name in self.NAMES}
        given = self.eagle.modules
        self.modules |= {
            "tensorrt": given.tensorrt,
            "tensorrt_llm._common": given.common,
            "tensorrt_llm.functional": given.functional,
            "tensorrt_llm.models.eagle.model": given.eagle,
        }
        config = make_plugin_config()
        build_config = make_build_config(self.build_config_form, config)
        self._set("tensorrt_llm", __version__=self.version)
        self._set("tensorrt_llm.plugin.plugin", PluginConfig=config)
        self._set("tensorrt_llm.plugin", PluginConfig=config)
        self._set("tensorrt_llm.builder", BuildConfig=build_config)
        self._set(
            "tensorrt_llm.commands.build",
            PluginConfig=config,
            BuildConfig=build_config,
            main=self._main,
            parse_arguments=self._parse_arguments,
            parallel_build=self._parallel_build(),
            mpi_rank=lambda: self.rank,
        )
        self._fill_in()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make ``import tensorrt_llm`` find the double until the test ends."""
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "trtllm_av.builder.trtllm.installed", raising=False)

    def _set(self, module: str, **members: Any) -> None:
        self.modules[module].__dict__.update(members)

    def _fill_in(self) -> None:
        """Every assumed symbol that nothing above made."""
        for symbol in assumptions().symbols:
            owner: Any = self.modules[symbol.module]
            *outer, name = symbol.name.split(".")
            for part in outer:
                if not hasattr(owner, part):
                    setattr(owner, part, type(part, (), {}))
                owner = getattr(owner, part)
            if not hasattr(owner, name):
                made: Any = object()
                if symbol.kind != "value":
                    made = with_signature(name, symbol.parameters, symbol.kind == "class")
                setattr(owner, name, made)

    def _parse_arguments(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog="trtllm-build")
        fields, sizes = RAW["plugin_config"]["fields"], RAW["build_config"]["fields"]
        special: dict[str, dict[str, Any]] = {
            "output_dir": {"default": "engine_outputs"},
            "workers": {"type": int, "default": 1},
            "log_level": {"default": "info"},
            "dry_run": {"action": "store_true"},
            "speculative_decoding_mode": {"choices": RAW["parser"]["speculative_decoding_modes"]},
        }
        for option in RAW["parser"]["options"]:
            name = option[2:]
            if name in fields:
                continue
            default = {"default": sizes[name], "type": int} if name in sizes else {"default": None}
            parser.add_argument(option, **special.get(name, default))
        group = parser.add_argument_group("Plugin config arguments")
        for name in RAW["plugin_config"]["cli_fields"]:
            kind, default = fields[name]
            if kind == "bool":
                given = {"choices": ["enable", "disable"]}
                group.add_argument(f"--{name}", default="enable" if default else "disable", **given)
            else:
                group.add_argument(f"--{name}", default=default, type=int if kind == "int" else str)
        return parser

    def _main(self) -> None:
        command = self.modules["tensorrt_llm.commands.build"]
        args = command.parse_arguments().parse_args()
        assert args.checkpoint_dir is not None, "no checkpoint"
        model_config = self._model_config(Path(args.checkpoint_dir))
        plugin_config = command.PluginConfig.from_arguments(args)
        plugin_config.validate()
        names = RAW["build_config"]["fields"]
        values = {name: getattr(args, name) for name in names if hasattr(args, name)}
        build_config = command.BuildConfig.from_dict(values, plugin_config=plugin_config)
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        command.parallel_build(
            model_config, args.checkpoint_dir, build_config, args.output_dir,
            args.workers, args.log_level, None, strip_plan=False,
        )  # fmt: skip

    def _model_config(self, folder: Path) -> SimpleNamespace:
        config = json.loads((folder / "config.json").read_text())
        mapping = SimpleNamespace(**config.pop("mapping", {"pp_size": 1, "world_size": 1}))
        return SimpleNamespace(**config, mapping=mapping)

    def _parallel_build(self) -> Any:
        def parallel_build(
            model_config: Any, ckpt_dir: Any, build_config: Any, output_dir: Any,
            workers: int = 1, log_level: str = "info", model_cls: Any = None, **kwargs: Any,
        ) -> None:  # fmt: skip
            self.builds.append({**locals(), "self": None})
            if build_config.dry_run:
                return
            pretrained = {k: v for k, v in vars(model_config).items() if k != "mapping"}
            parts = (self.version, pretrained, build_config.to_dict())
            config = dict(zip(RAW["engine_config"]["sections"], parts, strict=True))
            (Path(output_dir) / "config.json").write_text(json.dumps(config))

        return parallel_build


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """A converted checkpoint, of which only config.json is there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architecture": "EagleForCausalLM",
        "num_eagle_layers": 4,
        "max_draft_len": 4,
        "max_non_leaves_per_layer": 1,
        "vocab_size": 40,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
