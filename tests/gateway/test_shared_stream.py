"""Rows of the gateway that share a stream, before a server that answers as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException as ServerFailure

from launcher_scripts.contract.requests import NO_STREAM, RowDelta, pack, shared_id
from launcher_scripts.gateway.shared_stream import NoStream, SharedStreamReader, StreamLost
from tests.gateway.fakes import until

OPENING = {"input_ids": 0}


class Server:
    """Its shared stream says what `say` is given; rows' own calls end as `end` is told."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[list[RowDelta] | Exception | None] = asyncio.Queue()
        self.calls: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []
        self.opened = 0

    async def stream(
        self, _model: str, _tensors: Mapping[str, Any], _outputs: list[str], **more: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        said = shared_id(more["request_id"])
        assert said is not None
        if said.number is not None:
            call = self.calls[said.number] = asyncio.get_running_loop().create_future()
            try:
                await call
            except asyncio.CancelledError:
                self.cancelled.append(said.number)
                raise
            yield {}
            return
        self.opened += 1
        yield {"news": pack([])}
        while (rows := await self.news.get()) is not None:
            if isinstance(rows, Exception):
                raise rows
            yield {"news": pack(rows)}


def shared(test: Callable[[Server, SharedStreamReader], Awaitable[None]]) -> None:
    """Run the test with a stream that is open."""

    async def run() -> None:
        server = Server()
        stream = SharedStreamReader(server, "tiny", lambda: OPENING)
        assert not stream.is_open()
        while not stream.is_open():
            await asyncio.sleep(0)
        await asyncio.wait_for(test(server, stream), 30)
        assert server.opened == 1

    asyncio.run(run())


async def ids(stream: SharedStreamReader) -> list[int]:
    return [token async for news in stream.generate({}, "mine") for token in news.ids]


def test_each_row_gets_its_own() -> None:
    async def test(server: Server, stream: SharedStreamReader) -> None:
        rows = [asyncio.create_task(ids(stream)) for _ in range(2)]
        await until(lambda: len(server.calls) == 2)
        server.news.put_nowait([RowDelta(0, (1, 2), False), RowDelta(1, (3,), False)])
        server.news.put_nowait([RowDelta(9, (8,), False), RowDelta(1, (), True)])
        server.calls[0].set_result(None)  # its last news may come later than its call's end
        assert await rows[1] == [3]
        server.news.put_nowait([RowDelta(0, (4,), True)])
        assert await rows[0] == [1, 2, 4]
        server.calls[1].set_result(None)
        assert not server.cancelled

    shared(test)


def test_a_row_that_is_given_up_cancels_its_call() -> None:
    async def test(server: Server, stream: SharedStreamReader) -> None:
        async with aclosing(stream.generate({}, "mine")) as row:
            asking = asyncio.create_task(anext(row))
            await until(lambda: server.calls)
            server.news.put_nowait([RowDelta(0, (1,), False)])
            assert (await asking).ids == (1,)
        await until(lambda: server.cancelled)
        server.news.put_nowait([RowDelta(0, (2,), False)])  # of nobody
        assert stream.is_open()

    shared(test)


@pytest.mark.parametrize(
    ("message", "kind"), [(f"INVALID_ARG: {NO_STREAM}", NoStream), ("too long", ServerFailure)]
)
def test_what_the_server_refuses(message: str, kind: type[Exception]) -> None:
    async def test(server: Server, stream: SharedStreamReader) -> None:
        row = asyncio.create_task(ids(stream))
        await until(lambda: server.calls)
        server.calls[0].set_exception(ServerFailure(message))
        with pytest.raises(kind):
            await row

    shared(test)


@pytest.mark.parametrize("end", [None, ServerFailure("Server is stopping")])
def test_rows_of_a_stream_that_ends(end: Exception | None) -> None:
    """One that has begun is lost; one of which nothing came may begin without it."""

    async def test(server: Server, stream: SharedStreamReader) -> None:
        rows = [asyncio.create_task(ids(stream)) for _ in range(2)]
        await until(lambda: len(server.calls) == 2)
        server.news.put_nowait([RowDelta(0, (1,), False)])
        server.news.put_nowait(end)
        with pytest.raises(StreamLost if end is None else ServerFailure):
            await rows[0]
        with pytest.raises(NoStream if end is None else ServerFailure):
            await rows[1]
        await until(lambda: sorted(server.cancelled) == [0, 1])

    shared(test)
