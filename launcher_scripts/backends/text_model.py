"""Text to text, through a FasterTransformer model, as a model of Triton's Python backend.

Runs in the server, as model.py, from a repository folder that also holds the package tokenizer,
text_*.py and the tokenizer's files. It sends each request on to the token model itself, since
Triton does not tell the steps of an ensemble that their client has gone. A response has the newest
state of its text, and is sent as often as the client can receive it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from text_channel import FORWARDED, Channel, ChannelMessage
from text_deltas import GrowingText
from text_requests import Reader, TextRequest
from text_tensors import (
    BadRequestError,
    Tensors,
    as_float32,
    error_response,
    require_working_arrays,
)
from tokenizer import load_tokenizer
from triton_requests import (
    FINAL,
    ClientWatch,
    failure,
    require_new_enough,
    response_sender,
    returned,
    seconds_allowed,
)


class TextAnswer:
    """One client's answer. Any thread may use it.

    A text that streams is sent in as many responses as there is time for, each with all that the
    ones before did not have, then a last one that is empty: some clients never see the last one's
    tensors, others, of those that use today's names, no last one without any, so to them it brings
    empty text. Any other text is sent once.
    """

    def __init__(
        self,
        request: TextRequest,
        reader: Reader,
        tensors: Tensors,
        sender: Any,
        decode: Callable[[Sequence[int]], str],
        seconds: float | None,
    ) -> None:
        """seconds: how long the answer may take, None: as long as it takes"""
        self.request = request
        self._reader = reader
        self._tensors = tensors
        self._sender = sender
        self._decode = decode
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._lock = Lock()
        self._beams: dict[tuple[int, ...], GrowingText] = {}
        self._lengths = np.zeros((request.rows, 1))
        self._others: dict[str, NDArray[Any]] = {}  # outputs that come as they are
        self._unsent = False
        self._queued = False  # on its way to be sent by one of the senders
        self._complete = False
        self.finished = False

    def receive(self, tensors: dict[str, NDArray[Any]], *, last: bool) -> bool:
        """Note a response of the token model; whether the client is to be sent one now."""
        with self._lock:
            if "news" in tensors:
                self._accept_deltas(self._tensors.without_axes(tensors["news"]))
                self._others = {name: tensors[name] for name in tensors if name != "news"}
                self._unsent = True
            self._complete = last
            due = (last or self.request.streams) and not self._queued and not self.finished
            self._queued = self._queued or due
            return due

    def pass_on(self, tensors: Sequence[Any]) -> None:
        """Send an encoder's outputs, and the end."""
        with self._lock:
            if not self.finished:
                self.finished = True
                self._sender.send(pb_utils.InferenceResponse(list(tensors)), flags=FINAL)

    def _accept_deltas(self, deltas: NDArray[Any]) -> None:
        self._lengths = deltas[..., 0]
        for index in np.ndindex(deltas.shape[:2]):
            length, prompt, start, finished = deltas[index][:4].tolist()
            ids = deltas[index][4 : 4 + length - start].tolist()
            if index not in self._beams:
                self._beams[index] = GrowingText(self._decode)
            self._beams[index].feed(start, ids, prompt=prompt, finished=bool(finished))

    def send_deltas(self) -> None:
        """Send what has come since the last time; at the end of the text also the end."""
        with self._lock:
            self._queued = False
            if self.finished:
                return
            response = self._response() if self._unsent else None
            self._unsent = False
            if not self.request.streams:
                self.finished = True
                self._sender.send(response or failure("no answer came", "INTERNAL"), flags=FINAL)
                return
            if response is not None:
                self._sender.send(response)
            if self._complete:
                self.finished = True
                self._send_end()

    def _send_end(self) -> None:
        if self.request.todays and "text_output" in self.request.outputs:
            empty = np.full(self._lengths.size, b"", dtype=np.object_)
            last = pb_utils.InferenceResponse([self._tensors.tensor("text_output", empty)])
            self._sender.send(last, flags=FINAL)
        else:
            self._sender.send(flags=FINAL)

    def fail(self, response: Any) -> None:
        """End with an error, unless the answer has ended."""
        with self._lock:
            if not self.finished:
                self.finished = True
                self._sender.send(response, flags=FINAL)

    def check_client(self) -> None:
        """End the answer if its client has gone, or waits no longer."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.fail(failure("the request's timeout is over", "UNAVAILABLE"))
            return
        with self._lock:  # the server dies of a question about a request that has been answered
            cancelled = not self.finished and self._sender.is_cancelled()
        if cancelled:
            self.fail(failure("the client cancelled the request", "CANCELLED"))

    def _response(self) -> Any:
        values = self._texts()
        outputs = [
            self._tensors.tensor(name, values[name])
            for name in values
            if name in self.request.outputs
        ]
        outputs += [pb_utils.Tensor(name, value) for name, value in self._others.items()]
        return pb_utils.InferenceResponse(outputs)

    def _texts(self) -> dict[str, NDArray[Any]]:
        shape = self._lengths.shape
        deltas, pieces, texts = (np.empty((*shape, 1), dtype=np.object_) for _ in range(3))
        for index in np.ndindex(shape):
            beam = self._beams[index]
            first = not beam.text
            delta = beam.news()
            prompt = beam.prompt_text() if self.request.with_prompt[index[0]] else ""
            text = prompt + beam.text
            piece = (prompt if first else "") + delta if self.request.streams else text
            for target, value in ((deltas, delta), (pieces, piece), (texts, text)):
                target[index][0] = value.encode("utf-8")
        return {
            "OUTPUT_0": texts,
            "OUTPUT_DELTA": deltas,
            "text_output": pieces.reshape(-1),
            "sequence_length": self._lengths.astype(self._reader.length_type),
        }


class Senders:
    """The threads that send what is new; a slow client holds one of them up, and no reader."""

    def __init__(self, threads: int) -> None:
        self._due: SimpleQueue[TextAnswer] = SimpleQueue()
        for _ in range(threads):
            Thread(target=self._run, name="senders", daemon=True).start()

    def put(self, answer: TextAnswer) -> None:
        self._due.put(answer)

    def _run(self) -> None:
        while True:
            answer = self._due.get()
            try:
                answer.send_deltas()
            except Exception as error:
                answer.fail(error_response(error))


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

    def _take(self, message: ChannelMessage) -> None:
        forward = self._open.get(message.key)
        if forward is None:
            return
        if message.last:
            self._forget(forward)
        try:
            self._note(forward.answer, message)
        except Exception as error:
            forward.answer.fail(error_response(error))

    def _note(self, answer: TextAnswer, message: ChannelMessage) -> None:
        if message.error is not None:
            answer.fail(failure(*message.error))
        elif answer.receive(message.tensors, last=message.last):
            self._senders.put(answer)

    def _lost(self) -> None:
        """Nobody will answer what is open."""
        for forward in list(self._open.values()):
            forward.answer.fail(failure("the model has ended", "UNAVAILABLE"))
            self._forget(forward)

    def _forget(self, forward: Forward) -> None:
        self._open.pop(forward.key, None)
        self._watch.forget(forward)


class TritonPythonModel:
    """Prompts -> texts; the tensors are those of config.pbtxt.

    The parameter token_model names the model behind it.
    """

    def initialize(self, args: dict[str, str]) -> None:
        require_new_enough()
        require_working_arrays()
        self.tokenizer = load_tokenizer(Path(__file__).parent)
        self.tensors = Tensors(args["model_config"])
        self.reader = Reader(self.tensors, self.tokenizer)
        self.forwards = Forwards(self.reader.token_model, generates=self.reader.generates)

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Send every request on; answers follow through response senders."""
        senders = [response_sender(request) for request in requests]
        for request, sender in zip(requests, senders, strict=True):
            try:
                self.begin(request, sender)
            except Exception as error:
                sender.send(error_response(error), flags=FINAL)
        return returned(senders)

    def begin(self, request: Any, sender: Any) -> None:
        answer = TextAnswer(
            self.reader.read(request),
            self.reader,
            self.tensors,
            sender,
            self.tokenizer.decode,
            seconds_allowed(request),
        )
        session = {"correlation_id": request.correlation_id(), "flags": request.flags()}
        self.forwards.start(answer, session)

    def finalize(self) -> None:
        self.forwards.close()
