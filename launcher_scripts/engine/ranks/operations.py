"""Operations on all ranks from the side of rank 0: two phases, so that all ranks do it or none.

Every rank prepares while steps go on. When all have, each gets the word to apply at the same place
among the plans, so they do it between the same two steps. A rank that is lost before, meanwhile or
after ends the engine, as it does at any time: no rank goes on without the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher_scripts.common.errors import BusyError, LauncherError, ServerError
from launcher_scripts.engine.messages.message import (
    Action,
    Operation,
    OperationReply,
    OperationRequest,
)
from launcher_scripts.engine.ranks.ranks import POLL_SECONDS, Ranks
from launcher_scripts.engine.runner.loading import EngineSettings
from launcher_scripts.engine.runner.operations import RankOperations
from launcher_scripts.engine.runner.runner import Runner


class OperationError(LauncherError):
    """An operation was not done, and everything is as it was before."""


class Replies:
    """What the ranks have replied to requests."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[int, Action], dict[int, str]] = {}
        self._events = threading.Condition()

    def add(self, rank: int, reply: OperationReply) -> None:
        """Note the reply of a rank."""
        with self._events:
            self._reasons.setdefault((reply.number, reply.action), {})[rank] = reply.reason
            self._events.notify_all()

    def of(self, request: OperationRequest, count: int, timeout: float) -> dict[int, str] | None:
        """Return each rank's reason why it could not, "" if it could; None: not all have replied
        after `timeout` seconds.
        """
        key = (request.number, request.action)
        with self._events:
            if not self._events.wait_for(lambda: len(self._reasons.get(key, ())) >= count, timeout):
                return None
            return self._reasons.pop(key)


class Operations:
    """Operations on the ranks of one engine, one at a time."""

    def __init__(
        self, ranks: Ranks, replies: Replies, runner: Runner, settings: EngineSettings
    ) -> None:
        self._ranks = ranks
        self._replies = replies
        self._count = settings.parallelism.world_size
        self._number = 0
        self._lock = threading.Lock()
        self._local = RankOperations(runner, settings, 0, lambda reply: replies.add(0, reply))

    @contextmanager
    def exclusive(self) -> Iterator[Operations]:
        """Inside, the caller's operation is the only one. Raises BusyError during another one."""
        if not self._lock.acquire(blocking=False):
            raise BusyError("another operation on this server has not ended; ask again later")
        try:
            yield self
        finally:
            self._lock.release()

    def prepare(self, operation: Operation) -> None:
        """Have every rank prepare an operation while steps go on, and wait for all.

        Raises OperationError with the reasons of those that cannot, and ServerError when a rank is
        lost; then none of them holds anything of it.
        """
        self._number += 1
        request = OperationRequest(self._number, "prepare", operation)
        self._local.perform(request)
        self._ranks.request(request)
        try:
            reasons = self._wait(request)
        except ServerError:
            self._local.perform(OperationRequest(self._number, "finish"))
            raise
        by_reason: dict[str, list[str]] = {}  # all read the same files: what all say is said once
        for rank, reason in sorted(reasons.items()):
            if reason:
                by_reason.setdefault(reason, []).append(self._ranks.label(rank))
        if by_reason:
            self.finish()
            parts = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
            raise OperationError("; ".join(parts) if self._count > 1 else next(iter(by_reason)))

    def carry_out(self, action: Action) -> float:
        """Have every rank apply or revert the operation; called between two steps.

        Returns the seconds that it took, once all have done it. Raises ServerError when a rank is
        lost: nobody knows then which of the others have done it, and the engine has to end.
        """
        began = time.perf_counter()
        request = OperationRequest(self._number, action)
        self._ranks.begin_step(request)
        self._local.perform(request)
        self._wait(request)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Have every rank release what the operation still holds."""
        request = OperationRequest(self._number, "finish")
        self._ranks.request(request)
        self._local.perform(request)

    def _wait(self, request: OperationRequest) -> dict[int, str]:
        """Return what all ranks have replied; ranks that hang are noticed as in any step."""
        while True:
            reasons = self._replies.of(request, self._count, POLL_SECONDS)
            if self._ranks.failure is not None:
                raise self._ranks.failure
            if reasons is not None:
                return reasons
