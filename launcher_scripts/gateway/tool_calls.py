"""Calls of tools: what a model writes, as OpenAI's clients read it."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from launcher_scripts.gateway.api_errors import bad_request
from launcher_scripts.gateway.reasoning import overlap

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
        name, begins, remaining = text.partition(_PAIR_BEGINS)
        arguments = _arguments(_PAIR, begins + remaining)
        return [] if arguments is None else [(name.strip(), arguments)]
    parsed = [(name.strip(), _arguments(_PARAMETER, body)) for name, body in calls]
    if _CALL.sub("", text).strip():
        return []
    complete = [(name, arguments) for name, arguments in parsed if arguments is not None]
    return complete if len(complete) == len(parsed) else []


# DeepSeek's marks have a wide bar, and a block for a blank.
_BAR, _BLANK = "\uff5c", "\u2581"
_BEGIN, _SEP, _END = (
    f"<{_BAR}tool{_BLANK}{part}{_BAR}>"
    for part in (f"call{_BLANK}begin", "sep", f"call{_BLANK}end")
)
# What stands before the arguments of a call: its marks, and its name.
_NAME = re.compile(
    rf"\s*(?:<\|tool_call_begin\|>|{_BEGIN}|\[TOOL_CALLS\]|call:)?\s*"
    rf"(?:functions\.|function{_SEP})?(?P<name>[\w.-]+)(?::\d+)?\s*"
    rf"(?:<\|tool_call_argument_begin\|>|{_SEP}|(?:\[CALL_ID\]\w*)?\[ARGS\]|```json)?\s*(?=\{{)"
)
_AFTER = re.compile(rf"\s*(?:```)?\s*(?:<\|tool_call_end\|>|{_END})?\s*")
# A key without quotes, as Gemma writes it, whose strings stand between marks.
_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w-]*)(?=\s*:)")
_QUOTE = re.compile(r'<\|"\|>|<escape>')
_MAX_PYTHON = 1 << 16
_WORDS = {"true": True, "false": False, "null": None}


def named_calls(text: str) -> list[dict[str, Any]]:
    """The calls that a text of names with JSON behind each is made of; [] for any other text."""
    pieces = _QUOTE.split(text)
    if len(pieces) > 1:
        pieces[0::2] = [_KEY.sub(r'\1"\2"', piece) for piece in pieces[0::2]]
        pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
        text = "".join(pieces)
    calls: list[dict[str, Any]] = []
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        if (begin := _NAME.match(text, position)) is None:
            return []
        try:
            arguments, end = decoder.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            return []
        calls.append({"name": begin["name"], _ARGUMENTS[0]: arguments})
        after = _AFTER.match(text, end)
        position = end if after is None else after.end()
    return calls


def python_calls(text: str) -> list[dict[str, Any]]:
    """The calls of a Python list, or of lines, as [weather(city="Berlin")]; [] for any other
    text."""
    if not text.endswith((")", ")]")) or len(text) > _MAX_PYTHON:
        return []
    lines = text if text.startswith("[") else f"[{','.join(text.splitlines())}]"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about strange numbers and escapes
            tree = ast.parse(lines, mode="eval").body
        return [_python_call(node) for node in getattr(tree, "elts", ())]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with names of its arguments")
    return {
        "name": ast.unparse(node.func),
        _ARGUMENTS[0]: {
            str(argument.arg): _WORDS[argument.value.id]
            if isinstance(argument.value, ast.Name) and argument.value.id in _WORDS
            else ast.literal_eval(argument.value)
            for argument in node.keywords
        },
    }


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


# The mark before calls -> the one behind them.
_PAIRS = {
    "<tool_call>": "</tool_call>",  # of Hermes, Qwen and GLM
    "<seed:tool_call>": "</seed:tool_call>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<TOOLCALL>": "</TOOLCALL>",  # of Nemotron
    "<tool_calls>": "</tool_calls>",  # of Hunyuan and Jamba
    "<longcat_tool_call>": "</longcat_tool_call>",
    "<function_calls>": "</function_calls>",  # of OLMo 3
    "<|tool_call|>": "<|/tool_call|>",  # of Phi-4 mini, and of Granite without its end
    "<|tool_call_start|>": "<|tool_call_end|>",  # of LFM2
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",  # of Kimi K2
    f"<{_BAR}tool{_BLANK}calls{_BLANK}begin{_BAR}>": f"<{_BAR}tool{_BLANK}calls{_BLANK}end{_BAR}>",
    "<|START_ACTION|>": "<|END_ACTION|>",  # of Command A
    "<|tools_prefix|>": "<|tools_suffix|>",  # of Apertus
    "<|tool_call>": "<tool_call|>",  # of Gemma 4
    "<start_function_call>": "<end_function_call>",  # of FunctionGemma
    "[TOOL_CALLS]": "</s>",  # of Mistral, to the end of the answer
}
_OPEN = re.compile("|".join(map(re.escape, _PAIRS)))
# Llama's and Mistral's calls are JSON from the first character on; what is before it is a mark.
_DELIMITERS = ("[TOOL_CALLS]", "<|python_tag|>")
# How an object or a list of objects begins, as far as it is there.
_OBJECTS = re.compile(r"(\[\s*)?(\{\s*(\".*)?)?", re.DOTALL)
_PYTHON = re.compile(r"\[\s*([\w.]+)(\(.*)?", re.DOTALL)
_LISTS = re.compile(r"(\[\s*(\{\s*(\".*)?)?)?", re.DOTALL)
# Of an object, however it goes on.
_IN_OBJECT = re.compile(r"\s*(?:\[\s*)?\{\s*\"")
_NAMED_PARTS = (
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *(_BEGIN, _SEP, _END, "[ARGS]", "[CALL_ID]", '<|"|>', "<escape>"),
)
_MARKS = (*_PAIRS, *_PAIRS.values())
# Special tokens that the text of an answer shows, but for the end of any text.
MARKS = tuple(mark for mark in (*_MARKS, *_NAMED_PARTS) if mark != "</s>")
_MAX_MARK = max(map(len, _MARKS))
_ARGUMENTS = ("arguments", "parameters")
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates refuse any other
_DEFINITIONS = ("$defs", "definitions")
_ANYTHING: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. arguments: JSON"""

    name: str
    arguments: str
    call_id: str = field(
        default_factory=lambda: "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    )

    def entry(self, index: int | None = None) -> dict[str, Any]:
        """An entry of `tool_calls`. index: its place, in a stream"""
        position = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**position, "id": self.call_id, "type": "function", "function": function}


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]


def schema_of_one(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the schema of the arguments of the function with this name. Raises ApiError."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return dict(tool["function"].get("parameters") or _ANYTHING)
    choices = ", ".join(names_of(tools))
    raise bad_request(f"tools have no function {name[:64]!r}; choices: {choices}", "tool_choice")


def schema_of_any(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls: at least one, or exactly one. Raises ApiError."""
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool["function"].get("parameters") or _ANYTHING)
        for key in _DEFINITIONS:
            for name, value in (parameters.pop(key, None) or {}).items():
                if shared.setdefault(key, {}).setdefault(name, value) != value:
                    message = (
                        f"two tools define {name!r} differently, and one of them must be called"
                    )
                    raise bad_request(message, "tools")
        properties = {"name": {"const": tool["function"]["name"]}, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    limits = {} if several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **limits, "items": {"anyOf": calls}, **shared}


class ToolText:
    """The text of one answer as it comes: what of it is content, and which tools it calls.

    Text is held back while it may still become a call.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        lists_only: bool = False,
        must_call: bool = False,
    ) -> None:
        """tools: that may be called

        lists_only: a grammar allows calls as a JSON list only; marks and objects are content
        must_call:  it allows such a list alone, so a list that is cut off is no content
        """
        self._must_call = must_call
        self._pairs = {} if lists_only else _PAIRS
        self._beginning = _LISTS if lists_only else _OBJECTS
        self._schemas = {name: schema_of_one(tools, name) for name in names_of(tools)}
        self._buffered = ""
        self._waits = False  # no end of a call, and no mark, is in what is buffered
        self._started = False  # there was content, so what looks like JSON is content, too
        self.calls: list[ToolCall] = []

    def feed(self, text: str, *, finished: bool) -> tuple[str, list[ToolCall]]:
        """Return new content, and complete calls.

        finished: no more text comes
        """
        self._buffered += text
        if self._waits and not finished and not self._may_end(len(text)):
            return "", []
        self._waits = False
        content, num_calls = "", len(self.calls)
        while self._pairs and (mark := _OPEN.search(self._buffered)):
            before = self._buffered[: mark.start()]
            body, close, after = self._buffered[mark.end() :].partition(_PAIRS[mark[0]])
            if not close and not finished:
                self._buffered = self._buffered[len(before) :]
                self._waits = True
                return content + self._content(before), self.calls[num_calls:]
            calls = self._read(body) or self._all_calls(named_calls(body)) or self._read_tags(body)
            content += self._content(before)
            content += "" if calls else self._content(mark[0] + body + close)
            self.calls += calls
            self._buffered = after
        if not finished and self._may_be_a_call():
            self._waits = _IN_OBJECT.match(self._buffered) is not None
            return content, self.calls[num_calls:]
        if finished:
            calls = self._read(self._buffered) if self._may_be_a_call() else []
            if self._must_call and not calls:
                calls = self._all_calls(_first_values(self._buffered))
            self.calls += calls
            content += "" if calls or self._must_call else self._content(self._buffered)
            self._buffered = ""
        else:
            num_buffered = overlap(self._buffered, *self._pairs) if self._pairs else 0
            content += self._content(self._buffered[: len(self._buffered) - num_buffered])
            self._buffered = self._buffered[len(self._buffered) - num_buffered :]
        return content, self.calls[num_calls:]

    def _may_end(self, num_new: int) -> bool:
        """Return whether the new characters complete a mark: a long call is not read again for
        each of its tokens."""
        new = self._buffered[-num_new - _MAX_MARK :]
        return any(mark in new for mark in _MARKS)

    def _content(self, text: str) -> str:
        """Blanks around calls are none."""
        if self.calls or not self._started:
            text = text if text.strip() else ""
        self._started = self._started or bool(text)
        return text

    def _may_be_a_call(self) -> bool:
        """Return whether the answer may be JSON from its first character on."""
        start = self._buffered.lstrip()
        if self._started or self.calls:
            return False
        marked = any(mark.startswith(start) or start.startswith(mark) for mark in _DELIMITERS)
        return marked or self._beginning.fullmatch(start) is not None or self._begins_python(start)

    def _begins_python(self, start: str) -> bool:
        """Return whether a list of Python begins so that calls a tool first."""
        call = _PYTHON.fullmatch(start) if self._pairs else None
        return call is not None and any(
            name == call[1] if call[2] else name.startswith(call[1]) for name in self._schemas
        )

    def _read(self, text: str) -> list[ToolCall]:
        """The calls that all of a text is; none where it is something else."""
        text = text.strip()
        for mark in _DELIMITERS:
            text = text.removeprefix(mark).lstrip()
        values: list[Any] = []
        for value in _json_values(text):
            values += value if isinstance(value, list) else [value]
        return self._all_calls(values or python_calls(text))

    def _read_tags(self, text: str) -> list[ToolCall]:
        """As _read, of what stands between the marks of a call and is not JSON."""
        return self._all_calls(
            {"name": name, _ARGUMENTS[0]: typed(arguments, self._schemas.get(name, {}))}
            for name, arguments in tagged_calls(text)
        )

    def _all_calls(self, values: Iterable[Any]) -> list[ToolCall]:
        """The calls that these values are; none where one is something else."""
        result = [self._call(value) for value in values]
        calls = [call for call in result if call is not None]
        return calls if len(calls) == len(result) else []

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        name = value.get("name", value.get("tool_name"))
        arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
        if name is None and len(value) == 1:  # the name is the key
            ((name, arguments),) = value.items()
        if not isinstance(name, str) or name not in self._schemas:
            return None
        if isinstance(arguments, dict):
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        return ToolCall(name, arguments) if isinstance(arguments, str) else None


def _first_values(text: str) -> list[Any]:
    """The complete values of a JSON list that is cut off."""
    decoder, values, remaining = json.JSONDecoder(), [], text.lstrip()
    try:
        while remaining and remaining[0] in "[,":
            value, end = decoder.raw_decode(remaining[1:].lstrip())
            values.append(value)
            remaining = remaining[1:].lstrip()[end:].lstrip()
    except (ValueError, RecursionError):
        return values
    return values


def _json_values(text: str) -> list[Any]:
    """The JSON values that a text is made of, with semicolons or blanks between them; [] for any
    other text.
    """
    decoder, values, position = json.JSONDecoder(), [], 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        between = re.compile(r"[\s;]*").match(text, position)
        position = position if between is None else between.end()
    return values
