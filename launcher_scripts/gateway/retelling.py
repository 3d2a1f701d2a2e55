"""A chat's answer as another interface than /v1/chat/completions tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from pydantic_core import to_json

from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.completions import Chat
from launcher_scripts.gateway.generation import RequestLimits, RequestRecord
from launcher_scripts.gateway.parameters import StrictBody
from launcher_scripts.gateway.schemas import ChatBody
from launcher_scripts.gateway.served_model import ServedModel

Body = TypeVar("Body", bound=StrictBody)
Event = tuple[str, dict[str, Any]]  # its type and what it says


class Retelling(ABC, Generic[Body]):
    """One request on its way to its answer. Subclasses know the interface.

    names: parameters of a chat, by which errors name them -> what they are called here
    """

    names: ClassVar[Mapping[str, str]]

    def __init__(self, body: Body, chat: Chat) -> None:
        self.body = body
        self.chat = chat
        self.record = chat.generation.record

    @classmethod
    async def of(
        cls, model: ServedModel, body: Body, record: RequestRecord, limits: RequestLimits
    ) -> Retelling[Body]:
        """Raises ApiError for what cannot be done."""
        try:
            threads = limits.threads.of(record.client)
            chat = await threads.run_on_body(lambda: cls.as_chat(body), record.body_size)
            return cls(body, await Chat.of(model, chat, record, limits))
        except ApiError as error:
            cls.rename(error)
            raise

    @classmethod
    def rename(cls, error: ApiError) -> None:
        """Put a chat's error in the interface's words."""
        error.param = cls.names.get(str(error.param), error.param)

    @staticmethod
    @abstractmethod
    def as_chat(body: Body) -> ChatBody:
        """The same request as a chat. Raises ApiError."""

    async def full(self) -> dict[str, Any]:
        """The answer. Raises ApiError."""
        try:
            answer = await self.chat.full()
        except ApiError as error:
            self.rename(error)
            raise
        (choice,) = answer["choices"]
        for _ in self.feed(choice["message"]):
            pass  # events, for which nobody waits
        for _ in self.end(choice["finish_reason"], choice["stop_reason"]):
            pass
        return self.answer()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises ApiError before the first one or, as the last
        event, says it.
        """
        has_started, finish_reason, stop_reason = False, None, None
        try:
            async with aclosing(self.chat.generation.pieces()) as pieces:
                async for choice, piece in pieces:
                    if not has_started:
                        has_started = True
                        yield self._formatted(self.begin())
                    finish_reason, stop_reason = piece.finish_reason, piece.stop_reason
                    finished = finish_reason is not None
                    deltas: Sequence[Mapping[str, Any]]
                    deltas = self.chat.deltas(choice, piece.text, finished=finished)
                    if events := self._formatted(
                        item for delta in deltas for item in self.feed(delta)
                    ):
                        yield events
            last = self._formatted(self.end(finish_reason, stop_reason))
        except ApiError as error:
            self.rename(error)
            if not has_started:
                raise
            last = self.failed(error)
        yield last

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        return self._formatted([("error", self.failure(error))])

    def _formatted(self, events: Iterator[Event] | Sequence[Event]) -> bytes:
        return b"".join(
            b"event: " + kind.encode() + b"\ndata: " + to_json(self.event(kind, fields)) + b"\n\n"
            for kind, fields in events
        )

    def event(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The data of an event."""
        return {"type": kind, **fields}

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """The events before the first delta."""

    @abstractmethod
    def feed(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """Take a chat's delta or message in; the events that it is."""

    @abstractmethod
    def end(self, finish_reason: str | None, stop_reason: str | int | None) -> Iterator[Event]:
        """End the answer; the events that this is. The reasons are those of chats."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """All of the answer, once it has ended."""

    @abstractmethod
    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error."""
