"""Requests that text models of the same server send on, and the channels that answer them.

Triton 24.10 does not hand a cancellation on to the requests that a model makes, keeps all their
responses until the last, loses errors among them, and two threads of a model that read responses
may lock each other indefinitely. So such a request is answered at once, with nothing, and what is
generated goes over a socket of the text model's, on which cancellations come back.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any, Protocol

import torch

from launcher_scripts.backends.text_channel import FORWARDED, PEER, ChannelMessage
from launcher_scripts.common.errors import RequestError
from launcher_scripts.common.processes import process_stat

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
