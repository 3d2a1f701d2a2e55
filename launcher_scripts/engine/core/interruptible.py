"""A scheduler whose rows can be stopped between two steps, for something that comes before them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from launcher_scripts.common.errors import BusyError, LauncherError, ServerError
from launcher_scripts.engine.core.results import StepResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.core.session import Session


class InterruptibleScheduler(Scheduler):
    """See Scheduler.

    draining: rows that have begun go on, those that wait do not begin
    asleep:   none begins, and nothing is in flight
    """

    draining = False
    asleep = False

    @property
    def has_begun(self) -> bool:
        """Return whether any row has begun, be it that it waits for a place again."""
        return any(row.placed_at for row in self.rows)

    def make_room(self, row: Row) -> bool:
        """Let there be a place for a row. Others give theirs up, those that came last first.

        Returns False where those that can are not enough. No step may be in flight.
        """
        while not self._allocator.has_room(row):
            growing = [item for item in self._running.values() if item.grows]
            if not growing:
                return False
            self._preempt(growing[-1])
        return True

    @contextmanager
    def alone(self, row: Row) -> Iterator[None]:
        """Inside, the row is the only one: the others go on afterwards where they were. A row that
        has not ended by then is cancelled.

        No step may be in flight, at the beginning and at the end.
        """
        others: tuple[dict[int, Row], dict[int, Row], deque[Row]] = (
            dict(self._running),
            dict(self._reading),
            deque(self._waiting),
        )
        for rows in (self._running, self._reading, self._waiting):
            rows.clear()
        draining, self.draining = self.draining, False
        self.add(row)
        try:
            yield
        finally:
            row.future.cancel()
            self._running.update(others[0])
            self._reading.update(others[1])
            self._waiting.extend(others[2])
            self.draining = draining
            self._cancelled = True  # one of the others may have been meanwhile

    def exchanged_weights(self, version: int, sessions: Iterable[Session]) -> int:
        """What was computed with the weights before is not used for new rows.

        sessions: all that may go on; they end
        Returns the number of rows that go on, with keys and values of the weights before.
        """
        self.weights_version = version
        begun = [row for row in self.rows if row.placed_at]
        for row in begun:
            row.weights_versions = (row.weights_versions[0], version)
            row.prefix = None
        self._allocator.cache.clear()
        for session in sessions:
            self.close_session(session)
        return len(begun)

    def _admit(self) -> list[Row]:
        if not (self.draining or self.asleep):
            return super()._admit()
        starts: list[Row] = []
        while (
            self._waiting and self._waiting[0].placed_at and self._start(self._waiting[0], starts)
        ):
            self._waiting.popleft()
        return starts


@dataclass(eq=False)
class Interruption:
    """Something that is done between two steps, with none in flight.

    function: called by the thread that steps; what it returns or raises is the future's
    is_ready: whether it can be done now, asked when no step is in flight
    drains:   only when no row has begun; rows that wait do not begin before
    deadline: by time.monotonic(); what cannot be done by then is not done
    """

    function: Callable[[InterruptibleScheduler], Any]
    is_ready: Callable[[InterruptibleScheduler], bool]
    drains: bool
    deadline: float
    future: Future[Any] = field(default_factory=Future)

    def attempt(self, scheduler: InterruptibleScheduler, launched: deque[StepResult]) -> bool:
        """Return whether it is over. Raises what ends the engine: ServerError, and any exception
        that is no LauncherError.

        launched: the steps in flight, which end first if it may be done
        """
        scheduler.draining = self.drains
        if not (self.drains and scheduler.has_begun):
            while launched:
                scheduler.apply(launched.popleft())
            if self.is_ready(scheduler):
                scheduler.draining = False
                self._call(scheduler)
                return True
        if time.monotonic() <= self.deadline:
            return False
        scheduler.draining = False
        running = scheduler.rows_running
        message = f"it was not done: after its time was over, {running} rows were still running"
        self.future.set_exception(BusyError(message))
        return True

    def _call(self, scheduler: InterruptibleScheduler) -> None:
        try:
            self.future.set_result(self.function(scheduler))
        except ServerError:
            raise
        except LauncherError as error:
            self.future.set_exception(error)
