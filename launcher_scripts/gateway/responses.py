"""/v1/responses: OpenAI's newer interface, over the same chats.

A client sends the whole conversation, or names a stored response that it continues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from launcher_scripts.gateway.api_errors import ApiError, bad_request, unsupported
from launcher_scripts.gateway.completions import Chat
from launcher_scripts.gateway.generation import RequestLimits, RequestRecord
from launcher_scripts.gateway.middleware import Lifecycle
from launcher_scripts.gateway.parameters import validated
from launcher_scripts.gateway.reasoning import NAMES
from launcher_scripts.gateway.responses_schemas import (
    ITEMS,
    AllowedChoice,
    FunctionChoice,
    FunctionOutput,
    InputMessage,
    Item,
    ReasoningItem,
    ResponsesBody,
)
from launcher_scripts.gateway.retelling import Event, Retelling
from launcher_scripts.gateway.schemas import ChatBody, plain_text
from launcher_scripts.gateway.served_model import ServedModel

# Items that are a text -> their events, the beginning of their ids, what their events have besides.
_TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reasoning": ("reasoning_text", "rs", {}),
    "message": ("output_text", "msg", {"logprobs": []}),
}
# Parameters of a chat, by which errors name them -> what they are called here.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
}


def chat_of_response(body: ResponsesBody) -> ChatBody:
    """The same request as a chat. Raises ApiError."""
    values: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "response_format": body.text.response_format,
        "reasoning_effort": body.reasoning.effort,
    }
    choice = _plain_choice(body)
    if body.tools or choice not in ("auto", "none"):
        values["tools"] = [_nested(tool) for tool in body.tools]
        values["tool_choice"] = choice
        if isinstance(body.tool_choice, FunctionChoice):
            values["tool_choice"] = _nested(body.tool_choice.model_dump())
        elif isinstance(body.tool_choice, AllowedChoice):
            allowed = body.tool_choice.model_dump(exclude={"type"})
            allowed["tools"] = list(map(_nested, allowed["tools"]))
            values["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        values["parallel_tool_calls"] = body.parallel_tool_calls
    return validated(ChatBody, values)


def _plain_choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chats have it, which keep it one level deeper."""
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool.get("type"), "function": function}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The input as the messages of a chat; calls of tools are their assistant's."""
    result: list[dict[str, Any]] = []
    if body.instructions is not None:
        result.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*result, {"role": "user", "content": body.input}]
    if not body.input:
        raise bad_request("input: it is empty", "input")
    for item in body.input:
        if item.type == "message":
            reasoning = result.pop() if item.role == "assistant" and _is_reasoning(result) else {}
            result.append({**reasoning, "role": item.role, "content": plain_text(item.content)})
        elif isinstance(item, ReasoningItem):
            text = plain_text(item.content)
            if text and _is_reasoning(result):
                result[-1][NAMES[0]] += f"\n{text}"
            elif text:
                result.append({"role": "assistant", "content": None, NAMES[0]: text})
        elif isinstance(item, FunctionOutput):
            output = {"tool_call_id": item.call_id, "content": plain_text(item.output)}
            result.append({"role": "tool", **output})
        else:
            if not result or result[-1]["role"] != "assistant":
                result.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            result[-1].setdefault("tool_calls", []).append(call)
    return result


def _is_reasoning(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is what was thought before the one that comes."""
    return bool(messages) and NAMES[0] in messages[-1] and messages[-1]["content"] is None


@dataclass
class _Output:
    """The items of a response: reasoning, a message, and tool calls."""

    request_id: str
    items: list[dict[str, Any]] = field(default_factory=list)

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """Take a chat's delta in; the events that it is."""
        for kind, text in (("reasoning", delta.get(NAMES[0])), ("message", delta.get("content"))):
            if not text:
                continue
            if not self.items or self.items[-1]["type"] != kind:
                yield from self.close()
                yield from self._begin_text(kind)
            self.items[-1]["content"][0]["text"] += text
            event, _, more = _TEXTS[kind]
            raw = {"content_index": 0, "delta": text, **more}
            yield f"response.{event}.delta", {**self._location, **raw}
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self.close()
                raw = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin({**self._head("function_call", "fc"), **raw})
            arguments = call["function"]["arguments"]
            self.items[-1]["arguments"] += arguments
            if arguments:
                yield (
                    "response.function_call_arguments.delta",
                    {**self._location, "delta": arguments},
                )

    def end(self, status: str) -> Iterator[Event]:
        """End the answer, which has one item at least; the events that it is."""
        if not self.items:
            yield from self._begin_text("message")
        yield from self.close(status)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the item that is open; the events that it is."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] in _TEXTS:
            event, _, more = _TEXTS[item["type"]]
            (part,) = item["content"]
            raw = {**self._location, "content_index": 0}
            yield f"response.{event}.done", {**raw, "text": part["text"], **more}
            yield "response.content_part.done", {**raw, "part": dict(part)}
        else:
            raw = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._location, **raw}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        item_start = {**item, **({"content": []} if "content" in item else {})}
        yield (
            "response.output_item.added",
            {"output_index": len(self.items) - 1, "item": item_start},
        )

    @property
    def _location(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin_text(self, kind: str) -> Iterator[Event]:
        _, prefix, more = _TEXTS[kind]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], **more}
            message: dict[str, Any] = {"role": "assistant", "content": [part]}
        else:
            part = {"type": "reasoning_text", "text": ""}
            message = {"summary": [], "content": [part]}
        yield from self._begin({**self._head(kind, prefix), **message})
        added = {"content_index": 0, "part": dict(part)}
        yield "response.content_part.added", {**self._location, **added}

    def _head(self, kind: str, prefix: str) -> dict[str, Any]:
        item_id = f"{prefix}_{self.request_id}_{len(self.items)}"
        return {"type": kind, "id": item_id, "status": "in_progress"}


class Responding(Retelling[ResponsesBody]):
    """One request of /v1/responses on its way to its answer."""

    names = _NAMES
    as_chat = staticmethod(chat_of_response)

    def __init__(self, body: ResponsesBody, chat: Chat, store: ResponseStore | None = None) -> None:
        """store: None: the response is not stored"""
        super().__init__(body, chat)
        self._store = store
        self._output = _Output(self.record.request_id)
        self._status = "in_progress"
        self._reasoning = 0
        self._number = 0

    async def full(self) -> dict[str, Any]:
        """See Retelling."""
        with self._in_progress():
            return await super().full()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """See Retelling."""
        with self._in_progress():
            async with aclosing(super().events()) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        if self._store is None:
            yield
            return
        with self._store.in_progress(self):
            yield

    def cancel(self, life: Lifecycle) -> bytes:
        """End the response, which is stored as far as it has come; returns it as JSON."""
        for _ in self._end("cancelled"):
            pass  # events, for which nobody waits
        life.cancel(self.record)
        return to_json(self.answer())

    def begin(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield kind, {"response": self.answer()}

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        return self._output.feed(delta)

    def end(self, finish_reason: str | None, _stop_reason: str | int | None) -> Iterator[Event]:
        yield from self._end("incomplete" if finish_reason == "length" else "completed")
        yield f"response.{self._status}", {"response": self.answer()}

    def _end(self, status: str) -> Iterator[Event]:
        """End the items, and store the response; the events that this is."""
        self._status = status
        self._reasoning = self._reasoning_tokens()
        yield from self._output.end("incomplete" if status == "cancelled" else status)
        if self._store is not None and not self._store.add(self):
            self._store = None

    def conversation(self) -> bytes:
        """Returns the items that a request which continues this response begins with, as JSON."""
        return ITEMS.dump_json(
            [*_items(self.body), *ITEMS.validate_python([dict(i) for i in self._output.items])]
        )

    def failure(self, error: ApiError) -> dict[str, Any]:
        return {"code": error.code, "message": error.message, "param": error.param}

    def answer(self) -> dict[str, Any]:
        body, status, usage = self.body, self._status, None
        if status != "in_progress":
            usage = {
                "input_tokens": self.record.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": self.record.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": self.record.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning},
                "total_tokens": self.record.prompt_tokens + self.record.generated_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.chat.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.chat.model.name,
            "output": [dict(item) for item in self._output.items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning.model_dump(),
            "store": self._store is not None,
            "temperature": body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": _plain_choice(body),
            "tools": body.tools,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }

    @property
    def response_id(self) -> str:
        return f"resp_{self.record.request_id}"

    def _reasoning_tokens(self) -> int:
        """As the model's tokenizer divides what was thought."""
        encode = self.chat.model.encode
        texts = (item["content"] for item in self._output.items if item["type"] == "reasoning")
        return sum(len(encode(part["text"], special_tokens=False)) for (part,) in texts)

    def event(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        numbered = {**super().event(kind, fields), "sequence_number": self._number}
        self._number += 1
        return numbered


def _items(body: ResponsesBody) -> list[Item]:
    """Returns the input as items."""
    if isinstance(body.input, str):
        return [InputMessage(role="user", content=body.input)]
    return body.input


@dataclass(frozen=True)
class StoredResponse:
    """A response and the items with which its conversation goes on, as JSON."""

    answer: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.conversation)


class ResponseStore:
    """Responses for later requests of their clients, and those that are in progress.

    Ids may come from clients, so each client has its own. The oldest responses go first.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._size = 0
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._running: dict[tuple[str, str], Responding] = {}

    async def respond(
        self, model: ServedModel, body: ResponsesBody, record: RequestRecord, limits: RequestLimits
    ) -> Responding:
        """Begin a response, which may continue a stored one. Raises ApiError."""
        threads, size = limits.threads.of(record.client), record.body_size
        if (previous := body.previous_response_id) is not None:
            stored = self._previous(record.client, previous).conversation
            size += len(stored)
            items = await threads.run_on_body(lambda: ITEMS.validate_json(stored), size)
            body = body.model_copy(update={"input": [*items, *_items(body)]})
        store = self if self._max_responses and body.store is not False else None
        try:
            chat = await threads.run_on_body(lambda: chat_of_response(body), size)
            return Responding(body, await Chat.of(model, chat, record, limits), store)
        except ApiError as error:
            Responding.rename(error)
            raise

    @contextmanager
    def in_progress(self, responding: Responding) -> Iterator[None]:
        """Inside, the response can be read and cancelled."""
        key = _key(responding)
        self._running[key] = responding
        try:
            yield
        finally:
            self._leave(responding)

    def add(self, responding: Responding) -> bool:
        """Store a response that has ended; returns False for one that is too large."""
        stored = StoredResponse(to_json(responding.answer()), responding.conversation())
        key = _key(responding)
        self._leave(responding)
        self._remove(key)
        if stored.size > self._max_bytes:
            return False
        self._stored[key] = stored
        self._size += stored.size
        while len(self._stored) > self._max_responses or self._size > self._max_bytes:
            self._remove(next(iter(self._stored)))
        return True

    def read(self, client: str, response_id: str) -> bytes:
        """Returns a response as JSON. Raises ApiError where the client has none of this id."""
        running = self._running.get((client, response_id))
        if running is not None:
            return to_json(running.answer())
        return self._get(client, response_id).answer

    def delete(self, client: str, response_id: str) -> None:
        """Raises ApiError where the client has no stored response of this id."""
        self._get(client, response_id)
        self._remove((client, response_id))

    def cancel(self, client: str, response_id: str, life: Lifecycle) -> bytes:
        """Returns the response as JSON. Raises ApiError for one that is not in progress."""
        running = self._running.get((client, response_id))
        if running is None:
            self._get(client, response_id)
            raise bad_request(f"the response {response_id} has ended", "response_id")
        return running.cancel(life)

    def _previous(self, client: str, response_id: str) -> StoredResponse:
        name = "previous_response_id"
        if not self._max_responses:
            message = "the gateway stores no responses (gateway.max_stored_responses)"
            raise unsupported(name, f"{message}; send all items in input")
        try:
            return self._get(client, response_id)
        except ApiError as error:
            code = "previous_response_not_found"
            raise bad_request(error.message, name, code) from error

    def _get(self, client: str, response_id: str) -> StoredResponse:
        stored = self._stored.get((client, response_id))
        if stored is None:
            message = f"no stored response of this client has the id {response_id[:200]!r}"
            raise ApiError(404, message, code="not_found", param="response_id")
        return stored

    def _leave(self, responding: Responding) -> None:
        """Forget a response that has ended, and not another of the same id."""
        if self._running.get(_key(responding)) is responding:
            del self._running[_key(responding)]

    def _remove(self, key: tuple[str, str]) -> None:
        stored = self._stored.pop(key, None)
        self._size -= 0 if stored is None else stored.size


def _key(responding: Responding) -> tuple[str, str]:
    return responding.record.client, responding.response_id
