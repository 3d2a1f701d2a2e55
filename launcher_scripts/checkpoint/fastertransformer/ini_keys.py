"""The keys of one section of config.ini, read with a type; problems are collected."""

from __future__ import annotations

import configparser
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import Problems

EXTENSION = "extension"
EXTENSION_VERSION = 1

Sections = dict[str, dict[str, str]]

_BOOLEANS = configparser.RawConfigParser.BOOLEAN_STATES


class IniKeys:
    """One section. A wrong or missing value is noted, and a stand-in keeps the reading going."""

    def __init__(
        self, path: Path, values: Mapping[str, str], problems: Problems | None = None
    ) -> None:
        self.path = path
        self.values = values
        self.problems = problems if problems is not None else Problems(str(path))

    def number(self, key: str, default: int | None) -> int:
        return int(self._read(key, int, default, 1))

    def real(self, key: str, default: float | None) -> float:
        return float(self._read(key, float, default, 1.0))

    def boolean(self, key: str, default: bool | None) -> bool:
        return bool(self._read(key, lambda text: _BOOLEANS[text.lower()], default, False))

    def text(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.values.get(key, default)
        if value not in choices:
            self.problems.add(f"unknown {key}", got=value, choices=choices)
        return value

    def _read(self, key: str, convert: Any, default: Any, stand_in: Any) -> Any:
        if key not in self.values:
            if default is None:
                self.problems.add("missing key", got=key)
                return stand_in
            return default
        try:
            return convert(self.values[key])
        except (ValueError, KeyError):
            self.problems.add(f"wrong value of {key}", got=self.values[key])
            return stand_in


def extension_section(config: Any, fields: tuple[str, ...]) -> dict[str, str]:
    """[extension]: the fields of `config` that the other sections have no words for."""
    values = {name: getattr(config, name) for name in fields}
    return {"version": str(EXTENSION_VERSION)} | {
        name: str(value) for name, value in values.items() if value is not None
    }


def extension_values(keys: IniKeys, config_type: type, fields: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `config_type` from [extension]; an unknown key means a newer format."""
    version = keys.number("version", EXTENSION_VERSION)
    if version != EXTENSION_VERSION:
        keys.problems.add(
            f"{keys.path}: unknown extension version", got=version, choices=[EXTENSION_VERSION]
        )
    for name in sorted(keys.values.keys() - {"version", *fields}):
        keys.problems.add(f"{keys.path}: unknown extension key", got=name, choices=fields)
    types = {field.name: str(field.type) for field in dataclasses.fields(config_type)}
    readers = {"int": keys.number, "float": keys.real, "bool": keys.boolean}
    values: dict[str, Any] = {}
    for name in keys.values.keys() & set(fields):
        reader = readers.get(types[name].split(" ")[0])
        values[name] = keys.values[name] if reader is None else reader(name, None)
    return values
