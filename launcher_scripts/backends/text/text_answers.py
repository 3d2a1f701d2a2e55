"""Responses with the newest state of a text, sent as often as the client can receive them.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from older_servers import FINAL, failure
from text_deltas import GrowingText
from text_requests import Reader, TextRequest
from text_tensors import Tensors, error_response


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

    def take(self, tensors: dict[str, NDArray[Any]], *, last: bool) -> bool:
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
            self._beams[index].take(start, ids, prompt=prompt, finished=bool(finished))

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
