"""Several streams as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from launcher_scripts.gateway.api_errors import timed_out

Item = TypeVar("Item")
# What a stream may be ahead of who reads them all.
_AHEAD = 64


def merged(
    streams: Sequence[AsyncGenerator[Item, None]], seconds: float | None = None
) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come.

    The first error of a stream is raised, and all are closed then, as they are when this generator
    is closed. Raises ApiError when `seconds` are over.
    """
    if len(streams) == 1 and seconds is None:
        return streams[0]
    return _merged(streams, seconds)


async def _merged(
    streams: Sequence[AsyncGenerator[Item, None]], seconds: float | None
) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(_AHEAD)

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            end = error
        await queue.put(end)

    deadline = None if seconds is None else time.monotonic() + seconds
    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            came = await _next(queue, deadline, seconds)
            if isinstance(came, BaseException):
                raise came
            if came is None:
                running -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(queue: asyncio.Queue[Item], deadline: float | None, seconds: float | None) -> Item:
    if deadline is None:
        return await queue.get()
    try:
        return await asyncio.wait_for(queue.get(), deadline - time.monotonic())
    except asyncio.TimeoutError:
        raise timed_out(seconds or 0.0) from None
