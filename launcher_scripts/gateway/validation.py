"""From the bytes of a request to its body's class, or to an error in the client's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic
import pydantic_core
from pydantic_core import ErrorDetails

from launcher_scripts.gateway.api_errors import ApiError, bad_request
from launcher_scripts.gateway.parameters import StrictBody, used_parameters

_MAX_PROBLEMS = 5
_MAX_ERRORS = 100  # of pydantic's, of which the problems are made
_MAX_NAME = 64
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # that can stand in a header
_EXPECTED = "Input should be "  # pydantic's
Body = TypeVar("Body", bound=StrictBody)
Keys = tuple[str | int, ...]  # from the body to a value in it


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return values


def parsed(kinds: Sequence[type[Body]], body: bytes, warnings: list[str]) -> Body:
    """Return a body as one of `kinds`: of two, the second one is for messages. Raises ApiError."""
    values = parse_body(body)
    return validated(kinds[-1 if values.get("messages") is not None else 0], values, warnings)


def validated(
    kind: type[Body], values: Mapping[str, Any], warnings: list[str] | None = None
) -> Body:
    """Return `values` as a body without the parameters of `kind.unused`; null counts as absent.

    Tools that are no functions of the client are skipped, with an entry of `warnings`.
    Raises ApiError that names the parameters that are wrong.
    """
    used = used_parameters(kind.unused, values)
    for name, skipped_type in (("tools", _tool_type), ("input", _item_type)):
        if not isinstance(entries := used.get(name), list):
            continue
        used[name] = [entry for entry in entries if skipped_type(kind, entry) is None]
        skipped = sorted(
            {tool_type for entry in entries if (tool_type := skipped_type(kind, entry))}
        )
        if skipped and warnings is not None:
            types = ", ".join(skipped[:_MAX_PROBLEMS])
            warnings.append(f"{name}: skipped, because the gateway runs no tools: {types}")
    try:
        return kind.model_validate(used)
    except pydantic.ValidationError as error:
        raise _rejection(kind, used, error) from error


def _tool_type(kind: type[Body], tool: Any) -> str | None:
    """Return the type of a tool that is not a function, or None for one that is or may be."""
    name = tool.get("type") if isinstance(tool, dict) else None
    if not kind.tool_types or not isinstance(name, str) or name in kind.tool_types:
        return None
    return name if _NAME.fullmatch(name) else "another type"


def _item_type(kind: type[Body], item: Any) -> str | None:
    """Return the type of an item of the input that is skipped."""
    name = item.get("type") if isinstance(item, dict) else None
    return name if isinstance(name, str) and name in kind.item_types else None


def _rejection(
    kind: type[Body], values: Mapping[str, Any], error: pydantic.ValidationError
) -> ApiError:
    errors = error.errors(include_url=False, include_input=False)[:_MAX_ERRORS]
    messages: dict[Keys, list[str]] = {}
    for item in errors:
        keys = _keys(values, item)
        if (message := _message(kind, item, keys)) not in messages.setdefault(keys, []):
            messages[keys].append(message)
    # A value of a union has an error for each type; those of its parts are about its own type.
    selected = [keys for keys in messages if not any(_contains(keys, other) for other in messages)]
    problems = [_problem(keys, messages[keys]) for keys in selected[:_MAX_PROBLEMS]]
    unknown = errors[0]["type"] == "extra_forbidden"
    return bad_request(
        "; ".join(problems),
        param=str(selected[0][0])[:_MAX_NAME] if selected[0] else None,
        code="unsupported_parameter" if unknown else "invalid_value",
    )


def _keys(values: Mapping[str, Any], error: ErrorDetails) -> Keys:
    """Return the keys of an error's location, without the names of unions' members."""
    keys: list[str | int] = []
    value: Any = values
    for part in error["loc"]:
        if isinstance(value, dict):
            exists = part in value
        else:
            exists = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if exists:
            keys.append(part)
            value = value[part]
    if error["type"] == "missing" and tuple(keys[-1:]) != error["loc"][-1:]:  # null may be there
        keys.append(error["loc"][-1])
    return tuple(keys)


def _message(kind: type[Body], error: ErrorDetails, keys: Keys) -> str:
    if error["type"] == "extra_forbidden":
        choices = f"; choices: {', '.join(sorted(kind.model_fields))}" if len(keys) == 1 else ""
        return f"it is unknown or not supported{choices}"
    if error["type"] == "union_tag_invalid":
        context = error["ctx"]
        return f"got type {context['tag'][:_MAX_NAME]!r}; expected {context['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return "it has no type"
    if error["type"] in ("model_type", "dict_type"):
        return f"{_EXPECTED}an object"
    if error["type"] == "json_type":
        return f"{_EXPECTED}a text in JSON"
    if error["type"] == "missing":
        return "it is missing"
    if error["type"] in ("too_short", "string_too_short") and error["ctx"]["min_length"] == 1:
        return "it is empty"
    return error["msg"].removeprefix("Value error, ")


def _contains(keys: Keys, others: Keys) -> bool:
    return len(others) > len(keys) and others[: len(keys)] == keys


def _problem(keys: Keys, messages: Sequence[str]) -> str:
    """Return one sentence: the name of a value, and its errors or the types that it can have."""
    name = ".".join(str(key)[:_MAX_NAME] for key in keys) or "body"
    if all(message.startswith(_EXPECTED) for message in messages):
        types = " or ".join(message.removeprefix(_EXPECTED) for message in messages)
        return f"{name}: expected {types}"
    return f"{name}: {'; '.join(messages)}"
