"""The C++ form of the plugins through ctypes: the core's C entry points, and the driver of the adapter."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from trtllm_av.plugins.plugin_launch import Binding, Scratch
from trtllm_av.plugins.plugin_spec import DTYPES, PLUGINS

_CAPACITY = 1 << 16


class Refused(Exception):
    """The C++ form refused; the message is its line."""


def _fields(fields: Mapping[str, float]) -> tuple[Any, Any, int]:
    names = (c_char_p * len(fields))(*(name.encode() for name in fields))
    return names, (c_double * len(fields))(*fields.values()), len(fields)


def _shapes(shapes: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    flat = [dim for shape in shapes for dim in shape]
    return (c_int64 * len(flat))(*flat), (c_int * len(shapes))(*map(len, shapes))


def _tensors(inputs: Sequence[Binding], outputs: Sequence[Binding]) -> tuple[Any, ...]:
    both = [*inputs, *outputs]
    dims, ranks = _shapes([tensor.dims for tensor in both])
    dtypes = (c_int * len(both))(*(DTYPES.index(tensor.dtype) for tensor in both))
    addresses = (c_uint64 * len(both))(*(tensor.address for tensor in both))
    return dims, ranks, dtypes, addresses


class Core:
    """``csrc/c_api.cpp``."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.av_workspace_bytes.restype = c_uint64
        self._library.av_mailbox_bytes.restype = c_uint64
        self._library.av_control_block.restype = c_void_p
        self._text = ctypes.create_string_buffer(_CAPACITY)

    def _answer(self, code: int) -> str:
        text = self._text.value.decode()
        if code:
            raise Refused(text)
        return text

    @property
    def control_block(self) -> int:
        return int(self._library.av_control_block() or 0)

    def fields(self, plugin: str, given: Mapping[str, float]) -> dict[str, float]:
        code = self._library.av_fields(plugin.encode(), *_fields(given), self._text, _CAPACITY)
        pairs = (line.split("=") for line in self._answer(code).splitlines())
        return {name: float(value) for name, value in pairs}

    def supports(self, plugin: str, position: int, dtype: int, is_linear: bool, count: int) -> bool:
        return bool(
            self._library.av_supports(plugin.encode(), position, dtype, int(is_linear), count)
        )

    def output_dtype(self, plugin: str, output: int) -> str:
        return DTYPES[self._library.av_output_dtype(plugin.encode(), output)]

    def output_shapes(self, plugin: str, ranks: Sequence[int]) -> list[list[str]]:
        given = (c_int * len(ranks))(*ranks)
        num_outputs = len(PLUGINS[plugin].outputs)
        code = self._library.av_output_shapes(
            plugin.encode(), given, len(ranks), num_outputs, self._text, _CAPACITY
        )
        return [line.split() for line in self._answer(code).split("\n")[:num_outputs]]

    def check_shapes(
        self, plugin: str, fields: Mapping[str, float], shapes: Sequence[Sequence[int]]
    ) -> None:
        code = self._library.av_check_shapes(
            plugin.encode(), *_fields(fields), *_shapes(shapes), len(shapes), self._text, _CAPACITY
        )
        self._answer(code)

    def workspace_bytes(self, plugin: str, shapes: Sequence[Sequence[int]]) -> int:
        return int(self._library.av_workspace_bytes(plugin.encode(), *_shapes(shapes), len(shapes)))

    def launches(
        self,
        plugin: str,
        fields: Mapping[str, float],
        inputs: Sequence[Binding],
        outputs: Sequence[Binding],
        *,
        scratch: Scratch,
        num_processors: int,
    ) -> list[list[str]]:
        code = self._library.av_launches(
            plugin.encode(),
            *_fields(fields),
            *_tensors(inputs, outputs),
            len(inputs),
            len(inputs) + len(outputs),
            c_uint64(scratch.workspace),
            c_uint64(scratch.mailboxes),
            c_uint64(scratch.control),
            num_processors,
            self._text,
            _CAPACITY,
        )
        return [line.split() for line in self._answer(code).splitlines()]

    def mailbox_bytes(self, plugin: str, num_processors: int) -> int:
        return int(self._library.av_mailbox_bytes(plugin.encode(), num_processors))

    def prepare(self, plugin: str) -> int:
        """Address of one context's mailboxes, which nothing gives back."""
        mailboxes = c_uint64()
        code = self._library.av_prepare(
            plugin.encode(), ctypes.byref(mailboxes), self._text, _CAPACITY
        )
        self._answer(code)
        return mailboxes.value

    def enqueue(
        self,
        plugin: str,
        fields: Mapping[str, float],
        inputs: Sequence[Binding],
        outputs: Sequence[Binding],
        *,
        workspace: int,
        mailboxes: int,
        stream: int,
    ) -> None:
        code = self._library.av_enqueue(
            plugin.encode(),
            *_fields(fields),
            *_tensors(inputs, outputs),
            len(inputs),
            len(inputs) + len(outputs),
            c_uint64(workspace),
            c_uint64(mailboxes),
            c_void_p(stream),
            self._text,
            _CAPACITY,
        )
        self._answer(code)


class Adapter:
    """The plugin library ``plugin`` through TensorRT's interfaces, by ``adapter_driver.cpp``."""

    def __init__(self, driver: Path, plugin: Path) -> None:
        self._library = ctypes.CDLL(str(driver))
        for name in ("driver_create", "driver_clone", "driver_attach"):
            getattr(self._library, name).restype = c_void_p
        self._library.driver_last_log.restype = c_char_p
        self._text = ctypes.create_string_buffer(_CAPACITY)
        code = self._library.driver_open(str(plugin).encode(), self._text, _CAPACITY)
        if code:
            raise Refused(self._text.value.decode())
        self.creators = self._text.value.decode().splitlines()

    @property
    def last_log(self) -> str:
        return bytes(self._library.driver_last_log()).decode()

    def create(self, name: str, fields: Mapping[str, float]) -> int:
        """Address of a new plugin. Raises Refused."""
        kinds = {field.name: field.dtype == "f32" for field in PLUGINS[name].fields}
        is_float = (c_int * len(fields))(*(int(kinds.get(field, False)) for field in fields))
        names, values, count = _fields(fields)
        return self._made(
            self._library.driver_create(name.encode(), names, values, is_float, count)
        )

    def clone(self, plugin: int) -> int:
        return self._made(self._library.driver_clone(c_void_p(plugin)))

    def attach(self, plugin: int) -> int:
        return self._made(self._library.driver_attach(c_void_p(plugin)))

    def destroy(self, plugin: int) -> None:
        self._library.driver_destroy(c_void_p(plugin))

    def serialized(self, plugin: int) -> str:
        self._library.driver_serialized(c_void_p(plugin), self._text, _CAPACITY)
        return self._text.value.decode()

    def outputs(self, plugin: int, ranks: Sequence[int]) -> list[str]:
        given = (c_int * len(ranks))(*ranks)
        self._checked(
            self._library.driver_outputs(c_void_p(plugin), given, len(ranks), self._text, _CAPACITY)
        )
        return self._text.value.decode().split("\n")

    def supports(self, plugin: int, position: int, dtype: int, is_linear: bool, count: int) -> bool:
        return bool(
            self._library.driver_supports(c_void_p(plugin), position, dtype, int(is_linear), count)
        )

    def configure(self, plugin: int, inputs: Sequence[Binding], outputs: Sequence[Binding]) -> int:
        """Bytes of workspace. Raises Refused."""
        dims, ranks, dtypes, _ = _tensors(inputs, outputs)
        num_bytes = c_uint64()
        self._checked(
            self._library.driver_configure(
                c_void_p(plugin),
                dims,
                ranks,
                dtypes,
                len(inputs),
                len(inputs) + len(outputs),
                ctypes.byref(num_bytes),
            )
        )
        return num_bytes.value

    def configure_dynamic(
        self, plugin: int, inputs: Sequence[Binding], outputs: Sequence[Binding]
    ) -> None:
        """Configure for unknown sizes of which these are the most. Raises Refused."""
        dims, ranks, dtypes, _ = _tensors(inputs, outputs)
        given = (dims, ranks, dtypes, len(inputs), len(inputs) + len(outputs))
        self._checked(self._library.driver_configure_dynamic(c_void_p(plugin), *given))

    def enqueue(
        self,
        plugin: int,
        inputs: Sequence[Binding],
        outputs: Sequence[Binding],
        *,
        workspace: int,
        stream: int,
    ) -> None:
        self._checked(
            self._library.driver_enqueue(
                c_void_p(plugin),
                *_tensors(inputs, outputs),
                len(inputs),
                len(inputs) + len(outputs),
                c_void_p(workspace),
                c_void_p(stream),
            )
        )

    def _made(self, address: int | None) -> int:
        if not address:
            raise Refused(self.last_log)
        return address

    def _checked(self, status: int) -> None:
        if status:
            raise Refused(self.last_log)
