"""/v1/messages: Anthropic's interface, over the same chats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from launcher_scripts.gateway import parameters
from launcher_scripts.gateway.admission import ThreadsOfClient
from launcher_scripts.gateway.api_errors import ApiError, ContextOverflow
from launcher_scripts.gateway.completions import Chat
from launcher_scripts.gateway.parameters import LooseBody, StrictBody, validated
from launcher_scripts.gateway.reasoning import NAMES
from launcher_scripts.gateway.retelling import Event, Retelling
from launcher_scripts.gateway.schemas import (
    ChatBody,
    TextPart,
    check_stops,
    plain_text,
    text_part,
    text_parts,
)
from launcher_scripts.gateway.served_model import ServedModel


class TextBlock(TextPart):
    type: Literal["text"]


class ThinkingBlock(LooseBody):
    """The reasoning of the model before its answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LooseBody):
    """Encrypted reasoning of another model; the template does not get it."""

    type: Literal["redacted_thinking"]


def readable(content: Any) -> Any:
    """Return a content whose documents and search results are texts, as far as they have one.

    What tools of Anthropic's server did is left out.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = _TEXTS[kind](part) if isinstance(kind, str) and kind in _TEXTS else None
        if text is not None:
            parts.append({"type": "text", "text": text})
        elif not (isinstance(kind, str) and _SERVER_BLOCK.fullmatch(kind)):
            parts.append(part)
    return parts


def _document(part: dict[str, Any]) -> str | None:
    """The text of a document with its title and context; None: it is a file."""
    source = part.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("text", "content"):
        return None
    return _lines(part.get("title"), part.get("context"), source.get("data", source.get("content")))


def _lines(*contents: Any) -> str:
    """The texts of contents, a line for each. Raises ValueError for what is no text."""
    texts = []
    for content in contents:
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
            elif part is not None:
                text_parts([part])
    return "\n".join(texts)


# Blocks that are read as a text -> the text, or None for one that cannot be.
_TEXTS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "document": _document,
    "search_result": lambda part: _lines(
        part.get("title"), part.get("source"), part.get("content")
    ),
    "tool_reference": lambda part: _lines(part.get("tool_name")),
}
_SERVER_BLOCK = re.compile("(server|mcp)_tool_use|[a-z_]+_tool_result|tool_(addition|removal)")


class ToolUseBlock(LooseBody):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field({})


class ToolResultBlock(LooseBody):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts(cls, value: Any) -> Any:
        return text_parts(readable(value))


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Turn(LooseBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts(cls, value: Any) -> Any:
        return text_parts(readable(value), _BLOCKS)

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content or []


class Tool(LooseBody):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(LooseBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ConversationBody(StrictBody):
    """POST /v1/messages/count_tokens"""

    unused = parameters.CONVERSATION
    tool_types = ("custom",)
    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    @field_validator("system", mode="before")
    @classmethod
    def _system_parts(cls, value: Any) -> Any:
        return [text_part(part, ("text",)) for part in value] if isinstance(value, list) else value


class MessagesBody(ConversationBody):
    """POST /v1/messages"""

    unused = parameters.MESSAGES
    max_tokens: int = Field(ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    stop_sequences: Annotated[list[str], AfterValidator(check_stops)] = Field([])
    stream: bool = False


# Parameters of a chat, by which errors name them -> what they are called here.
_NAMES = {
    "prompt": "messages",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Blocks of an answer: the delta that each grows by, and where in it and in the block its text is.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def chat_of_messages(body: ConversationBody) -> ChatBody:
    """The same request as a chat. Raises ApiError."""
    system = []
    if body.system not in (None, []):
        system.append({"role": "system", "content": plain_text(body.system)})
    turns = [message for turn in body.messages for message in _messages(turn)]
    values: dict[str, Any] = {
        "model": body.model,
        "messages": [*system, *turns],
        "continue_final_message": body.messages[-1].role == "assistant",
        "reasoning_effort": body.output_config.effort,
    }
    if body.thinking is not None:
        values["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config.format is not None:
        schema = {"schema": body.output_config.format.json_schema}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.tools:
        values["tools"] = [_function(tool) for tool in body.tools]
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        values["tool_choice"] = _CHOICES.get(choice.type, named)
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody):
        values |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    return validated(ChatBody, values)


async def count_tokens(
    model: ServedModel, body: ConversationBody, threads: ThreadsOfClient, body_size: int
) -> int:
    """Count the tokens of the prompt. Raises ApiError."""
    chat = await threads.run_on_body(lambda: chat_of_messages(body), body_size)
    text = await model.chat_text(chat, threads)
    (ids,) = await model.encode_aside([text], threads, special_tokens=False)
    return len(ids)


def _function(tool: Tool) -> dict[str, Any]:
    """A tool as chats have it."""
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _messages(turn: Turn) -> Iterator[dict[str, Any]]:
    """A turn as messages of a chat: what tools gave are messages of their own."""
    texts, thoughts, calls, has_results = [], [], [], False
    for block in turn.blocks:
        if isinstance(block, ToolResultBlock):
            has_results = True
            result = {"tool_call_id": block.tool_use_id, "content": plain_text(block.content)}
            yield {"role": "tool", **result}
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    more = {NAMES[0]: "\n".join(thoughts), "tool_calls": calls}
    fields = {name: value for name, value in more.items() if value}
    if texts or fields or not has_results:
        yield {"role": turn.role, "content": "\n".join(texts), **fields}


class MessageAnswer(Retelling[MessagesBody]):
    """One request of /v1/messages on its way to its answer."""

    names = _NAMES
    as_chat = staticmethod(chat_of_messages)

    def __init__(self, body: MessagesBody, chat: Chat) -> None:
        super().__init__(body, chat)
        self._blocks: list[dict[str, Any]] = []
        self._grown = ""  # the text of the block that is open, which is the last one
        self._completed: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    @classmethod
    def rename(cls, error: ApiError) -> None:
        super().rename(error)
        if isinstance(error, ContextOverflow):
            error.message = error.for_anthropic

    def begin(self) -> Iterator[Event]:
        yield "message_start", {"message": self.answer()}

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        for kind, text in (("thinking", delta.get(NAMES[0])), ("text", delta.get("content"))):
            if text:
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    empty = {"signature": ""} if kind == "thinking" else {}
                    yield from self._open({"type": kind, kind: "", **empty})
                yield from self._grow(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                call_delta = {"id": call["id"], "name": call["function"]["name"], "input": {}}
                yield from self._open({"type": "tool_use", **call_delta})
            if arguments := call["function"]["arguments"]:
                yield from self._grow(arguments)

    def end(self, finish_reason: str | None, stop_reason: str | int | None) -> Iterator[Event]:
        yield from self._close()
        calls = any(block["type"] == "tool_use" for block in self._blocks)
        reason = "end_turn"
        if finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(stop_reason, str):
            reason = "stop_sequence"
        elif calls:
            reason = "tool_use"
        met = stop_reason if reason == "stop_sequence" else None
        self._completed = {"stop_reason": reason, "stop_sequence": met}
        yield "message_delta", {"delta": self._completed, "usage": self._usage()}
        yield "message_stop", {}

    def answer(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.record.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.chat.model.name,
            "content": [dict(block) for block in self._blocks],
            **self._completed,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Anthropic's, whose input_tokens are those that were not cached."""
        record = self.record
        return {
            "input_tokens": record.prompt_tokens - record.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": record.cached_tokens,
            "output_tokens": record.generated_tokens,
        }

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block after the one that was open."""
        yield from self._close()
        self._blocks.append(block)
        yield "content_block_start", {**self._location, "content_block": dict(block)}

    def _grow(self, text: str) -> Iterator[Event]:
        self._grown += text
        kind, name = _DELTAS[self._blocks[-1]["type"]]
        yield "content_block_delta", {**self._location, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[Event]:
        """End the block that is open, if there is one."""
        if not self._blocks:
            return
        block, text, self._grown = self._blocks[-1], self._grown, ""
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        yield "content_block_stop", self._location

    @property
    def _location(self) -> dict[str, int]:
        return {"index": len(self._blocks) - 1}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; those that were cut off, or are no object, as a text."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": text}
