"""Threads for work that would hold up the event loop, shared by clients."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from launcher_scripts.gateway.admission import ClientQueues
from launcher_scripts.gateway.api_errors import busy

Result = TypeVar("Result")
NUM_THREADS = max(2, min(8, os.cpu_count() or 1))
# Of one client: half of the threads at a time, and so many pieces of work in line.
CLIENT_THREADS = NUM_THREADS // 2
MAX_WAITING = 128
_LONG = 1 << 12  # characters or tokens, of which a tokenizer takes a few milliseconds


class ClientThreads:
    """Runs work in threads. Clients take turns, and none has all threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="clients")
        self._running: Counter[str] = Counter()
        self._waiting: ClientQueues[asyncio.Future[None]] = ClientQueues()

    def of(self, client: str) -> ThreadsOfClient:
        """These threads as a client sees them."""
        return ThreadsOfClient(self, client)

    async def run(self, client: str, work: Callable[[], Result], size: int | None = None) -> Result:
        """The result of `work`. One whose caller is cancelled keeps its thread until it ends.

        size: characters or tokens that it is about; little work is done at once
        Raises ApiError where too much of the client's waits.
        """
        if size is not None and size <= _LONG:
            return work()
        await self._turn(client)
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._release, client)

        future = self._threads.submit(work)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    async def _turn(self, client: str) -> None:
        """Wait for a thread, which `_release` gives back."""
        if len(self._waiting.get(client, ())) >= MAX_WAITING:
            raise busy(f"{MAX_WAITING} requests of this client wait for a thread; send fewer")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(client, turn)
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(client, turn)
            else:
                self._release(client)
            raise

    def _release(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._advance()

    def _advance(self) -> None:
        while self._running.total() < NUM_THREADS:
            item = self._waiting.take(lambda client: self._running[client] < CLIENT_THREADS)
            if item is None:
                return
            client, turn = item
            self._running[client] += 1
            turn.set_result(None)


@dataclass(frozen=True)
class ThreadsOfClient:
    """Threads for one client's work."""

    threads: ClientThreads
    client: str

    async def run(self, work: Callable[[], Result], size: int | None = None) -> Result:
        """The result of `work`; see ClientThreads.run."""
        return await self.threads.run(self.client, work, size)
