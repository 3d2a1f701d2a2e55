"""Requests on their way through the token model.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import time
import uuid
from threading import Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from client_watch import ClientWatch
from older_servers import failure
from text_answers import Senders, TextAnswer
from text_channel import FORWARDED, Channel, Message
from text_tensors import BadRequestError, as_float32, error_response

SENDING_THREADS = 2
WATCH_INTERVAL = 4.0  # see ClientWatch
CANCEL_AGAIN_SECONDS = 0.3


class Forward:
    """A request of a client, to be sent on to the token model."""

    def __init__(
        self,
        answer: TextAnswer,
        token_model: str,
        session: dict[str, Any],
        channel: Channel | None,
    ) -> None:
        """See Forwards."""
        self.answer = answer
        self.key = uuid.uuid4().hex
        self._token_model = token_model
        self._session = session
        self._channel = channel
        self._next_cancel = 0.0

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

    def check_client(self) -> None:
        """End the answer if its client has gone, and tell the token model of one that has ended."""
        self.answer.check_client()
        # Told again: what was said before the request had come there was in vain.
        now = time.monotonic()
        if self.answer.finished and self._channel is not None and now > self._next_cancel:
            self._next_cancel = now + CANCEL_AGAIN_SECONDS
            self._channel.cancel(self.key)


class Forwards:
    """The requests that the token model is not done with."""

    def __init__(self, token_model: str, *, generates: bool) -> None:
        """generates: the token model answers over a channel; an encoder does so at once"""
        self._token_model = token_model
        self._open: dict[str, Forward] = {}
        self._watch = ClientWatch(WATCH_INTERVAL)
        self._senders = Senders(SENDING_THREADS)
        self._channel = Channel(self._take, self._lost) if generates else None

    def start(self, answer: TextAnswer, session: dict[str, Any]) -> None:
        """Send the answer's request on; returns at once.

        session: the keyword arguments that say which request of a session this is
        """
        forward = Forward(answer, self._token_model, session, self._channel)
        if self._channel is not None:
            self._open[forward.key] = forward
            self._watch.watch(forward)
        Thread(target=self._run, args=(forward,), name="forward", daemon=True).start()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._watch.close()

    def _run(self, forward: Forward) -> None:
        """Send the request; returns when the token model has it, in a session when that is done."""
        try:
            if self._channel is None:
                forward.answer.pass_on(list(map(as_float32, forward.ask())))
                return
            streams = int(forward.answer.request.streams)
            forward.ask(f"{FORWARDED} {forward.key} {self._channel.name} {streams}")
        except Exception as error:
            forward.answer.fail(error_response(error))
            self._forget(forward)

    def _take(self, message: Message) -> None:
        forward = self._open.get(message.key)
        if forward is None:
            return
        if message.last:
            self._forget(forward)
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
        for forward in list(self._open.values()):
            forward.answer.fail(failure("the model has ended", "UNAVAILABLE"))
            self._forget(forward)

    def _forget(self, forward: Forward) -> None:
        self._open.pop(forward.key, None)
        self._watch.forget(forward)
