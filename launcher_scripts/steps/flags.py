"""Command-line flags from a settings dataclass, for people who run a step without a stage.

Every field becomes a flag of its name, a nested dataclass one flag per member. What is given goes
through the same checks as a settings file; what is not keeps the dataclass's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.config.settings import Settings, build_settings

Values = dict[str, Any]
_WORDS = {str: "TEXT", int: "N", float: "N"}


@dataclass(frozen=True)
class Flag:
    """How one setting is spelled on the command line; `metavar` stands for its value in --help."""

    help: str
    name: str = ""
    metavar: str | None = None


@dataclass(frozen=True)
class FlagTable:
    """The flags of a settings dataclass.

    flags:    field (of a nested dataclass: `field.member`) -> its flag
    left_out: fields that the step does not use
    complete: fills in what the flags leave open, before the checks
    """

    kind: type
    flags: Mapping[str, Flag]
    left_out: Collection[str] = ()
    complete: Callable[[Values], Values] = dict

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """One argument per field; those without a default come first and are required."""
        needed = parser.add_argument_group("required")
        others = parser.add_argument_group("optional")
        for key, hint, default in fields(self.kind):
            if key in self.left_out:
                continue
            required = default is dataclasses.MISSING
            flag = self.flags[key]
            options = _options(hint, flag)
            text = flag.help if required or default in (None, ()) else f"{flag.help} [{default}]"
            (needed if required else others).add_argument(
                _spelled(key, flag),
                dest=key,
                default=argparse.SUPPRESS,
                required=required,
                help=text.replace("%", "%%"),
                **options,
            )

    def settings(self, given: argparse.Namespace) -> Any:
        """The settings that the flags say; raises ConfigError with every problem."""
        values: Values = {}
        for key, value in vars(given).items():
            if key not in self.flags:
                continue
            outer, _, member = key.partition(".")
            if member:
                values.setdefault(outer, {})[member] = value
            else:
                values[outer] = value
        kind: type[Settings] = self.kind
        return build_settings(kind, self.complete(values), "the command line")


def fields(kind: type, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(key, type, default) of every field, with nested dataclasses opened."""
    hints = typing.get_type_hints(kind)
    found: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += fields(typing.cast(type, hint), f"{prefix}{field.name}.")
        else:
            found.append((f"{prefix}{field.name}", hint, field.default))
    return found


def _options(hint: Any, flag: Flag) -> Values:
    """What argparse needs to know about a type: a switch, a list, or one value."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "type": arguments[0], "metavar": flag.metavar or _WORDS[arguments[0]]}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(argument for argument in arguments if argument is not type(None))
    return {"type": hint, "metavar": flag.metavar or _WORDS[hint]}


def _spelled(key: str, flag: Flag) -> str:
    return "--" + (flag.name or key.replace("_", "-").replace(".", "-"))
