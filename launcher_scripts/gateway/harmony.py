"""Answers in the format harmony, which OpenAI's gpt-oss writes
(https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher_scripts.gateway.reasoning import NAMES, Reasoning, overlap
from launcher_scripts.gateway.tool_calls import ToolCall, ToolText, names_of

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

    reasoning: whether it is reasoning;  called: the function that it calls
    started:   whether there was text of it
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
