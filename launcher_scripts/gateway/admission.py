"""How many rows the engines are given at a time, and whose turn is next."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from launcher_scripts.gateway.api_errors import busy


class Admission:
    """Places for rows. Clients that wait take turns, so that one with many rows holds up nobody.

    running, waiting: rows
    most:             that may run and wait together
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.running = 0
        self.waiting = 0
        self.most = max_running + max_waiting
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, deque[QueuedRow]] = OrderedDict()

    def reserve(self, client: str, rows: int) -> list[QueuedRow]:
        """A place for every row; they must be taken or left.

        Raises ApiError where too many wait.
        """
        free = max(0, self._max_running - self.running) if not self.waiting else 0
        if self.waiting + max(0, rows - free) > self._max_waiting:
            raise busy(
                f"{self.running} rows are running and {self.waiting} are waiting; this request has "
                f"{rows}, and at most {self._max_waiting} may wait"
            )
        places = [QueuedRow(self) for _ in range(rows)]
        self._queues.setdefault(client, deque()).extend(places)
        self.waiting += rows
        self.advance()
        return places

    def advance(self) -> None:
        """Let rows in while there is room, one of each client in turn."""
        while self._queues and self.running < self._max_running:
            client, queue = self._queues.popitem(last=False)
            place = queue.popleft()
            if queue:
                self._queues[client] = queue
            if place.left:
                continue
            self.waiting -= 1
            self.running += 1
            place.let_in.set()


class QueuedRow:
    """One row's place."""

    def __init__(self, admission: Admission) -> None:
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
        if self.left:
            return
        self.left = True
        if self.let_in.is_set():
            self._admission.running -= 1
        else:
            self._admission.waiting -= 1
        self._admission.advance()
