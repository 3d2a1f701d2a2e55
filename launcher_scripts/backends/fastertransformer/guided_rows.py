"""Rows that wait for their grammars to be compiled before the engine gets them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from threading import Lock

from launcher_scripts.backends.fastertransformer.guidance import Guidance
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.guide import Guide
from launcher_scripts.engine.core.row import SnapshotCallback
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
        self._lock = Lock()
        self.num_waiting = 0

    def start(self, rows: Sequence[GuidedRow]) -> None:
        """Submit the rows of one request as soon as their grammars are compiled.

        Rows whose grammars are known do not wait for others' grammars.
        """
        if not rows:
            return
        self._count(len(rows))
        if all(self._guidance.is_compiled(row.grammar) for row in rows):
            self._compile(rows)
        else:
            self._guidance.executor.submit(self._compile, rows)

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
                except Exception as error:  # the other rows go on
                    if not isinstance(error, RequestError):
                        traceback.print_exc()
                    row.fail(error)
        finally:
            self._count(-len(rows))
        with self._together():
            for row, guide in guides:
                row.submit(self._submit, guide)
