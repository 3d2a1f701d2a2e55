"""Settings dataclasses: their options and paths, and how they are read from mappings.

An option is one field of a settings dataclass: its type, default, help, flag and limits.

The keys in conf/, the command-line flags of the steps and the checks derive from the field.

Typed objects from plain mappings: unknown keys, missing keys and wrong types are answered.

A frozen dataclass is the schema. YAML gives mappings, lists and scalars; `build` turns them into
the dataclass and its nested ones, collecting every problem before it raises.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from launcher_scripts.common.errors import ConfigError, LauncherError, Problems

PORTS = ("0 (a free one)", "1-65535")


@dataclass(frozen=True)
class Option:
    """Extra metadata of a field.

    flag:    its command-line flag without the dashes; "": the field's name
    metavar: stands for the value in --help; None: the choices, or a word for the type
    lower:   the smallest number that is allowed; null is allowed where it is the default
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    lower: int | None = None
    choices: tuple[str, ...] = ()


def option_metadata(help: str, **more: Any) -> dict[str, Any]:
    """The metadata of a field that has to be given; `more` is that of Option."""
    return {"option": Option(help, **more)}


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with a default; `more` is that of Option."""
    return dataclasses.field(default=default, metadata=option_metadata(help, **more))


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    result: Option | None = field.metadata.get("option")
    return result


def check_options(settings: Any, problems: Problems, key_of: Callable[[str], str]) -> None:
    """Note every value that is too small or none of the choices.

    key_of: where a field is changed, by its name
    """
    for field in dataclasses.fields(settings):
        metadata, value = option_of(field), getattr(settings, field.name)
        if metadata is None or value is None:
            continue
        if metadata.choices:
            problems.check_choice(field.name, value, metadata.choices, key_of(field.name))
        if metadata.lower is not None:
            problems.check_minimum(field.name, value, metadata.lower, key_of(field.name))


def values_of(kind: type, settings: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind`, as `settings` has them."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)}


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
    roles, changes = _roles(type(settings)), dict[str, Any]()
    for field in dataclasses.fields(typing.cast(Any, settings)):
        name, value = field.name, getattr(settings, field.name)
        if name in roles and value:
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
    roles = _roles(type(settings))
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        members = value if isinstance(value, tuple) else (value,)
        if name in roles:
            yield from (NamedPath(name, path, roles[name].private) for path in members if path)
            continue
        for member in filter(dataclasses.is_dataclass, members):
            for inner in paths_in(member):
                yield dataclasses.replace(inner, name=f"{name}.{inner.name}")


def _roles(kind: type) -> dict[str, _Path]:
    """The fields of a dataclass that are paths."""
    hints = typing.get_type_hints(kind, include_extras=True)
    roles = {field.name: _mark(hints[field.name]) for field in dataclasses.fields(kind)}
    return {name: mark for name, mark in roles.items() if mark is not None}


def _mark(hint: Any) -> _Path | None:
    """Return the path role of a type, of one of its alternatives, or of its members."""
    roles = (_mark(argument) for argument in typing.get_args(hint))
    role = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, _Path))
    return next((mark for mark in (*role, *roles) if mark is not None), None)


Built = TypeVar("Built")


def build(kind: type[Built], values: Any, origin: str, *, key: str = "") -> Built:
    """An object of the dataclass `kind` from `values`.

    origin: what the values are, for the head of an error
    key:    the configuration key that holds the values, for the single problems

    Raises ConfigError with every problem found.
    """
    problems = Problems(origin)
    built: Built = _dataclass(kind, values, key, problems)
    problems.raise_if_any(ConfigError)
    return built


def _dataclass(kind: type, values: Any, key: str, problems: Problems) -> Any:
    if not isinstance(values, Mapping):
        _reject(f"{key or 'the content'} must be a mapping", values, problems)
        return None
    before = len(problems.messages)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            problems.add(f"unknown key {_join(key, name)}", choices=sorted(fields))
    for name, item in fields.items():
        if name not in values and is_required(item):
            problems.add(f"missing key {_join(key, name)}")
    hints = typing.get_type_hints(kind)
    built = {
        name: _value(hints[name], values[name], _join(key, name), problems)
        for name in fields
        if name in values
    }
    if len(problems.messages) > before:
        return None
    try:
        return kind(**built)
    except LauncherError as error:
        problems.merge(error)
        return None


def _value(hint: Any, value: Any, key: str, problems: Problems) -> Any:
    """`value` as the annotated type `hint`; a problem where it is something else."""
    arguments = typing.get_args(hint)
    container = typing.get_origin(hint)
    if hint is Any:
        return value
    if container in (typing.Union, types.UnionType):
        return _union(arguments, value, key, problems)
    if container is tuple:
        return _tuple(arguments, value, key, problems)
    if container is not None and issubclass(container, Mapping):
        if isinstance(value, Mapping):
            return {
                str(name): _value(arguments[1], item, _join(key, name), problems)
                for name, item in value.items()
            }
        _reject(f"{key} must be a mapping", value, problems)
        return None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value, key, problems)
    return _scalar(hint, value, key, problems)


def _union(choices: tuple[Any, ...], value: Any, key: str, problems: Problems) -> Any:
    """The first alternative that fits without a conversion, else the last one's answer."""
    if value is None and type(None) in choices:
        return None
    alternatives = [choice for choice in choices if choice is not type(None)]
    for choice in alternatives[:-1]:
        if isinstance(choice, type) and type(value) is choice:
            return value
    return _value(alternatives[-1], value, key, problems)


def _tuple(kinds: tuple[Any, ...], value: Any, key: str, problems: Problems) -> Any:
    if not isinstance(value, (list, tuple)):
        problems.add(f"{key} must be a list", got=value, change=f"{key}=[...]")
        return None
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        problems.add(f"{key} must have {len(kinds)} members", got=list(value))
        return None
    return tuple(
        _value(kind, item, f"{key}[{index}]", problems)
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _scalar(kind: Any, value: Any, key: str, problems: Problems) -> Any:
    """A whole number is also a float, and a name made of digits may have been read as a number."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and type(value) is int:
        return str(value)
    if type(value) is not kind:
        words = {str: "text", int: "a whole number", float: "a number", bool: "True or False"}
        _reject(f"{key} must be {words.get(kind, kind)}", value, problems)
        return None
    return value


def _reject(message: str, value: Any, problems: Problems) -> None:
    """A value of a wrong kind; YAML's null is none of any kind."""
    problems.add(f"{message}, not null" if value is None else message, got=value)


def is_required(item: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default."""
    return item.default is item.default_factory is dataclasses.MISSING


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
