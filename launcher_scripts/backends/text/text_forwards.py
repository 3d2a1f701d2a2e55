"""Requests on their way through the token model.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import itertools
import time
import uuid
from threading import Condition, Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from older_servers import failure
from text_answers import Senders, TextAnswer
from text_channel import FORWARDED, Channel, Message
from text_tensors import BadRequestError, error_response

SENDING_THREADS = 2
POLL_SECONDS = 0.1  # how often each client is asked about, if that takes no larger share than:
POLL_SHARE = 4  # asking takes at most one part in so many of the time
POLLS_AT_ONCE = 8
CANCEL_AGAIN_SECONDS = 0.3


class Forward:
    """A request of a client, to be sent on to the token model."""

    def __init__(self, answer: TextAnswer, token_model: str, session: dict[str, Any]) -> None:
        """session: the keyword arguments that say which request of a session this is"""
        self.answer = answer
        self.key = uuid.uuid4().hex
        self._token_model = token_model
        self._session = session
        self._cancelled_at: float | None = None

    def ask(self, request_id: str = "") -> list[Any]:
        """Send the request; returns the tensors that answer it itself.

        Raises BadRequestError where Triton does not take it.
        """
        request = pb_utils.InferenceRequest(
            model_name=self._token_model,
            inputs=self.answer.request.inputs,
            requested_output_names=self.answer.request.asked,
            request_id=request_id,
            **self._session,
        )
        tensors: list[Any] = []
        # A model whose config.pbtxt says decoupled is asked in no other way.
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise BadRequestError(response.error().message())
            tensors += response.output_tensors()
        return tensors

    def look(self) -> bool:
        """Whether the token model is to be told that the client has gone."""
        self.answer.check_client()
        if not self.answer.ended:
            return False
        # Told again: what was said before the request had come there was in vain.
        now = time.monotonic()
        if self._cancelled_at is None or now > self._cancelled_at + CANCEL_AGAIN_SECONDS:
            self._cancelled_at = now
            return True
        return False


class Forwards:
    """The requests that the token model is not done with."""

    def __init__(self, *, generates: bool) -> None:
        """generates: the token model answers over a channel; an encoder does so at once"""
        self._changed = Condition()
        self._open: dict[str, Forward] = {}  # those asked about last come last
        self._closed = False
        self._senders = Senders(SENDING_THREADS)
        self._channel = Channel(self._take, self._lost) if generates else None
        Thread(target=self._watch, name="client-watch", daemon=True).start()

    def start(self, forward: Forward) -> None:
        """Send the request on; returns at once."""
        if self._channel is not None:
            with self._changed:
                self._open[forward.key] = forward
                self._changed.notify_all()
        Thread(target=self._run, args=(forward,), name="forward", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.close()

    def _run(self, forward: Forward) -> None:
        """Send the request; returns when the token model has it, in a session when that is done."""
        try:
            if self._channel is None:
                forward.answer.pass_on(forward.ask())
                return
            streams = int(forward.answer.request.streams)
            forward.ask(f"{FORWARDED} {forward.key} {self._channel.name} {streams}")
        except Exception as error:
            forward.answer.fail(error_response(error))
            self._forget(forward.key)

    def _take(self, message: Message) -> None:
        forward = self._open.get(message.key)
        if forward is None:
            return
        if message.last:
            self._forget(message.key)
        try:
            self._note(forward.answer, message)
        except Exception as error:
            forward.answer.fail(error_response(error))

    def _note(self, answer: TextAnswer, message: Message) -> None:
        if message.error is not None:
            answer.fail(failure(*message.error))
        elif answer.take(message.tensors, last=message.last):
            self._senders.put(answer)

    def _lost(self) -> None:
        """Nobody will answer what is open."""
        for key, forward in list(self._open.items()):
            forward.answer.fail(failure("the model has ended", "UNAVAILABLE"))
            self._forget(key)

    def _forget(self, key: str) -> None:
        with self._changed:
            self._open.pop(key, None)

    def _watch(self) -> None:
        """Look for clients that have gone, some at a time."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._closed)
                if self._closed:
                    return
                some = list(itertools.islice(self._open.values(), POLLS_AT_ONCE))
                for forward in some:
                    self._open[forward.key] = self._open.pop(forward.key)
                share = POLL_SECONDS * min(1.0, POLLS_AT_ONCE / len(self._open))
            started = time.monotonic()
            for forward in some:
                if forward.look() and self._channel is not None:
                    self._channel.cancel(forward.key)
            del some, forward
            spent = time.monotonic() - started
            time.sleep(max(share - spent, POLL_SHARE * spent))
