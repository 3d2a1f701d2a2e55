"""Paths of the configuration: which fields of the dataclasses are some, and what they name."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar


@dataclass(frozen=True)
class _Path:
    """The mark of a path's type."""

    private: bool = False


# What a user names a file or a folder by; see with_absolute_paths.
ConfigPath = Annotated[str, _Path()]
# That of a file which nobody but its owner may read.
SecretPath = Annotated[str, _Path(private=True)]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class NamedPath:
    """A path that settings name. name: its field, `block.field` inside of a block."""

    name: str
    path: str
    private: bool = False


def absolute(path: str) -> str:
    """A path of the configuration, which may be relative to the working directory."""
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111


def is_same_path(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """True if both lead to one file or folder, through links, `..` or another mount."""
    try:
        return os.path.samefile(first, second)  # noqa: PTH121
    except OSError:  # not there, or not for this user
        return os.path.realpath(first) == os.path.realpath(second)


def with_absolute_paths(settings: Settings) -> Settings:
    """A dataclass whose paths, and those of the blocks inside, do not depend on the working
    directory.
    """
    marks, changes = _marks(type(settings)), dict[str, Any]()
    for field in dataclasses.fields(typing.cast(Any, settings)):
        name, value = field.name, getattr(settings, field.name)
        if name in marks and value:
            is_text = isinstance(value, str)
            changes[name] = absolute(value) if is_text else tuple(map(absolute, value))
        elif dataclasses.is_dataclass(value):
            changes[name] = with_absolute_paths(value)
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            changes[name] = tuple(map(with_absolute_paths, value))
    return dataclasses.replace(typing.cast(Any, settings), **changes) if changes else settings


def paths_in(settings: Any) -> Iterator[NamedPath]:
    """The paths that a dataclass and the blocks inside name; none of what is None."""
    if settings is None:
        return
    marks = _marks(type(settings))
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        members = value if isinstance(value, tuple) else (value,)
        if name in marks:
            yield from (NamedPath(name, path, marks[name].private) for path in members if path)
            continue
        for member in filter(dataclasses.is_dataclass, members):
            for inner in paths_in(member):
                yield dataclasses.replace(inner, name=f"{name}.{inner.name}")


def _marks(kind: type) -> dict[str, _Path]:
    """The fields of a dataclass that are paths."""
    hints = typing.get_type_hints(kind, include_extras=True)
    marks = {field.name: _mark(hints[field.name]) for field in dataclasses.fields(kind)}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _mark(hint: Any) -> _Path | None:
    """That of a type, of one of its alternatives, or of its members."""
    inside = (_mark(argument) for argument in typing.get_args(hint))
    own = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, _Path))
    return next((mark for mark in (*own, *inside) if mark is not None), None)
