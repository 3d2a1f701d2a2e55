"""Parameters of OpenAI's, Anthropic's and vLLM's requests: those that do not change a response, and
the way from the bytes of a request to its body's class, or to an error in the client's words.

The bodies' classes (schemas.py and others) declare the supported parameters. The tables below have
all others of the published request schemas: they are ignored, or rejected unless the value requests
the gateway's usual behavior. docs/gateway-parameters.md is made of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import ErrorDetails

from launcher_scripts.gateway.api_errors import ApiError, bad_request, unsupported


@dataclass(frozen=True)
class UnusedParameter:
    """A parameter that the gateway does not act on.

    reason:  the end of a sentence, "ignored because ..." or "rejected because ..."
    ignored: True: every value is accepted
    neutral: values that are accepted if it is not ignored
    """

    reason: str
    ignored: bool = False
    neutral: tuple[Any, ...] = ()

    @property
    def effect(self) -> str:
        """The end of a sentence for errors and documentation."""
        if self.ignored:
            return f"ignored, because {self.reason}"
        values = ", ".join(map(json.dumps, self.neutral))
        return f"rejected{f' unless it is {values}' if values else ''}, because {self.reason}"

    def is_neutral(self, value: Any) -> bool:
        """True if the value requests the usual behavior; 0 and false are different values."""
        return any(
            isinstance(pattern, bool) == isinstance(value, bool) and pattern == value
            for pattern in self.neutral
        )


Table = Mapping[str, UnusedParameter]


def _ignored(reason: str) -> UnusedParameter:
    return UnusedParameter(reason, ignored=True)


def _rejected(reason: str, *neutral: Any) -> UnusedParameter:
    return UnusedParameter(reason, neutral=neutral)


_PREFIXES = "prompts of one key share computed prefixes without it"
_CALLER = "clients are distinguished by their keys or addresses"
_ONE_TIER = "the deployment has one service tier"
_TEXT_ONLY = "the models write text only"
_NO_PADDING = "events are never padded"
_NO_MODERATION = "the gateway has no moderation model"
_NO_ROUTING = "the deployment runs where you started it"
_NO_TRUNCATION = (
    "the conversation is used in full; one that is too long gets the error context_length_exceeded"
)
_UNKNOWN_EFFORT = "open models have no such option"

VLLM: Table = {
    "priority": _rejected("clients take turns", 0),
    "skip_special_tokens": _rejected("special tokens have no text", True),
    "spaces_between_special_tokens": _rejected("special tokens have no text", True),
    "detokenize": _rejected("responses contain text", True),
    "bad_words": _rejected("logit_bias replaces it", []),
    "truncate_prompt_tokens": _rejected("the prompt is used in full"),
    "allowed_token_ids": _rejected("logit_bias and grammars replace it"),
    "prompt_logprobs": _rejected("echo with logprobs replaces it"),
    "request_id": _ignored("the header X-Request-Id names a request"),
    "return_token_ids": _rejected("return_tokens_as_token_ids replaces it", False),
}
_SAMPLING: Table = {
    **VLLM,
    "user": _ignored(_CALLER),
    "safety_identifier": _ignored(_CALLER),
    "stream_options.include_obfuscation": _ignored(_NO_PADDING),
    "prompt_cache_key": _ignored(_PREFIXES),
    "prompt_cache_options": _ignored(_PREFIXES),
    "prompt_cache_retention": _ignored(_PREFIXES),
    "service_tier": _ignored(_ONE_TIER),
    "store": _ignored("completions and chats are never stored"),
    "metadata": _ignored("completions and chats are never stored"),
}
COMPLETION: Table = {
    **_SAMPLING,
    "suffix": _rejected("the text is not inserted before another text", ""),
}
EMBEDDINGS: Table = {"user": _ignored(_CALLER)}
CHAT: Table = {
    **_SAMPLING,
    "audio": _rejected(_TEXT_ONLY),
    "chat_template": _rejected("a template is a program; --chat-template names one"),
    "include_reasoning": _rejected("the reasoning has a key of its own", True),
    "documents": _rejected("the messages contain all that the model reads", []),
    "echo": _rejected("a chat has no text to repeat", False),
    "function_call": _rejected("tool_choice replaces it", "none", "auto"),
    "functions": _rejected("tools replaces it", []),
    "modalities": _rejected(_TEXT_ONLY, ["text"], []),
    "moderation": _rejected(_NO_MODERATION),
    "prediction": _ignored("it affects only the speed of OpenAI's service"),
    "verbosity": _ignored(_UNKNOWN_EFFORT),
    "web_search_options": _rejected("the gateway runs no tools"),
}
RESPONSES: Table = {
    "access_programs": _rejected("it is a setting of OpenAI's accounts"),
    "background": _rejected("a response is computed while its client is connected", False),
    "background_options": _rejected("a response is computed while its client is connected"),
    "client_metadata": _ignored("it describes the client"),
    "context_management": _ignored(_NO_TRUNCATION),
    "conversation": _rejected("the gateway stores no conversations; send all items in input"),
    "image": _rejected(_TEXT_ONLY),
    "max_tool_calls": _ignored("it limits tools that the server runs, and the gateway runs none"),
    "moderation": _rejected(_NO_MODERATION),
    "prompt": _rejected("the gateway stores no prompts"),
    "prompt_cache_key": _ignored(_PREFIXES),
    "prompt_cache_options": _ignored(_PREFIXES),
    "prompt_cache_retention": _ignored(_PREFIXES),
    "reasoning.context": _ignored("the chat template decides which reasoning the model reads"),
    "reasoning.generate_summary": _ignored("the full reasoning is returned"),
    "reasoning.mode": _rejected(_UNKNOWN_EFFORT, "standard"),
    "safety_identifier": _ignored(_CALLER),
    "service_tier": _ignored(_ONE_TIER),
    "stream_options": _ignored(_NO_PADDING),
    "text.verbosity": _ignored(_UNKNOWN_EFFORT),
    "top_logprobs": _rejected("only completions and chats have log-probabilities", 0),
    "truncation": _ignored(_NO_TRUNCATION),
}
CONVERSATION: Table = {
    "betas": _ignored("it selects features of Anthropic's service"),
    "billing_policy": _ignored("nothing is billed"),
    "cache_control": _ignored(_PREFIXES),
    "compaction": _rejected("the gateway does not summarize conversations"),
    "context_management": _ignored(_NO_TRUNCATION),
    "mcp_servers": _rejected("the gateway runs no tools", []),
    "output_config.task_budget": _ignored(_UNKNOWN_EFFORT),
    "speed": _ignored("all requests run at full speed"),
    "user_profile_id": _ignored(_CALLER),
    "workspace_id": _ignored(_CALLER),
}
MESSAGES: Table = {
    **CONVERSATION,
    "container": _rejected("the gateway runs no tools"),
    "diagnostics": _ignored("it explains misses of Anthropic's prompt cache"),
    "fallback_credit_token": _ignored("nothing is billed"),
    "fallbacks": _ignored("the requested model answers every request"),
    "inference_geo": _ignored(_NO_ROUTING),
    "metadata": _ignored(_CALLER),
    "service_tier": _ignored(_ONE_TIER),
    "thread": _rejected("the gateway stores no conversations; send all messages"),
}


def used_parameters(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without the parameters of the table; null counts as absent.

    Raises ApiError that names a parameter with a value that is rejected.
    """
    used = {name: value for name, value in values.items() if value is not None}
    for name, parameter in table.items():
        group, _, key = name.rpartition(".")
        owner = used.get(group) if group else used
        if not isinstance(owner, dict) or key not in owner:
            continue
        value = owner[key]
        if not (parameter.ignored or value is None or parameter.is_neutral(value)):
            raise unsupported(group or key, f"{name} is not supported: it is {parameter.effect}")
        if group:
            used[group] = {other: owner[other] for other in owner if other != key}
        else:
            del used[key]
    return used


class StrictBody(BaseModel):
    """An object of a request without unknown keys.

    unused:     the parameters of the published schema that are no fields
    tool_types: types of `tools` that are functions of the client
    item_types: types of items of `input` that are skipped
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    unused: ClassVar[Table] = {}
    tool_types: ClassVar[tuple[str, ...]] = ()
    item_types: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _integers(cls, values: Any) -> Any:
        """Accept 8.0 for 8: JSON has one type of numbers, and some clients write all as floats."""
        if not isinstance(values, dict):
            return values
        return {
            name: list(map(_integer, value)) if isinstance(value, list) else _integer(value)
            for name, value in without_nulls(values).items()
        }


class LooseBody(BaseModel):
    """A part of a conversation that clients send back. What else they say of it is not used."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _nulls(cls, values: Any) -> Any:
        """Null counts as absent."""
        return without_nulls(values) if isinstance(values, dict) else values


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
