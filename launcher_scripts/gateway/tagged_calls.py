"""Calls of tools that models write with tags of their own, not as JSON.

Qwen Coder and Seed:  <function=NAME><parameter=KEY>VALUE</parameter></function>
MiniMax:              <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
GLM:                  NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

_CALL = re.compile(
    r'<(?:function=|invoke name=)"?([^">]+)"?>(.*?)</(?:function|invoke)>', re.DOTALL
)
_PARAMETER = re.compile(r'<parameter(?:=| name=)"?([^">]+)"?>(.*?)</parameter>', re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_PAIR_BEGINS = "<arg_key>"


def tagged_calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """The names and arguments of the calls that a text is made of; [] for any other text."""
    calls = _CALL.findall(text)
    if not calls:
        name, begins, rest = text.partition(_PAIR_BEGINS)
        arguments = _arguments(_PAIR, begins + rest)
        return [] if arguments is None else [(name.strip(), arguments)]
    found = [(name.strip(), _arguments(_PARAMETER, body)) for name, body in calls]
    if _CALL.sub("", text).strip():
        return []
    known = [(name, arguments) for name, arguments in found if arguments is not None]
    return known if len(known) == len(found) else []


def typed(arguments: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as values of the function's schema. One that is no string is JSON."""
    properties = schema.get("properties") or {}
    return {key: _value(text, properties.get(key) or {}) for key, text in arguments.items()}


def _arguments(pattern: re.Pattern[str], text: str) -> dict[str, str] | None:
    """None where the text has more than arguments."""
    if pattern.sub("", text).strip():
        return None
    return {
        key.strip(): value.removeprefix("\n").removesuffix("\n")
        for key, value in pattern.findall(text)
    }


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
