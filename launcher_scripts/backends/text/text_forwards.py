"""Requests on their way through the token model, each with a thread that reads its responses.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from text_answers import Senders, TextAnswer
from text_tensors import error_response, failure

# A request keeps a thread here and, until its first response, one of the server's thread-pool-size
# threads, which cancelling needs, too; those beyond wait in line.
REQUESTS_AT_ONCE = 256
SENDING_THREADS = 2
POLL_SECONDS = 0.1  # how often each client is asked about, if that takes no larger share than:
POLL_SHARE = 15  # asking takes at most one part in so many of the time
POLLS_AT_ONCE = 8
CANCEL_AGAIN_SECONDS = 0.3


class Forward:
    """A request of a client as a request to the token model."""

    def __init__(self, answer: TextAnswer, token_model: str, session: dict[str, Any]) -> None:
        """session: the keyword arguments that say which request of a session this is"""
        self.answer = answer
        self.ended = False
        self._token_model = token_model
        self._session = session
        self._key = uuid.uuid4().hex
        self._cancelled_at: float | None = None

    def run(self, senders: Senders) -> None:
        """Read the responses until the last."""
        request = self.answer.request
        parameters = {"forwarded": self._key, "stream": request.streams}
        for response in self._ask(request.inputs, request.asked, parameters, self._session):
            if response.has_error():
                self.answer.fail(_failure(response.error().message()))
            elif self.answer.take(response.output_tensors()):
                senders.put(self.answer)
        self.answer.finish()

    def look(self) -> bool:
        """Whether the token model is to be told that the client has gone."""
        self.answer.look_for_departure()
        if not self.answer.ended or self.ended:
            return False
        # Told again: what was said before the request had come there was in vain.
        now = time.monotonic()
        if self._cancelled_at is None or now > self._cancelled_at + CANCEL_AGAIN_SECONDS:
            self._cancelled_at = now
            return True
        return False

    def cancel(self) -> None:
        """Have the token model free the rows."""
        session = {}
        if self._session["correlation_id"]:  # another session's request, or it would wait for ours
            key = uuid.uuid4().int >> 65
            whole = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            whole |= pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
            session = {"correlation_id": key, "flags": whole}
        request = self.answer.request
        for _ in self._ask(request.inputs[:3], request.asked, {"cancel": self._key}, session):
            pass

    def _ask(
        self,
        inputs: list[Any],
        outputs: list[str],
        parameters: dict[str, Any],
        more: dict[str, Any],
    ) -> Any:
        request = pb_utils.InferenceRequest(
            model_name=self._token_model,
            inputs=inputs,
            requested_output_names=outputs,
            parameters=parameters,
            **more,
        )
        return request.exec(decoupled=True)


class Forwards:
    """The requests that are not answered yet."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._line: deque[Forward] = deque()
        self._running = 0
        self._open: dict[Forward, None] = {}  # those asked about last come last
        self._to_cancel: deque[Forward] = deque()
        self._closed = False
        self._senders = Senders(SENDING_THREADS)
        for work in (self._watch, self._cancel):
            Thread(target=work, name="departures", daemon=True).start()

    def start(self, forward: Forward) -> None:
        """Send the request on, or have it wait in line."""
        with self._changed:
            self._open[forward] = None
            self._line.append(forward)
            if self._running < REQUESTS_AT_ONCE:
                self._running += 1
                Thread(target=self._run, name="forward", daemon=True).start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (forward := self._next()) is not None:
            try:
                if not forward.answer.ended:
                    forward.run(self._senders)
            except Exception as error:
                forward.answer.fail(error_response(error))
            forward.ended = True
            with self._changed:
                del self._open[forward]

    def _next(self) -> Forward | None:
        with self._changed:
            if self._line:
                return self._line.popleft()
            self._running -= 1
            return None

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether it came true before the end."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._closed)
            return not self._closed

    def _watch(self) -> None:
        """Look for clients that have gone, some at a time."""
        while self._wait_for(lambda: bool(self._open)):
            started = time.monotonic()
            with self._changed:
                some = list(itertools.islice(self._open, POLLS_AT_ONCE))
                for forward in some:
                    self._open[forward] = self._open.pop(forward)
                share = POLL_SECONDS * min(1.0, POLLS_AT_ONCE / max(1, len(self._open)))
            gone = [forward for forward in some if forward.look()]
            with self._changed:
                self._to_cancel.extend(gone)
                self._changed.notify_all()
            del some, gone
            spent = time.monotonic() - started
            time.sleep(max(share - spent, POLL_SHARE * spent))

    def _cancel(self) -> None:
        while self._wait_for(lambda: bool(self._to_cancel)):
            forward = self._to_cancel.popleft()
            if not forward.ended:
                forward.cancel()


def _failure(message: str) -> Any:
    """The token model's error. Triton keeps the message of such an error, not its code."""
    gone = "is not ready" in message
    return failure(message, "UNAVAILABLE" if gone else "INVALID_ARG")
