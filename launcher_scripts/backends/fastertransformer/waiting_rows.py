"""Rows on their way to the engine: those of a session, whose requests belong together, and those
that wait for their grammars to be compiled.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from torch import Tensor

from launcher_scripts.backends.fastertransformer.guidance import CLIENT_COMPILERS, Guidance
from launcher_scripts.common.errors import ConfigError, Problems, RequestError
from launcher_scripts.common.tokenizer import is_of_library
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.requests import prompt_start_id, real_ids
from launcher_scripts.engine.core.row import Guide, SnapshotCallback
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine

# Triton frees a sequence's place when it has been idle; ours goes a little later.
IDLE_MARGIN_SECONDS = 1.0
DEFAULT_IDLE_MICROSECONDS = 1_000_000  # Triton's own
WHERE = "sequence_batching in config.pbtxt"


@dataclass
class Line:
    """One row of a session: its place in the engine, and its ids before the last request.

    asked: the real ids of the last request, which count once the engine has taken them
    """

    session: Session
    text: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()

    def turn(self, request: GenerateRequest, prompt_start: int) -> GenerateRequest:
        """Begin a request; returns it with the whole text so far as its prompt."""
        if self.session.history is not None:
            self.text += (*self.asked, *self.session.history)
            if self.session.finished and request.input_ids:
                self.text = self.text[:-1]
        self.asked, self.session.history = real_ids(request, prompt_start), None
        return replace(
            request,
            input_ids=(*self.text, *self.asked),
            prompt_task=None,
            prompt_embedding=None,
        )


@dataclass
class Conversation:
    """The rows of one session. `open_requests` is 1 while a request is on its way."""

    lines: list[Line]
    last_used: float = field(default_factory=time.monotonic)
    open_requests: int = 0


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session: its rows' places, and its rows as the client will see them."""

    sessions: list[Session]
    shown: list[GenerateRequest]


class Sessions:
    """All sessions by correlation id. One that is idle too long is ended."""

    def __init__(self, engine: Engine, idle_seconds: float) -> None:
        self._engine = engine
        self._idle_seconds = idle_seconds + IDLE_MARGIN_SECONDS
        self._lock = threading.Lock()
        self._conversations: dict[int | str, Conversation] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sessions", daemon=True)
        self._thread.start()

    def begin_turn(
        self,
        key: int | str,
        *,
        start: bool,
        tensors: Mapping[str, Tensor],
        rows: Sequence[GenerateRequest],
    ) -> SessionTurn:
        """A request of session `key`. Raises RequestError if it cannot belong to it."""
        with self._lock:
            if start:
                self._end(key)
                lines = _new_lines(tensors, len(rows))
                _check_capacity(lines, self._engine.cache_tokens, self._engine.block_tokens)
                self._conversations[key] = Conversation(lines)
            conversation = self._conversations.get(key)
            if conversation is None:
                raise RequestError(
                    f"there is no session {key}: it has ended, was idle for too long, or its first "
                    "request did not say START"
                )
            if len(rows) != len(conversation.lines):
                raise RequestError(
                    f"session {key} has {len(conversation.lines)} rows; got {len(rows)}"
                )
            if conversation.open_requests:
                raise RequestError(f"session {key} has a request on its way; wait for its answer")
            conversation.open_requests = 1
        prompt_start = prompt_start_id(self._engine.config)
        pairs = list(zip(conversation.lines, rows, strict=True))
        return SessionTurn(
            [line.session for line, _ in pairs],
            [line.turn(row, prompt_start) for line, row in pairs],
        )

    def end_turn(self, key: int | str, turn: SessionTurn, *, end: bool) -> None:
        """The request was answered, or failed; `end`: it was the last one of its session.

        Rows that are no longer equally far end the session too.
        """
        with self._lock:
            conversation = self._conversations.get(key)
            if conversation is None or conversation.lines[0].session is not turn.sessions[0]:
                return
            conversation.open_requests = 0
            conversation.last_used = time.monotonic()
            is_new = [session.history is None and not session.busy for session in turn.sessions]
            unequal = any(is_new) and len(is_new) > 1
            never = all(is_new) and not any(session.positions for session in turn.sessions)
            if end or unequal or never:
                self._end(key)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _end(self, key: int | str) -> None:
        conversation = self._conversations.pop(key, None)
        for line in conversation.lines if conversation is not None else ():
            self._engine.close_session(line.session)

    def _watch(self) -> None:
        while not self._closing.wait(min(1.0, self._idle_seconds / 4)):
            now = time.monotonic()
            with self._lock:
                idle = [
                    key
                    for key, conversation in self._conversations.items()
                    if not conversation.open_requests
                    and now - conversation.last_used > self._idle_seconds
                ]
                for key in idle:
                    self._end(key)


def idle_seconds(config: Mapping[str, Any]) -> float | None:
    """Seconds that a session may be idle; None if the model has no sessions. Raises ConfigError."""
    batching = config.get("sequence_batching")
    if batching is None:
        return None
    problems = Problems("the model's config.pbtxt")
    if int(config.get("max_batch_size", 0)) != 1:
        problems.add(
            "Sequence Batching for interactive text generation: only supports max batch size = 1",
            got=config.get("max_batch_size", 0),
            change="max_batch_size in config.pbtxt",
        )
    if "dynamic_batching" in config:
        problems.add(
            "Sequence Batching cannot work with dynamic batching at the same time !", change=WHERE
        )
    instances = sum(int(group.get("count", 1)) for group in config.get("instance_group", ()))
    if instances > 1:
        problems.add(
            "one instance serves all sessions: oldest { max_candidate_sequences: ... } says how "
            "many at once",
            got=f"{instances} instances",
            change=WHERE,
        )
    problems.raise_if_any(ConfigError)
    idle = int(batching.get("max_sequence_idle_microseconds", 0)) or DEFAULT_IDLE_MICROSECONDS
    return idle / 1e6


def _new_lines(tensors: Mapping[str, Tensor], rows: int) -> list[Line]:
    lengths = _lengths(tensors, "session_len", rows)
    if lengths is None:
        raise RequestError("the first request of a session needs session_len")
    memories = _lengths(tensors, "memory_len", rows) or lengths
    return [
        Line(Session(length, min(length, memory)))
        for length, memory in zip(lengths, memories, strict=True)
    ]


def _check_capacity(lines: Sequence[Line], cache_tokens: int, block_tokens: int) -> None:
    """Check that the rows, which keep their places for the whole session, fit beside each other."""
    blocks = sum(line.session.max_blocks(block_tokens) for line in lines)
    needed = blocks * block_tokens
    if len(lines) > 1 and needed > cache_tokens:
        raise RequestError(
            f"the session's {len(lines)} rows need {needed} tokens in the key/value cache, which "
            f"holds {cache_tokens}; change session_len or memory_len"
        )


def _lengths(tensors: Mapping[str, Tensor], name: str, rows: int) -> list[int] | None:
    tensor = tensors.get(name)
    if tensor is None:
        return None
    values = tensor.long().reshape(-1).tolist()
    if len(values) != rows:
        raise RequestError(f"{name} needs one value per row of input_ids, [{rows}]; got {values}")
    return [int(value) for value in values]


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
