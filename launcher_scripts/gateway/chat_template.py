"""Chats as the text that a model was trained on, by its Jinja template.

The environment is the one in which transformers renders templates (its documentation "Writing a
chat template"): an immutable sandbox, blocks trimmed, loop controls, and the functions
raise_exception and strftime_now. Templates come with checkpoints: they are a stranger's programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher_scripts.gateway.api_errors import ApiError, bad_request
from launcher_scripts.gateway.harmony import writes_harmony

# Stands at the end of a message that is to be continued; the text is cut there.
_MARK = "\ue000the-end-of-what-is-continued\ue000"
_PROBE = "a part of a message"
DEFAULT = "default"
WITH_TOOLS = "tool_use"


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; it changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's templates, ready to render.

    Raises ValueError for one that is not Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """templates: name -> text, the usual one `default`; special_tokens: bos_token, ..."""
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in templates.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
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
        """The chat as text. Raises ApiError with what the template refuses.

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
        try:
            text = template.render(**{**values, **given})
        except jinja2.TemplateError as error:
            raise bad_request(f"the chat template refuses this: {error}", "messages") from error
        except Exception as error:
            message = f"the chat template cannot render this: {type(error).__name__}: {error}"
            raise bad_request(message, "messages") from error
        return _until_mark(text) if continue_final_message else text

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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, with the characters of HTML as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


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
