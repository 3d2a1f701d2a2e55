"""Typed objects from plain mappings: unknown keys, missing keys and wrong types are answered.

A frozen dataclass is the schema. YAML gives mappings, lists and scalars; `build` turns them into
the dataclass and its nested ones, collecting every problem before it raises.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from launcher_scripts.common.errors import ConfigError, LauncherError, Problems

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
        _refuse(f"{key or 'the content'} must be a mapping", values, problems)
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
        _refuse(f"{key} must be a mapping", value, problems)
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
        _refuse(f"{key} must be {words.get(kind, kind)}", value, problems)
        return None
    return value


def _refuse(what: str, value: Any, problems: Problems) -> None:
    """A value of a wrong kind; YAML's null is none of any kind."""
    problems.add(f"{what}, not null" if value is None else what, got=value)


def is_required(item: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return item.default is item.default_factory is dataclasses.MISSING


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
