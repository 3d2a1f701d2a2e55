"""Command-line flags from a settings dataclass, for people who run a step without a stage.

Every option becomes a flag of its name, a nested dataclass one flag per member. What is given goes
through the same checks as a settings file; what is not keeps the dataclass's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher_scripts.config.options import Option, option_of
from launcher_scripts.config.schema import build

Values = dict[str, Any]
# A key of the export's configuration, and the fields that have other names than their keys.
_KEY = re.compile(r"export\.(?:model|triton_deployment|run)\.(?P<name>\w+)(?:=(?P<value>[\w.]+))?")
_FIELDS = {
    "tensor_model_parallel_size": "parallelism.tp_size",
    "pipeline_model_parallel_size": "parallelism.pp_size",
    "tokenizer": "tokenizer.source",
    "results_dir": "triton_model_dir",
    "model_train_name": "triton_model_dir",
}
_WORDS = {str: "TEXT", int: "N", float: "N"}


@dataclass(frozen=True)
class FlagTable:
    """The flags of a settings dataclass: one for every field that is an option.

    own:      field (of a nested dataclass: `field.member`) -> its option, where the flag differs
    left_out: fields that the step does not use
    complete: fills in what the flags leave open, before the checks
    """

    kind: type
    own: Mapping[str, Option] = field(default_factory=dict)
    left_out: Collection[str] = ()
    complete: Callable[[Values], Values] = dict

    @property
    def options(self) -> dict[str, tuple[Option, Any, Any]]:
        """Field -> its option, type and default."""
        result = {}
        for key, hint, item in fields(self.kind):
            said = self.own.get(key) or option_of(item)
            if said is not None and key not in self.left_out:
                result[key] = (said, hint, item.default)
        return result

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """One argument per field; those without a default come first and are required."""
        needed = parser.add_argument_group("required")
        others = parser.add_argument_group("optional")
        for key, (said, hint, default) in self.options.items():
            required = default is dataclasses.MISSING
            text = said.help if required or default in (None, ()) else f"{said.help} [{default}]"
            (needed if required else others).add_argument(
                _spelled(key, said),
                dest=key,
                default=argparse.SUPPRESS,
                required=required,
                help=text.replace("%", "%%"),
                **_options(hint, said),
            )

    def settings(self, given: argparse.Namespace) -> Any:
        """The settings that the flags say; raises ConfigError with every problem."""
        values: Values = {}
        for key in self.options:
            if not hasattr(given, key):
                continue
            outer, _, member = key.partition(".")
            if member:
                values.setdefault(outer, {})[member] = getattr(given, key)
            else:
                values[outer] = getattr(given, key)
        return build(self.kind, self.complete(values), "the command line")

    def in_flags(self, message: str) -> str:
        """A message of the configuration's keys with the flags in their place."""
        spelled = {key: _spelled(key, said) for key, (said, _, _) in self.options.items()}
        names = {
            **spelled,
            **{name: spelled[key] for name, key in _FIELDS.items() if key in spelled},
        }

        def flag(match: re.Match[str]) -> str:
            name, value = names.get(match["name"]), match["value"]
            if name is None:
                return match[0]
            return name if value in (None, "True") else f"{name} {value}"

        return _KEY.sub(flag, message)


def fields(kind: type, prefix: str = "") -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """(key, type, field) of every field, with nested dataclasses opened."""
    hints = typing.get_type_hints(kind)
    result: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            result += fields(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            result.append((f"{prefix}{item.name}", hint, item))
    return result


def _options(hint: Any, said: Option) -> Values:
    """What argparse needs to know about a type: a switch, a list, or one value."""
    arguments = typing.get_args(hint)
    many = typing.get_origin(hint) is tuple
    if arguments:  # of a tuple, or of X | None
        hint = next(argument for argument in arguments if argument is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    metavar = said.metavar or "|".join(said.choices) or _WORDS[hint]
    return {"type": hint, "metavar": metavar, **({"nargs": "+"} if many else {})}


def _spelled(key: str, said: Option) -> str:
    return "--" + (said.flag or key.replace("_", "-").replace(".", "-"))
