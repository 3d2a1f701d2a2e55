"""Keys of config.ini, and reading those of one section with all problems collected."""

from __future__ import annotations

import configparser
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import Problems

_BOOLEANS = configparser.RawConfigParser.BOOLEAN_STATES


@dataclass(frozen=True)
class IniKeys:
    """One section. A wrong or missing value is noted, and a stand-in keeps the reading going."""

    path: Path
    values: Mapping[str, str]
    problems: Problems

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

    def named(self, key: str, default: str, names: Mapping[str, str]) -> str:
        """Return the name of the value outside of the file. names: that -> what the file says."""
        word = self.text(key, names[default], tuple(names.values()))
        return {name: value for value, name in names.items()}.get(word, default)

    def typed(self, key: str, kind: str, default: Any = None) -> Any:
        """A value of the type that a field of a dataclass declares: `int`, `float | None`, ...

        A text without a word is None where that is allowed.
        """
        readers = {"int": self.number, "float": self.real, "bool": self.boolean}
        reader = readers.get(kind.split(" ")[0])
        if reader is None:
            return self.values[key] or (None if kind.endswith("| None") else "")
        return reader(key, default)

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


Sections = Mapping[str, IniKeys]
Text = Callable[[Any], str | None]


@dataclass(frozen=True)
class Key:
    """A key of a section. Without a field and a text it is a fact of the files: how they are cut.

    field:        the hyperparameter that it holds exactly
    default:      the field where the key is missing; None: the key must be there
    names:        value of the field -> what the file calls it, where that is not the value itself
    text:         what is written where no field is held: itself, or by config; None for no key
    read:         reads the field, where its type and `names` do not say how
    encoder_only: whether it is of models that are an encoder alone, or of the others; None: of all
    """

    name: str
    field: str = ""
    default: Any = None
    names: Mapping[str, str] | None = None
    text: str | Text | None = None
    read: Callable[[IniKeys], Any] | None = None
    encoder_only: bool | None = None

    def written(self, config: Any, metadata: Mapping[str, str]) -> str | None:
        """Return the text in the file for `config`; None if the key is left out."""
        if self.encoder_only not in (None, getattr(config, "encoder_only", False)):
            return None
        if callable(self.text):
            return self.text(config)
        if not self.field:
            return self.text or metadata[self.name]
        value = getattr(config, self.field)
        return str(value) if self.names is None else self.names[value]

    def value(self, keys: IniKeys, kind: str) -> Any:
        """The field as the file says it. kind: its type."""
        if self.read is not None:
            return self.read(keys)
        if self.names is not None:
            return keys.named(self.name, self.default, self.names)
        return keys.typed(self.name, kind, self.default)


@dataclass(frozen=True)
class IniFormat:
    """The format in which one family is written.

    config_type: the dataclass of its hyperparameters
    main:        the section with tensor_para_size and weight_data_type
    mark:        section and, where that is not enough, key that only this family has
    sections:    section -> its keys in their order; the sections without [extension], [task_...]
    derived:     fields so far, sections, folder -> the fields that follow from several keys, or
                 from the files beside config.ini
    """

    config_type: type[Any]
    main: str
    mark: tuple[str, str | None]
    sections: Mapping[str, tuple[Key, ...]]
    derived: Callable[[Mapping[str, Any], Sections, Path], dict[str, Any]]

    @property
    def types(self) -> dict[str, str]:
        """Field -> its type."""
        return {field.name: str(field.type) for field in dataclasses.fields(self.config_type)}

    @property
    def extension(self) -> list[str]:
        """The fields that no key of the other sections holds."""
        covered = {key.field for keys in self.sections.values() for key in keys}
        return [name for name in self.types if name not in covered and name != "parts"]

    def values(self, sections: Sections, folder: Path) -> dict[str, Any]:
        """The fields from these sections alone. Where two sections hold one, the first is asked."""
        encoder_only = not sections["decoder"].values
        values: dict[str, Any] = {}
        for section, rows in self.sections.items():
            for key in rows:
                fits = key.encoder_only in (None, encoder_only)
                if key.field and key.field not in values and fits:
                    values[key.field] = key.value(sections[section], self.types[key.field])
        return values | self.derived(values, sections, folder)
