"""Messages as bytes: a dataclass's type says how it is written, and what is read must fit it.

A body is JSON, in which a dataclass is the list of its fields, and a tail of raw bytes for what is
no text: `bytes`, arrays and tensors. Nothing that is read is ever executed or looked up by name.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher_scripts.errors import ServerError

_HEAD = struct.Struct("!II")
MOST_BYTES = 1 << 31

Write = Callable[[Any, list[bytes]], Any]
Read = Callable[[Any, "_Tail"], Any]


class _Tail:
    """The raw bytes behind the JSON, taken from front to back."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, size: Any) -> memoryview:
        if type(size) is not int or not 0 <= size <= len(self._data):
            raise ValueError(f"{size!r} bytes of {len(self._data)}")
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def encode(kind: type, value: Any) -> bytes:
    """`value`, of the dataclass `kind`, as bytes."""
    tail: list[bytes] = []
    text = json.dumps(codec(kind)[0](value, tail), separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(len(text), sum(map(len, tail))), text, *tail])


def decode(kind: type, data: memoryview) -> Any:
    """What encode made; ServerError where the bytes do not hold a `kind`."""
    try:
        text, tail = _HEAD.unpack_from(data)
        if _HEAD.size + text + tail != len(data):
            raise ValueError(f"{len(data)} bytes")
        body = data[_HEAD.size :]
        return codec(kind)[1](json.loads(bytes(body[:text])), _Tail(body[text:]))
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise ServerError(f"a message between ranks is no {kind.__name__}: {error}") from error


@cache
def codec(kind: Any) -> tuple[Write, Read]:
    """How values of one type are written and read. TypeError for a type that has no form."""
    if kind in _PLAIN:
        return _plain(kind)
    origin = typing.get_origin(kind)
    for fits, make in _FORMS:
        if fits(kind, origin):
            return make(kind)
    raise TypeError(f"messages cannot hold {kind}")


_PLAIN = {type(None): (), bool: (), int: (), str: (), float: (int,)}


def _plain(kind: type) -> tuple[Write, Read]:
    accepted = (kind, *_PLAIN[kind])

    def read(item: Any, _: _Tail) -> Any:
        if type(item) not in accepted:
            raise TypeError(f"{kind.__name__} expected, got {item!r:.40}")
        return kind(item) if item is not None else None

    return (lambda value, _: value), read


def _path(_: Any) -> tuple[Write, Read]:
    text = codec(str)[1]
    return (lambda value, _: str(value)), (lambda item, tail: Path(text(item, tail)))


def _enum(kind: type[enum.Enum]) -> tuple[Write, Read]:
    return (lambda value, _: value.name), (lambda item, _: kind[item])


def _bytes(_: Any) -> tuple[Write, Read]:
    def write(value: bytes, tail: list[bytes]) -> int:
        tail.append(value)
        return len(value)

    return write, (lambda item, tail: bytes(tail.take(item)))


def _array(_: Any) -> tuple[Write, Read]:
    """A numpy array as [dtype, shape], its bytes in the tail."""
    import numpy as np

    def write(value: Any, tail: list[bytes]) -> Any:
        data = np.ascontiguousarray(value).tobytes()
        tail.append(data)
        return [value.dtype.str, list(value.shape), len(data)]

    def read(item: Any, tail: _Tail) -> Any:
        dtype, shape, size = item
        data = bytearray(tail.take(size))
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)

    return write, read


def _tensor(_: Any) -> tuple[Write, Read]:
    """A tensor, which arrives on the CPU, as [dtype, shape], its bytes in the tail."""
    import torch

    dtypes = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}

    def write(value: Any, tail: list[bytes]) -> Any:
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        tail.append(data)
        return [str(value.dtype), list(value.shape), len(data)]

    def read(item: Any, tail: _Tail) -> Any:
        dtype, shape, size = item
        data = bytearray(tail.take(size))
        if not data:
            return torch.empty(shape, dtype=dtypes[dtype])
        return torch.frombuffer(data, dtype=dtypes[dtype]).reshape(shape)

    return write, read


def _sequence(kind: Any) -> tuple[Write, Read]:
    """tuple[X, ...]"""
    item_kind = typing.get_args(kind)[0]
    if item_kind in (int, str):  # token ids: the common case, and long

        def check(items: Any, _: _Tail) -> Any:
            if type(items) is not list or any(type(item) is not item_kind for item in items):
                raise TypeError(f"a list of {item_kind.__name__} expected")
            return tuple(items)

        return (lambda value, _: value), check
    write, read = codec(item_kind)
    return (
        lambda value, tail: [write(item, tail) for item in value],
        lambda items, tail: tuple([read(item, tail) for item in _listed(items)]),
    )


def _row(kind: Any) -> tuple[Write, Read]:
    """tuple[X, Y, Z]"""
    return _fields(tuple, [(str(i), arg) for i, arg in enumerate(typing.get_args(kind))])


def _named_tuple(kind: Any) -> tuple[Write, Read]:
    hints = typing.get_type_hints(kind)
    write, read = _fields(tuple, [(name, hints[name]) for name in kind._fields])
    return write, (lambda item, tail: kind(*read(item, tail)))


def _dataclass(kind: Any) -> tuple[Write, Read]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    write, read = _fields(tuple, [(name, hints[name]) for name in names])
    return (
        lambda value, tail: write([getattr(value, name) for name in names], tail),
        lambda item, tail: kind(**dict(zip(names, read(item, tail), strict=True))),
    )


def _fields(made: type, kinds: list[tuple[str, Any]]) -> tuple[Write, Read]:
    codecs = [codec(kind) for _, kind in kinds]

    def write(values: Any, tail: list[bytes]) -> Any:
        return [one[0](value, tail) for one, value in zip(codecs, values, strict=True)]

    def read(items: Any, tail: _Tail) -> Any:
        pairs = zip(codecs, _listed(items), strict=True)
        return made([one[1](item, tail) for one, item in pairs])

    return write, read


def _mapping(kind: Any) -> tuple[Write, Read]:
    """Mapping[X, Y] and dict[X, Y] as a list of pairs."""
    write, read = codec(tuple[tuple[typing.get_args(kind)], ...])
    return (
        lambda value, tail: write(value.items(), tail),
        lambda items, tail: dict(read(items, tail)),
    )


def _optional(kind: Any) -> tuple[Write, Read]:
    """X | None, and X | Y: which of them it is goes in front."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    codecs = [(_runtime(member), *codec(member)) for member in members]

    def write(value: Any, tail: list[bytes]) -> Any:
        if value is None:
            return None
        for index, (runtime, one, _) in enumerate(codecs):
            if len(codecs) == 1 or isinstance(value, runtime):
                return [index, one(value, tail)]
        raise TypeError(f"{value!r:.40} is none of {members}")

    def read(item: Any, tail: _Tail) -> Any:
        if item is None:
            return None
        index, body = item
        return codecs[index][2](body, tail)

    return write, read


def _runtime(kind: Any) -> type:
    return typing.get_origin(kind) or kind


def _listed(items: Any) -> list[Any]:
    if type(items) is not list:
        raise TypeError(f"a list expected, got {items!r:.40}")
    return items


def _is(module: str, name: str) -> Callable[[Any, Any], bool]:
    return lambda kind, _: (
        getattr(kind, "__module__", "").partition(".")[0] == module
        and getattr(kind, "__name__", "") == name
    )


def _is_class(base: type) -> Callable[[Any, Any], bool]:
    return lambda kind, origin: origin is None and isinstance(kind, type) and issubclass(kind, base)


# Which types have which form; the first that fits.
_FORMS: tuple[tuple[Callable[[Any, Any], bool], Callable[[Any], tuple[Write, Read]]], ...] = (
    (_is("torch", "Tensor"), _tensor),
    (lambda kind, origin: _is("numpy", "ndarray")(origin or kind, None), _array),
    (lambda _, origin: origin in (typing.Union, types.UnionType), _optional),
    (lambda kind, origin: origin is tuple and typing.get_args(kind)[-1] is Ellipsis, _sequence),
    (lambda _, origin: origin is tuple, _row),
    (lambda _, origin: origin in (dict, Mapping), _mapping),
    (_is_class(enum.Enum), _enum),
    (_is_class(Path), _path),
    (_is_class(bytes), _bytes),
    (lambda kind, _: hasattr(kind, "_fields"), _named_tuple),
    (lambda kind, _: dataclasses.is_dataclass(kind), _dataclass),
)
