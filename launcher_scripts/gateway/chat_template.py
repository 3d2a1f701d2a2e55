"""Chats as the text that a model was trained on, by its Jinja template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from launcher_scripts.common.limited_process import LimitedProcesses, WorkLimitError, WorkLimits
from launcher_scripts.common.template_rendering import FAILURE, REFUSAL, SYNTAX, TEXT
from launcher_scripts.gateway.api_errors import ApiError, bad_request
from launcher_scripts.gateway.client_threads import NUM_THREADS
from launcher_scripts.gateway.harmony import writes_harmony

# Of one text: templates of real models take milliseconds.
LIMITS = WorkLimits(cpu_seconds=2.0, seconds=30.0, memory_mib=256)
MAX_CHARS = 16 << 20
# Stands at the end of a message that is to be continued; the text is cut there.
_MARK = "\ue000the-end-of-what-is-continued\ue000"
_PROBE = "a part of a message"
DEFAULT = "default"
WITH_TOOLS = "tool_use"


class ChatTemplate:
    """A model's templates, ready to render.

    Raises ValueError for one that is not Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """templates: name -> text, the usual one `default`; special_tokens: bos_token, ..."""
        self._templates = dict(templates)
        self._processes = _processes()
        for text in templates.values():
            try:
                result = self._processes.call({"template": text})
            except WorkLimitError as error:
                raise ValueError(str(error)) from error
            if SYNTAX in result:
                raise ValueError(result[SYNTAX])
        self.text = templates.get(DEFAULT, next(iter(templates.values())))
        self._special_tokens = dict(special_tokens)
        self.takes_parts = self._takes_parts()
        self.writes_harmony = writes_harmony(self.text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text; blocks until a process has rendered it.

        Raises ApiError with what the template refuses, and for one that exceeds its limits.

        more: further values for the template
        """
        if continue_final_message:
            messages = _marked(messages)
        name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        template = self._templates.get(name) or next(iter(self._templates.values()))
        values = {**self._special_tokens, **(more or {})}
        given = {
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._text(template, {**values, **given})
        return _until_mark(text) if continue_final_message else text

    def _text(self, template: str, values: Mapping[str, Any]) -> str:
        item = {"template": template, "values": values, "max_chars": MAX_CHARS}
        try:
            result = self._processes.call(item)
        except WorkLimitError as error:
            result = {FAILURE: str(error)}
        if REFUSAL in result:
            raise bad_request(f"the chat template refuses this: {result[REFUSAL]}", "messages")
        if FAILURE in result:
            message = f"the chat template cannot render this: {result[FAILURE]}"
            raise bad_request(message, "messages")
        return str(result[TEXT])

    def _takes_parts(self) -> bool:
        """Whether a message's content may be a list of parts, rather than one text."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self.render([message])
        except ApiError:
            return False
        # One that knows texts alone would write the list as Python or JSON does.
        quoted = (f"{quote}{_PROBE}{quote}" for quote in "'\"")
        return _PROBE in text and not any(each in text for each in quoted)


@cache
def _processes() -> LimitedProcesses:
    """One for each thread that may wait for a text; most are never started."""
    return LimitedProcesses(
        "launcher_scripts.common.template_rendering:make_renderer", None, LIMITS, NUM_THREADS
    )


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, the last one's text with the mark behind it."""
    *before, last = messages
    if last.get("tool_calls"):  # its text precedes its calls
        raise bad_request("the last message ends with tool calls", "continue_final_message")
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK}]
    if isinstance(content, list) and content:
        *parts, end = content
        return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + _MARK}]}]
    raise bad_request("the last message has no text to continue", "continue_final_message")


def _until_mark(text: str) -> str:
    """Without the mark and what follows, and without blanks that the template has trimmed."""
    start, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise bad_request(
            "the chat template leaves out the message that is to be continued",
            "continue_final_message",
        )
    return start
