"""Rows that wait for their grammars to be compiled before the engine gets them.

A grammar may take seconds. So clients have queues of their own, and none has all compilers.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Lock

from launcher_scripts.backends.fastertransformer.guidance import CLIENT_COMPILERS, Guidance
from launcher_scripts.common.errors import RequestError
from launcher_scripts.common.tokenizer import is_of_library
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.row import Guide, SnapshotCallback
from launcher_scripts.engine.core.session import Session

SubmitGuided = Callable[
    [GenerateRequest, SnapshotCallback | None, Session | None, Guide], Future[GenerateOutput]
]


class GuidedRow:
    """A row's future, before and after the engine has the row. Cancelling it frees the row."""

    def __init__(
        self,
        request: GenerateRequest,
        on_progress: SnapshotCallback | None,
        session: Session | None,
    ) -> None:
        self.grammar = request.guided_grammar or ""
        self.future: Future[GenerateOutput] = Future()
        self._arguments = (request, on_progress, session)
        self._lock = Lock()
        self._submitted: Future[GenerateOutput] | None = None
        self.future.add_done_callback(self._pass_cancellation_on)

    def submit(self, submit: SubmitGuided, guide: Guide) -> None:
        """Hand the row to the engine, unless it was cancelled."""
        with self._lock:
            if self.future.cancelled():
                return
            self._submitted = submit(*self._arguments, guide)
        self._submitted.add_done_callback(self._finish)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_exception(error)

    def _finish(self, submitted: Future[GenerateOutput]) -> None:
        if submitted.cancelled():
            return
        error = submitted.exception()
        if error is not None:
            self.fail(error)
            return
        with suppress(InvalidStateError):
            self.future.set_result(submitted.result())

    def _pass_cancellation_on(self, future: Future[GenerateOutput]) -> None:
        if not future.cancelled():
            return
        with self._lock:  # a row that is about to be submitted is cancelled after that
            submitted = self._submitted
        if submitted is not None:
            submitted.cancel()


class ClientExecutor:
    """Work of clients for an executor, which gets so much of each client at a time."""

    def __init__(self, executor: Executor, max_running: int) -> None:
        """max_running: of one client"""
        self._executor = executor
        self._max_running = max_running
        self._lock = Lock()
        self._running: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def submit(self, client: str, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[client].append(work)
            self._advance(client)

    def _advance(self, client: str) -> None:
        """Hand on the client's next work if it may run; the caller has the lock."""
        if self._waiting[client] and self._running[client] < self._max_running:
            self._executor.submit(self._run, client, self._waiting[client].popleft())
            self._running[client] += 1
        if not self._running[client]:
            del self._running[client], self._waiting[client]

    def _run(self, client: str, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._running[client] -= 1
                self._advance(client)


class GuidedRows:
    """Compiles the grammars of requests in threads of its own, and submits their rows then.

    num_waiting: rows whose grammars are not compiled yet
    """

    def __init__(
        self,
        guidance: Guidance,
        submit: SubmitGuided,
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """submit, together: the engine's"""
        self._guidance = guidance
        self._submit = submit
        self._together = together
        self._queues = ClientExecutor(guidance.executor, CLIENT_COMPILERS)
        self._lock = Lock()
        self.num_waiting = 0

    def start(self, rows: Sequence[GuidedRow], client: str = "") -> None:
        """Submit the rows of one request as soon as their grammars are compiled.

        Rows whose grammars are known do not wait for others' grammars.

        client: who sent the request; those without a name are one client
        """
        self._count(len(rows))
        if all(self._guidance.is_compiled(row.grammar) for row in rows):
            self._compile(rows)
        else:
            self._queues.submit(client, partial(self._compile, rows))

    def _count(self, rows: int) -> None:
        with self._lock:
            self.num_waiting += rows

    def _compile(self, rows: Sequence[GuidedRow]) -> None:
        guides: list[tuple[GuidedRow, Guide]] = []
        try:
            for row in rows:
                if row.future.cancelled():
                    continue
                try:
                    guides.append((row, self._guidance.guide(row.grammar)))
                except BaseException as error:  # the other rows go on
                    if not is_of_library(error):
                        raise
                    if not isinstance(error, RequestError):
                        traceback.print_exc()
                    row.fail(error)
        finally:
            self._count(-len(rows))
        with self._together():
            for row, guide in guides:
                row.submit(self._submit, guide)
