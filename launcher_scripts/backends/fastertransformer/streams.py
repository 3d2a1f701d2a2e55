"""Streams that many requests share: of all rows of a client that have news, and of the requests
that text models of the same server send on.

Triton 24.10 does not hand a cancellation on to the requests that a model makes, keeps all their
responses until the last, loses errors among them, and two threads of a model that read responses
may lock each other indefinitely. So such a request is answered at once, with nothing, and what is
generated goes over a socket of the text model's, on which cancellations come back.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any, Protocol

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.answer import Answer, Answers, Submit, send_last
from launcher_scripts.backends.text_channel import FORWARDED, PEER, ChannelMessage
from launcher_scripts.common.errors import RequestError, problem
from launcher_scripts.common.processes import process_stat
from launcher_scripts.contract.requests import NO_STREAM, EndCode, PlainDelta, pack
from launcher_scripts.engine.core.session import Session

FINAL = 1  # Triton's flag of a last response


@dataclass(frozen=True)
class ForwardedRequest:
    """A text model's request, as the ID of the request that it sends on describes it.

    key:     the request's name on the channel
    channel: the socket of the text model
    streams: whether the text model wants tokens as they come
    """

    key: str
    channel: str
    streams: bool


def forwarded_request(request: Any) -> ForwardedRequest | None:
    """Return the text model's data from the ID, or None for any other request.

    Requests that models make have no parameters in servers before Triton 2.42 (24.01).
    """
    words = request.request_id().split()
    if len(words) != 4 or words[0] != FORWARDED:
        return None
    _, key, channel, streams = words
    return ForwardedRequest(key, channel, streams == "1")


class Cancellable(Protocol):
    """A request on its way."""

    def cancel(self) -> None: ...


class TextModelChannel:
    """A connection to one text model, and the requests that go out on it, by key."""

    def __init__(self, name: str) -> None:
        """Raises RequestError unless a process of the same server listens there."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(f"\0{name}")
            check_peer(connected)
        except OSError as error:
            connected.close()
            raise RequestError(f"the request's channel cannot be used: {error}") from error
        self.closed = False
        self._connection = Connection(connected.detach())
        self._writing = Lock()
        self._open: dict[str, Cancellable] = {}
        Thread(target=self._run, name="channel", daemon=True).start()

    def add(self, key: str, answer: Cancellable) -> None:
        self._open[key] = answer

    def remove(self, key: str) -> None:
        self._open.pop(key, None)

    def write(self, message: bytes) -> None:
        """Send a message; a text model that has gone gets none."""
        with self._writing:
            try:
                self._connection.send_bytes(message)
            except OSError:
                self.closed = True

    def _run(self) -> None:
        """Cancel what the text model says, and at its end all that is open."""
        try:
            while True:
                self._cancel(self._connection.recv_bytes().decode("ascii", "replace"))
        except (EOFError, OSError):
            self.closed = True
        with self._writing:
            self._connection.close()
        for key in list(self._open):
            self._cancel(key)

    def _cancel(self, key: str) -> None:
        answer = self._open.get(key)
        if answer is not None:
            answer.cancel()


class Channels:
    """The channels to the text models that have sent requests on."""

    def __init__(self) -> None:
        self._channels: dict[str, TextModelChannel] = {}

    def to(self, name: str) -> TextModelChannel:
        """The channel to the socket `name`. Raises RequestError."""
        for gone in [name for name, channel in self._channels.items() if channel.closed]:
            del self._channels[gone]
        if name not in self._channels:
            self._channels[name] = TextModelChannel(name)
        return self._channels[name]


def check_peer(connected: socket.socket) -> None:
    """Raises OSError unless the other end is a child of this process's parent, the server."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    process, user, _ = PEER.unpack(raw)
    if user != os.geteuid() or process_stat(process).parent != os.getppid():
        raise PermissionError("it is none of this server's models'")


class ChannelSender:
    """Takes the place of a request's response sender."""

    def __init__(
        self, channel: TextModelChannel, forwarded: ForwardedRequest, answer: Callable[[], None]
    ) -> None:
        """answer: answers the request itself, with nothing"""
        self.streams = forwarded.streams
        self._channel = channel
        self._key = forwarded.key
        self._answer: Callable[[], None] | None = answer

    def opened(self, answer: Cancellable) -> None:
        """Cancel `answer` when the text model says so."""
        self._channel.add(self._key, answer)

    def hand_over(self) -> None:
        """Answer the request itself, if it is not yet."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer()

    def send(self, response: Any = None, flags: int = 0) -> None:
        last = flags == FINAL
        error, tensors = None, {}
        if response is not None and response.has_error():
            error = response.error().message(), response.error().code().name
        elif response is not None:
            tensors = {
                tensor.name(): torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).numpy()
                for tensor in response.output_tensors()
            }
        self._channel.write(ChannelMessage(self._key, last, error, tensors).pack())
        if last:
            self._channel.remove(self._key)
            self.hand_over()

    def is_cancelled(self) -> bool:
        """The text model says so itself."""
        return False


# A stream without rows ends after this time, so that it does not hold up a server that stops.
IDLE_SECONDS = 5.0


class SharedStream:
    """The responses of one client's rows. Its thread is the one that sends all responses."""

    def __init__(self, answers: Answers, sender: Any) -> None:
        self._answers = answers
        self._sender = sender
        self._lock = Lock()  # of the count of rows
        self._rows = 0
        self._idle_since = time.monotonic()
        self._waiting: deque[SharedAnswer] = deque()  # rows that have news, some more than once
        self._queued = False  # whether the sending thread is about to look at them
        self.closed = False
        self._sending = Lock()
        answers.client_watch.watch(self)

    def enter(self) -> None:
        """Count a row. Raises RequestError when the stream has ended."""
        with self._lock:
            if self.closed:
                raise RequestError(NO_STREAM)
            self._rows += 1

    def leave(self) -> None:
        """A row has ended."""
        with self._lock:
            self._rows -= 1
            self._idle_since = time.monotonic()

    def put(self, row: SharedAnswer, *, urgent: bool) -> None:
        """Have the row's news sent; returns at once, and takes no lock for most tokens."""
        self._waiting.append(row)
        if urgent or not self._queued:
            self._queued = True
            self._answers.put(self, urgent=urgent)

    def send_deltas(self, *, flush_only: bool) -> None:  # noqa: ARG002
        """Send one response with the news of all rows that have any."""
        self._queued = False  # before the rows are taken: one that comes later queues the stream
        rows = dict.fromkeys([self._waiting.popleft() for _ in range(len(self._waiting))])
        deltas = {row: new for row in rows if (new := row.accept_deltas())}
        with self._sending:
            if deltas and not self.closed:
                self._sender.send(_response(deltas.values()))
        for row, (_, _, finished, _) in deltas.items():
            if finished:
                row.finish()

    def check_client(self) -> None:
        """End the stream when its client has gone, or when it has been idle for a while."""
        with self._sending:
            gone = not self.closed and self._sender.is_cancelled()
            with self._lock:
                idle = not self._rows and time.monotonic() - self._idle_since > IDLE_SECONDS
                if self.closed or not (idle or gone):
                    return
                self.closed = True
            send_last(self._sender, pb_utils.InferenceResponse([]))
        self._answers.client_watch.forget(self)


class SharedStreams:
    """The open streams by name."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._streams: dict[str, SharedStream] = {}

    def open(self, name: str, sender: Any) -> None:
        """Begin a stream; its first response holds nothing and says that it is there."""
        for gone in [name for name, stream in self._streams.items() if stream.closed]:
            del self._streams[gone]
        if name in self._streams:
            raise RequestError(problem("a shared stream of this name is open", got=name))
        sender.send(_response([]))
        self._streams[name] = SharedStream(self._answers, sender)

    def find(self, name: str) -> SharedStream:
        """Raises RequestError when there is none."""
        if name not in self._streams:
            raise RequestError(NO_STREAM)
        return self._streams[name]


class SharedAnswer(Answer):
    """One row whose tokens go out in a shared stream."""

    def __init__(self, stream: SharedStream, number: int, *args: Any, **more: Any) -> None:
        """number: the row's in the stream. Raises RequestError for more than one row or beam."""
        super().__init__(*args, **more)
        self._stream = stream
        self._number = number
        self._check()

    def start(self, submit: Submit, sessions: Sequence[Session] = ()) -> None:
        """See Answer. Raises RequestError when the stream has ended."""
        self._stream.enter()
        try:
            super().start(submit, sessions)
        except Exception:
            self._stream.leave()
            raise

    def accept_deltas(self) -> PlainDelta | None:
        """The tokens that came since the last call; None: nothing did."""
        if self._completed:
            return None
        last = self._last[0]
        if last is None:
            snapshot = self._snapshots[0]
            ids: Sequence[int] = snapshot.row.tokens[self._sent : snapshot.tokens]
            cached, code = snapshot.row.num_cached_tokens or 0, 0
        else:
            ids, cached = last.output_ids[self._sent :], last.num_cached_tokens
            code = EndCode.of(last.weights_versions).number
        if not ids and last is None:
            return None
        deltas = self._number, ids, code, 0 if self._sent else cached
        self._sent += len(ids)
        return deltas

    def finish(self) -> None:
        """End the row's own stream."""
        with self._sending:
            if not self._completed:
                self._end(pb_utils.InferenceResponse([]))

    def _notify(self, *, urgent: bool) -> None:
        if self._error is None:
            self._stream.put(self, urgent=urgent)
        else:
            super()._notify(urgent=urgent)

    def _end(self, response: Any) -> None:
        super()._end(response)
        self._stream.leave()

    def _check(self) -> None:
        beams = [row.sampling.beam_width for row in self._rows]
        if beams != [1] or self._requested != {"news"}:
            raise RequestError(
                problem(
                    "a shared stream takes requests of one row without beams that want `news`",
                    got=f"{len(beams)} rows of {beams} beams that want {sorted(self._requested)}",
                )
            )


def _response(rows: Iterable[PlainDelta]) -> Any:
    tensor = torch.from_numpy(pack(rows))
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor.from_dlpack("news", torch.utils.dlpack.to_dlpack(tensor))]
    )
