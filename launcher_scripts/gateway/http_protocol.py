"""HTTP as uvicorn parses it, with limits on what is read before anybody looks at a key."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from launcher_scripts.gateway.api_errors import ApiError

MAX_HEAD = 64 << 10
_LINGER_SECONDS = 2.0  # in which a client may read why it is refused, while it still sends
_LINGER_BYTES = 1 << 20


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A request may have so many bytes beside its body, and so much time.

    max_head: bytes of the request line, headers, chunk sizes and their extensions, and trailers
    seconds:  until a request is complete, and one more for every `rate` bytes
    """

    max_head = MAX_HEAD
    seconds = 30.0
    rate = 10_000.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head = 0  # bytes of the request that are not its body
        self._chunk = 0  # bytes that came last and have not been part of a body
        self._received = 0
        self._since = 0.0
        self._receives = False
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._receives:
            self._begin()
        self._received += len(data)
        if self._refused:
            if self._received > _LINGER_BYTES:
                self.transport.abort()
            return
        self._chunk = len(data)
        self._head += len(data)
        super().data_received(data)
        if self._head > self.max_head and not self.transport.is_closing():
            self._refuse(
                ApiError(
                    431,
                    f"the request has more than {self.max_head} bytes beside its body",
                    code="head_too_large",
                )
            )

    def on_message_begin(self) -> None:
        self._begin()
        self._head = self._received = self._chunk
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)
        self._chunk -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receives = False
        super().on_message_complete()

    def _begin(self) -> None:
        """A request may come from now on, or does."""
        self._receives = True
        self._since, self._received = self.loop.time(), 0
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._look)

    def _look(self) -> None:
        """Give up a request that has had its time."""
        self._timer = None
        if not self._receives or self._refused or self.transport.is_closing():
            return
        if self.flow.read_paused:  # until an earlier request is answered
            self._since = self.loop.time()
        left = self._since + self.seconds + self._received / self.rate - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        elif self._received:
            self._refuse(ApiError(408, "the request was not complete in time", code="too_slow"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer with the error if nothing was answered yet, and close the connection."""
        client = self.client[0] if self.client else "-"
        self.logger.warning("client=%s status=%d %s", client, error.status, error.message)
        cycle, answered = self.cycle, False
        if cycle is not None and not cycle.response_complete:
            answered = cycle.response_started
            cycle.disconnected = True  # the application writes nothing more
            cycle.message_event.set()
        if answered or not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing at once, with unread bytes on their way, would take the answer back.
        self._refused = True
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
