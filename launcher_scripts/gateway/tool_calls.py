"""Calls of tools: what a model writes, as OpenAI's clients read it; and answers in the format
harmony, which OpenAI's gpt-oss writes (https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from launcher_scripts.gateway.api_errors import bad_request
from launcher_scripts.gateway.reasoning import NAMES, Reasoning, overlap

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
}
_OPEN = re.compile("|".join(map(re.escape, _PAIRS)))
# Llama's and Mistral's calls are JSON from the first character on; what is before it is a mark.
_DELIMITERS = ("[TOOL_CALLS]", "<|python_tag|>")
# How an object or a list of objects begins, as far as it is there.
_OBJECTS = re.compile(r"(\[\s*)?(\{\s*(\".*)?)?", re.DOTALL)
_LISTS = re.compile(r"(\[\s*(\{\s*(\".*)?)?)?", re.DOTALL)
# Of an object, however it goes on.
_IN_OBJECT = re.compile(r"\s*(?:\[\s*)?\{\s*\"")
_MARKS = (*_PAIRS, *_PAIRS.values())
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
            calls = self._read(body) or self._read_tags(body)
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
        return marked or self._beginning.fullmatch(start) is not None

    def _read(self, text: str) -> list[ToolCall]:
        """The calls that all of a text is; none where it is something else."""
        text = text.strip()
        for mark in _DELIMITERS:
            text = text.removeprefix(mark).lstrip()
        values: list[Any] = []
        for value in _json_values(text):
            values += value if isinstance(value, list) else [value]
        return self._all_calls(values)

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
        if not isinstance(value, dict) or value.get("name") not in self._schemas:
            return None
        arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
        if isinstance(arguments, dict):
            return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
        return ToolCall(value["name"], arguments) if isinstance(arguments, str) else None


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


START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
# Special tokens that the text of an answer shows. Those behind its last message end the row.
DELIMITERS = (START, CHANNEL, MESSAGE, END, "<|constrain|>")
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_ENDS = re.compile("|".join(map(re.escape, (END, START))))
_BEGINNINGS = (START, CHANNEL, "to=")  # of a header
# What a text of a given form may come behind.
REASONING = Reasoning(
    f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
)


def writes_harmony(template: str) -> bool:
    """Return whether a model with this chat template answers so."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat as gpt-oss's template reads them: a message has one call at most, and
    what the call gave follows it.
    """
    result: list[dict[str, Any]] = []
    remaining = deque(map(_with_thinking, messages))
    while remaining:
        message = remaining.popleft()
        calls, results = message.get("tool_calls"), []
        if not isinstance(calls, list) or len(calls) < 2:
            result.append(message)
            continue
        while remaining and remaining[0]["role"] == "tool":
            results.append(remaining.popleft())
        for call in calls:
            call_id = call.get("id") if isinstance(call, dict) else None
            matching = [
                result for result in results if call_id and result.get("tool_call_id") == call_id
            ]
            results = [result for result in results if result not in matching]
            result += [{**message, "tool_calls": [call]}, *matching]
            message = {"role": "assistant", "content": ""}
        result += results
    return result


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """Move reasoning, and text before a call, to `thinking`, since the template allows no other
    text beside a call. What is empty is text, or is not there."""
    reasoning, content = message.get(NAMES[0]), message.get("content") or ""
    fields = {name: value for name, value in message.items() if name != "tool_calls" or value}
    if "tool_calls" in fields and reasoning and content:
        reasoning, content = f"{reasoning}\n{content}", ""
    return {**fields, "content": content, **({"thinking": reasoning} if reasoning else {})}


@dataclass
class _Message:
    """One message of an answer.

    thought: whether it is what was thought;  called: the function that it calls
    begun:   whether there was text of it
    """

    reasoning: bool
    called: str | None = None
    started: bool = False


class HarmonyText:
    """Reads the text of one answer as it comes; see AnswerText.

    Text is held back while it may still become a mark, and a call until it is complete.
    """

    def __init__(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        lists_only: bool = False,
        must_call: bool = False,
    ) -> None:
        """prompt: what the answer goes on with, perhaps within a message

        tools: that may be called
        lists_only, must_call: calls are a list in the answer, by a grammar; see ToolText
        """
        self._names = names_of(tools)
        self._forced = ToolText(tools, lists_only=True, must_call=must_call) if lists_only else None
        header, mark, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        self._message = self._of_header(header) if mark else None
        self._buffered = ""
        self._seen: set[bool] = set()  # of what there was text: of thoughts, of an answer
        self.calls: list[ToolCall] = []

    def feed(self, text: str, *, finished: bool) -> dict[str, Any]:
        """Return the new part of a message, without its calls. finished: no more text comes"""
        self._buffered += text
        texts = {True: "", False: ""}  # what is thought, and what is answered
        while message := self._message or self._next_message(finished):
            end = _ENDS.search(self._buffered)
            complete = finished or end is not None
            if message.called is None:
                num_buffered = 0 if complete else overlap(self._buffered, END, START)
                text = self._cut(end.start() if end else len(self._buffered) - num_buffered)
                texts[message.reasoning] += self._text_of(message, text)
            elif complete:
                text = self._cut(end.start() if end else len(self._buffered))
                self.calls.append(ToolCall(message.called, text.strip()))
            if end is None:
                break
            self._buffered = self._buffered.removeprefix(END)
            self._message = None
        content = texts[False]
        if self._forced is not None:
            content, calls = self._forced.feed(content, finished=finished)
            self.calls += calls
        delta: dict[str, Any] = dict.fromkeys(NAMES, texts[True]) if texts[True] else {}
        return {**delta, "content": content} if content else delta

    def _cut(self, count: int) -> str:
        """The first `count` characters that are held, which then are not any more."""
        text, self._buffered = self._buffered[:count], self._buffered[count:]
        return text

    def _text_of(self, message: _Message, text: str) -> str:
        """The next text of a message, on a line of its own behind an earlier one's."""
        if text and not message.started:
            message.started = True
            if message.reasoning in self._seen:
                text = f"\n{text}"
            self._seen.add(message.reasoning)
        return text

    def _next_message(self, finished: bool) -> _Message | None:
        """The one whose header is there as a whole. Text without a header is an answer."""
        start = self._buffered.lstrip()
        if not start:
            return None
        if not any(
            start.startswith(beginning) or beginning.startswith(start) for beginning in _BEGINNINGS
        ):
            self._message = _Message(reasoning=False)
            return self._message
        header, mark, remaining = self._buffered.partition(MESSAGE)
        if mark:
            self._buffered, self._message = remaining, self._of_header(header)
        elif finished:
            self._buffered = ""
        return self._message

    def _of_header(self, header: str) -> _Message:
        """Calls of what is no tool of the request are shown among what is thought."""
        channel, called = _CHANNEL.search(header), _RECIPIENT.search(header)
        if called is not None:
            name = called[1].removeprefix(_FUNCTIONS)
            return _Message(reasoning=True, called=name if name in self._names else None)
        return _Message(reasoning=channel is not None and channel[1] == "analysis")
