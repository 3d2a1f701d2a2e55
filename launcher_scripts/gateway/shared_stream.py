"""The stream of a model that brings the tokens of many rows; see contract/shared_stream.py."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from launcher_scripts.contract.shared_stream import NO_STREAM, RowNews, open_id, row_id, unpack

NEWS = ["news"]


class Streaming(Protocol):
    """A server's decoupled models."""

    def stream(
        self, model: str, tensors: Mapping[str, Any], outputs: list[str], **more: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Every response; closing the generator cancels the request."""
        ...


class NoStream(Exception):
    """The stream has ended, and nothing has come of the row: it may be asked for without one."""


class StreamLost(Exception):
    """The stream has ended before a row of which something has come."""


class SharedStream:
    """Rows of one model of one server, whose tokens come in one stream.

    The stream is opened when a row is asked for, and serves those that follow.
    """

    def __init__(
        self,
        server: Streaming,
        model: str,
        opening: Callable[[], Mapping[str, Any]],
        failures: tuple[type[Exception], ...],
    ) -> None:
        """opening:  makes tensors that the model takes, because Triton wants some to open a stream
        failures: what `server.stream` raises of a server
        """
        self._opening = opening
        self._server = server
        self._failures = failures
        self._model = model
        self._name = ""  # of the open stream
        self._numbers = itertools.count()
        self._rows: dict[int, asyncio.Queue[RowNews | Exception | None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def is_open(self) -> bool:
        """Whether the stream is there; one that is not is opened meanwhile."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(self._opening()))
        return bool(self._name)

    async def generate(
        self, tensors: Mapping[str, Any], request_id: str, **more: Any
    ) -> AsyncGenerator[RowNews, None]:
        """The row's news, until it is finished; closing the generator gives the row up.

        Raises NoStream, StreamLost, and the server's failures.
        """
        number = next(self._numbers)
        queue = self._rows[number] = asyncio.Queue()
        name = row_id(self._name, number, request_id)
        call = asyncio.create_task(self._call(queue, tensors, {**more, "request_id": name}))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        came, finished = False, False
        try:
            while not finished:
                item = await queue.get()
                if item is None:  # the call's end, which its last news may follow
                    continue
                if isinstance(item, Exception):
                    if not came and NO_STREAM in str(item):
                        raise NoStream from item
                    raise item
                came, finished = True, item.finished
                yield item
        finally:
            del self._rows[number]
            if not finished:  # else the call is about to end, and must not look as if given up
                call.cancel()

    async def close(self) -> None:
        """Leave the stream and the rows."""
        tasks = [*self._calls, *([self._reading] if self._reading is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(
        self,
        queue: asyncio.Queue[RowNews | Exception | None],
        tensors: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> None:
        """The row's own request, which ends with nothing or with an error."""
        try:
            async with aclosing(
                self._server.stream(self._model, tensors, NEWS, **more)
            ) as responses:
                async for _ in responses:
                    pass
            queue.put_nowait(None)
        except self._failures as error:
            queue.put_nowait(error)

    async def _read(self, tensors: Mapping[str, Any]) -> None:
        """Open the stream and hand out what it brings, until it ends."""
        name = uuid.uuid4().hex
        error: Exception = StreamLost(NO_STREAM)
        try:
            async with aclosing(
                self._server.stream(self._model, tensors, NEWS, request_id=open_id(name))
            ) as responses:
                async for arrays in responses:
                    self._name = name
                    for news in unpack(arrays["news"]) if arrays else ():
                        if news.number in self._rows:
                            self._rows[news.number].put_nowait(news)
        except self._failures as failure:
            error = failure
        finally:
            self._name, self._reading = "", None
            for queue in self._rows.values():
                queue.put_nowait(error)
