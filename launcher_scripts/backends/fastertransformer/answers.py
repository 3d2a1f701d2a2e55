"""Requests on their way back: one answer each, or one per token where the model streams.

The engine's stepping thread only leaves a note here; a thread of its own turns results into
tensors and sends them, so a slow client holds nobody up.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.forwarded import news
from launcher_scripts.engine.row import Progress, Snapshot
from launcher_scripts.engine.session import Session
from launcher_scripts.errors import RequestError
from launcher_scripts.protocol import GenerateOutput, GenerateRequest

# How often the server is asked whether a client has gone; it only answers when asked. A few clients
# at a time, because answers wait meanwhile.
CANCEL_POLL_SECONDS = 0.1
POLLS_AT_ONCE = 8
POLL_SHARE = 30  # asking takes at most one part in so many of the time

Submit = Callable[..., "Future[GenerateOutput]"]
ToTensors = Callable[[Sequence[GenerateOutput]], dict[str, torch.Tensor]]


def nothing() -> None:
    """What is done where nothing is to be done."""


class Answers:
    """The thread that answers, and the requests that it still owes something."""

    def __init__(self) -> None:
        self._notes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open: dict[Answer, None] = {}  # those asked about last come last
        self._thread = Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def note(self, work: Callable[[], None]) -> None:
        """Have the thread do `work`, in the order of the notes."""
        self._notes.put(work)

    def close(self) -> None:
        """Return when everything noted so far is done."""
        self._notes.put(None)
        self._thread.join()

    def opened(self, answer: Answer) -> None:
        self._open[answer] = None

    def closed(self, answer: Answer) -> None:
        self._open.pop(answer, None)

    def _run(self) -> None:
        next_poll = time.monotonic()
        while True:
            wait = max(0.0, next_poll - time.monotonic()) if self._open else None
            try:
                work = self._notes.get(timeout=wait)
            except Empty:
                work = nothing
            if work is None:
                return
            work()
            if self._open and time.monotonic() >= next_poll:
                next_poll = self._look_for_cancellation()

    def _look_for_cancellation(self) -> float:
        """Ask about a few clients; when to ask about the next ones."""
        started = time.monotonic()
        some = list(itertools.islice(self._open, POLLS_AT_ONCE))
        share = CANCEL_POLL_SECONDS * len(some) / len(self._open)
        for answer in some:
            self._open[answer] = self._open.pop(answer)
            answer.look_for_cancellation()
        ended = time.monotonic()
        return ended + max(share, POLL_SHARE * (ended - started))


class Answer:
    """One request's rows. After `start` everything happens on the thread of the answers.

    A streaming answer goes out as often as its longest row has tokens: the nth response holds the
    first n tokens of every row, or all of a row that ended before. An error is sent once, as the
    last response, and ends the request's other rows.
    """

    def __init__(
        self,
        answers: Answers,
        sender: Any,
        rows: Sequence[GenerateRequest],
        tensors: Mapping[str, torch.Tensor],
        wanted: set[str],
        to_tensors: ToTensors,
        *,
        streams: bool,
        forwarded: bool = False,
        seconds: float | None = None,
        on_end: Callable[[], None] = nothing,
    ) -> None:
        """forwarded: the request is a text model's, which takes its tokens as `news`
        seconds:   how long the answer may take, None: as long as it takes
        """
        self._answers = answers
        self._sender = sender
        self._rows = rows
        self._tensors = tensors
        self._wanted = wanted
        self._to_tensors = to_tensors
        self._streams = streams
        self._forwarded = forwarded
        self._on_end = on_end
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._futures: list[Future[GenerateOutput]] = []
        self._unsent: list[deque[Snapshot]] = [deque() for _ in rows]
        self._last: list[GenerateOutput | None] = [None] * len(rows)
        self._in_session = False
        self._sent = 0
        self._ended = False

    def start(self, submit: Submit, sessions: Sequence[Session] = ()) -> None:
        """Hand the rows to the engine, each with its session if there are any."""
        self._in_session = bool(sessions)
        self._futures = [
            submit(
                row,
                self._progress_of(number) if self._streams else None,
                sessions[number] if sessions else None,
            )
            for number, row in enumerate(self._rows)
        ]
        self._answers.note(self._open)
        for number, future in enumerate(self._futures):
            future.add_done_callback(self._end_of(number))

    def cancel(self) -> None:
        """Free the rows; the client gets an error. Any thread may ask for it."""
        self._answers.note(self._cancel)

    def _cancel(self) -> None:
        if not self._ended:
            self._end(_ended("CANCELLED", "the client cancelled the request"))

    def _open(self) -> None:
        if not self._ended:
            self._answers.opened(self)

    def look_for_cancellation(self) -> None:
        """Free the rows of a client that has gone, or that waits no longer."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._end(_ended("UNAVAILABLE", "the request's timeout is over"))
        elif self._sender.is_cancelled():
            self._cancel()

    def _progress_of(self, number: int) -> Progress:
        return lambda snapshot: self._answers.note(lambda: self._take(number, snapshot))

    def _end_of(self, number: int) -> Callable[[Future[GenerateOutput]], None]:
        return lambda future: self._answers.note(lambda: self._take_last(number, future))

    def _take(self, number: int, snapshot: Snapshot) -> None:
        if not self._ended:
            self._unsent[number].append(snapshot)
            self._send_ready()

    def _take_last(self, number: int, future: Future[GenerateOutput]) -> None:
        if self._ended:
            return
        error = future.exception()
        if error is not None:
            self._end(error_response(error))
            return
        self._last[number] = future.result()
        self._unsent[number].append(future.result)
        self._send_ready()

    def _send_ready(self) -> None:
        """Send as many responses as every row has come along for."""
        while not self._ended and self._everyone_has_more():
            rows = zip(self._unsent, self._last, strict=True)
            outputs = [unsent.popleft()() if unsent else last for unsent, last in rows]
            complete = not any(self._unsent) and None not in self._last
            try:
                response = self._response([output for output in outputs if output is not None])
            except Exception as error:  # the other requests go on
                traceback.print_exc()
                self._end(error_response(error))
                return
            self._sent += 1
            if complete:
                self._end(response)
            else:
                self._sender.send(response)

    def _everyone_has_more(self) -> bool:
        if not self._streams:
            return None not in self._last
        rows = zip(self._unsent, self._last, strict=True)
        return any(self._unsent) and all(unsent or last is not None for unsent, last in rows)

    def _response(self, outputs: Sequence[GenerateOutput]) -> Any:
        tensors = self._to_tensors(outputs)
        if "is_return_progress" in self._tensors:
            tensors.update(self._progress(outputs, tensors))
        if self._forwarded:
            tensors["news"] = news(tensors, self._progress(outputs, tensors))
        if self._in_session:
            tensors = {name: tensor[None] for name, tensor in tensors.items()}
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor.from_dlpack(name, torch.utils.dlpack.to_dlpack(tensor))
                for name, tensor in tensors.items()
                if name in self._wanted
            ]
        )

    def _progress(
        self, outputs: Sequence[GenerateOutput], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """How much of each row is news in this response, and whether that was all: [B, beam].

        Hypotheses of a beam search are news as a whole: others may have taken their places.
        """
        beams = tensors["output_ids"].shape[1]
        before = [
            0 if output.beams else min(self._sent, len(output.output_ids)) for output in outputs
        ]
        ended = [output is last for output, last in zip(outputs, self._last, strict=True)]
        progress = {
            "streamed_length": torch.tensor(
                [[count if self._streams else 0] * beams for count in before], dtype=torch.int32
            ),
            "is_finished": torch.tensor([[end] * beams for end in ended]),
        }
        if "response_input_lengths" in tensors:
            progress["text_start"] = tensors["response_input_lengths"].expand(-1, beams).clone()
            if "is_return_prompt" in self._tensors:
                progress["text_start"][self._tensors["is_return_prompt"].reshape(-1)] = 0
        return progress

    def _end(self, response: Any) -> None:
        """The last response; rows that still run are nobody's any more."""
        self._ended = True
        self._answers.closed(self)
        for future in self._futures:
            future.cancel()
        # The futures know this answer by their callbacks. In a circle it would keep its tensors,
        # which lie in the server's shared memory, until Python looks for circles.
        self._futures, self._unsent = [], []
        self._on_end()
        send_last(self._sender, response)


def error_response(error: BaseException) -> Any:
    """The request's own error; a wrong request is the client's, anything else the server's."""
    code = (
        pb_utils.TritonError.INVALID_ARG
        if isinstance(error, RequestError)
        else pb_utils.TritonError.INTERNAL
    )
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def send_last(sender: Any, response: Any) -> None:
    """The last response of a request."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _ended(code: str, why: str) -> Any:
    """The last response of a request that nobody waits for; code: an attribute of TritonError."""
    error = pb_utils.TritonError(why, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)
