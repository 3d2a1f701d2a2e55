"""An option is one field of a settings dataclass: its type, default, help, flag and limits.

The keys in conf/, the command-line flags of the steps and the checks derive from the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher_scripts.common.errors import Problems

PORTS = ("0 (a free one)", "1-65535")


@dataclass(frozen=True)
class Option:
    """What a field does not say by its name, type and default.

    flag:    its command-line flag without the dashes; "": the field's name
    metavar: stands for the value in --help; None: the choices, or a word for the type
    least:   the smallest number that is allowed; null is allowed where it is the default
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    least: int | None = None
    choices: tuple[str, ...] = ()


def described(help: str, **more: Any) -> dict[str, Any]:
    """The metadata of a field that has to be given; `more` is that of Option."""
    return {"option": Option(help, **more)}


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with a default; `more` is that of Option."""
    return dataclasses.field(default=default, metadata=described(help, **more))


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    result: Option | None = field.metadata.get("option")
    return result


def check_options(settings: Any, problems: Problems, key_of: Callable[[str], str]) -> None:
    """Note every value that is too small or none of the choices.

    key_of: where a field is changed, by its name
    """
    for field in dataclasses.fields(settings):
        said, value = option_of(field), getattr(settings, field.name)
        if said is None or value is None:
            continue
        if said.choices:
            problems.check_choice(field.name, value, said.choices, key_of(field.name))
        if said.least is not None:
            problems.check_at_least(field.name, value, said.least, key_of(field.name))


def values_of(kind: type, settings: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind`, as `settings` has them."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)}
