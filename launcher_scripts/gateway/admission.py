"""Admission of requests to the engines, and threads that clients share."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from launcher_scripts.gateway.api_errors import busy

Item = TypeVar("Item")
# Of the places that other clients leave, one client has so many at most. So there are some for the
# next one, however many a few clients want.
CLIENT_SHARE = 0.75


class ClientQueues(OrderedDict[str, dict[Item, None]]):
    """Client -> what waits. Clients take turns; what leaves is not kept."""

    def add(self, client: str, item: Item) -> None:
        self.setdefault(client, {})[item] = None

    def remove(self, client: str, item: Item) -> None:
        del self[client][item]
        if not self[client]:
            del self[client]

    def next_item(self, may: Callable[[str], bool] = lambda _: True) -> tuple[str, Item] | None:
        """The first item of the next client in turn for which `may` is true."""
        client = next(filter(may, self), None)
        if client is None:
            return None
        item = next(iter(self[client]))
        self.remove(client, item)
        if client in self:
            self.move_to_end(client)
        return client, item


class Admission:
    """Places for rows. Clients that wait take turns, so that one with many rows holds up nobody.

    running, waiting: rows
    maximum:          that may run and wait together
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.running = 0
        self.waiting = 0
        self.maximum = max_running + max_waiting
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._rows: Counter[str] = Counter()
        self._queues: ClientQueues[QueuedRow] = ClientQueues()

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of one client, while there are no others."""
        return self._share(0)

    def reserve(self, client: str, rows: int) -> list[QueuedRow]:
        """A place for every row; they must be taken or left.

        Raises ApiError where too many wait, or where the client would have more than its share.
        """
        free = max(0, self._max_running - self.running) if not self.waiting else 0
        if self.waiting + max(0, rows - free) > self._max_waiting:
            raise busy(
                f"{self.running} rows are running and {self.waiting} are waiting; this request has "
                f"{rows}, and at most {self._max_waiting} may wait"
            )
        queue = self._rows[client]
        share = self._share(self.running + self.waiting - queue)
        if queue + rows > share:
            raise busy(
                f"{queue} rows of this client are running or waiting; this request has {rows}, and "
                f"one client has at most {share} now"
            )
        slots = [QueuedRow(self, client) for _ in range(rows)]
        for slot in slots:
            self._queues.add(client, slot)
        self._rows[client] += rows
        self.waiting += rows
        self.advance()
        return slots

    def leave(self, slot: QueuedRow) -> None:
        """Take a row out, running or waiting."""
        self._rows[slot.client] -= 1
        if not self._rows[slot.client]:
            del self._rows[slot.client]
        if slot.let_in.is_set():
            self.running -= 1
        else:
            self.waiting -= 1
            self._queues.remove(slot.client, slot)
        self.advance()

    def advance(self) -> None:
        """Let rows in while there is room, one of each client in turn."""
        while self.running < self._max_running and (item := self._queues.next_item()):
            self.waiting -= 1
            self.running += 1
            item[1].let_in.set()

    def _share(self, others: int) -> int:
        """Maximum number of rows of a client beside so many of others."""
        return max(1, int(CLIENT_SHARE * (self.maximum - others)))


class QueuedRow:
    """One row's place."""

    def __init__(self, admission: Admission, client: str) -> None:
        self.client = client
        self.let_in = asyncio.Event()
        self.left = False
        self._admission = admission

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for the row's turn, and leave at the end."""
        try:
            await self.let_in.wait()
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Make room; more than once does nothing."""
        if not self.left:
            self.left = True
            self._admission.leave(self)


Result = TypeVar("Result")
NUM_THREADS = max(2, min(8, os.cpu_count() or 1))
# Of one client: half of the threads at a time, and so many pieces of work in line.
CLIENT_THREADS = NUM_THREADS // 2
MAX_WAITING = 128
_LONG = 1 << 12  # characters or tokens, of which a tokenizer takes a few milliseconds
_BODY_BYTES = 4  # of a body are parsed while one character is tokenized


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
            item = self._waiting.next_item(lambda client: self._running[client] < CLIENT_THREADS)
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

    async def run_on_body(self, work: Callable[[], Result], num_bytes: int) -> Result:
        """The result of `work` on a request's body, which takes less time than a tokenizer."""
        return await self.run(work, num_bytes // _BODY_BYTES)
