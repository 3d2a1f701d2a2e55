"""The stream of a model that brings the tokens of many rows; see contract/requests.py."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from launcher_scripts.clients.async_connection import ServerFailure, TritonServer
from launcher_scripts.contract.requests import NO_STREAM, RowDelta, open_id, row_id, unpack_deltas

OUTPUTS = ["news"]
FAILURES = (ServerFailure, grpc.RpcError)  # what a TritonServer's streams raise
# Rows that are told of their news in one turn of the event loop.
_MAX_SENT = 8


class NoStream(Exception):
    """The stream has ended, and nothing has come of the row: it may be asked for without one."""


class StreamLost(Exception):
    """The stream has ended before a row of which something has come."""


class _RowBuffer:
    """Received tokens of one row that have not been read yet.

    started: something has been taken
    error:   what the row ends with, once all that came before is taken
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._ids: list[int] = []
        self._finished = 0
        self._num_cached_tokens = 0
        self._sent = asyncio.get_running_loop().create_future()
        self.started = False
        self.error: Exception | None = None

    def add(self, delta: RowDelta) -> None:
        self._ids += delta.ids
        self._finished = delta.finished
        self._num_cached_tokens += delta.num_cached_tokens

    def tell(self) -> None:
        """Wake whoever waits in `get`."""
        if not self._sent.done():
            self._sent.set_result(None)

    async def get(self) -> RowDelta:
        """All that is there, at least something. Raises the error."""
        while not self._ids and not self._finished:
            if self.error is not None:
                raise self.error
            self._sent = asyncio.get_running_loop().create_future()
            await self._sent
        ids, self._ids = tuple(self._ids), []
        count = 0 if self.started else self._num_cached_tokens
        self.started = True
        return RowDelta(self._number, ids, self._finished, count)


class SharedStreamReader:
    """Rows of one model of one server, whose tokens come in one stream.

    The stream is opened when a row is asked for, and serves those that follow. It is read in every
    turn of the event loop, in which only some rows are told of their news: where this process is
    too slow for one event a token, rows get several tokens at once, and no first token waits for
    the later ones of other rows.
    """

    def __init__(
        self, server: TritonServer, model: str, opening: Callable[[], Mapping[str, Any]]
    ) -> None:
        """opening: makes tensors that the model takes; Triton wants some to open a stream"""
        self._opening = opening
        self._server = server
        self._model = model
        self._name = ""  # of the open stream
        self._numbers = itertools.count()
        self._rows: dict[int, _RowBuffer] = {}
        self._untold: OrderedDict[_RowBuffer, None] = OrderedDict()
        self._reading: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def is_open(self) -> bool:
        """Return whether the stream is there; one that is not is opened meanwhile."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(self._opening()))
        return bool(self._name)

    async def generate(
        self, tensors: Mapping[str, Any], request_id: str, **more: Any
    ) -> AsyncGenerator[RowDelta, None]:
        """The row's news, until it is finished; closing the generator gives the row up.

        Raises NoStream, StreamLost, and the server's failures.
        """
        number = next(self._numbers)
        inbox = self._rows[number] = _RowBuffer(number)
        name = row_id(self._name, number, request_id)
        call = asyncio.create_task(self._call(inbox, tensors, {**more, "request_id": name}))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        finished = False
        try:
            while not finished:
                delta = await inbox.get()
                finished = bool(delta.finished)
                yield delta
        except Exception as error:
            if not inbox.started and NO_STREAM in str(error):
                raise NoStream from error
            raise
        finally:
            del self._rows[number]
            if not finished:  # else the call is about to end, and must not look as if given up
                call.cancel()

    async def _call(
        self, inbox: _RowBuffer, tensors: Mapping[str, Any], more: Mapping[str, Any]
    ) -> None:
        """The row's own request, which ends with nothing or with an error.

        Its last news may come after its end.
        """
        try:
            async with aclosing(
                self._server.stream(self._model, tensors, OUTPUTS, **more)
            ) as responses:
                async for _ in responses:
                    pass
        except FAILURES as error:
            inbox.error = error
            inbox.tell()

    async def _read(self, tensors: Mapping[str, Any]) -> None:
        """Open the stream and hand out what it brings, until it ends."""
        name = uuid.uuid4().hex
        error: Exception = StreamLost(NO_STREAM)
        try:
            async with aclosing(
                self._server.stream(self._model, tensors, OUTPUTS, request_id=open_id(name))
            ) as responses:
                async for arrays in responses:
                    self._name = name
                    if arrays:
                        self._hand_out(arrays["news"])
        except FAILURES as failure:
            error = failure
        finally:
            self._name, self._reading = "", None
            for inbox in self._rows.values():
                inbox.error = inbox.error or error
                inbox.tell()

    def _hand_out(self, packed: Any) -> None:
        """Put what a response brings where the rows find it."""
        telling = bool(self._untold)
        for delta in unpack_deltas(packed):
            inbox = self._rows.get(delta.number)
            if inbox is None:
                continue
            inbox.add(delta)
            if inbox not in self._untold:
                self._untold[inbox] = None
                self._untold.move_to_end(inbox, last=inbox.started)
        if not telling:
            self._tell()

    def _tell(self) -> None:
        """Tell some rows now, and the others in the next turns."""
        for _ in range(min(_MAX_SENT, len(self._untold))):
            self._untold.popitem(last=False)[0].tell()
        if self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
