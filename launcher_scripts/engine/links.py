"""Connections between the processes of an engine: both ends prove that they know its token.

The token is random and never sent: each end answers the other's random challenge with an HMAC
over both. Until then nothing that comes in is interpreted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from launcher_scripts.engine.messages import FrameReader, pack_message, read_available
from launcher_scripts.errors import ServerError

TOKEN_BYTES = 32
PROVE_SECONDS = 10.0
_CHALLENGE_BYTES = 32
_MOST_UNPROVEN = 64


class Link:
    """A proven connection. Any thread may send; one reads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._waiting: list[Any] = []

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def other_host(self) -> str:
        """Address of the other end."""
        return str(self._connection.getpeername()[0])

    @property
    def own_host(self) -> str:
        """This end's address."""
        return str(self._connection.getsockname()[0])

    def send(self, message: object) -> None:
        frame = pack_message(message)
        with self._lock:
            self._connection.sendall(frame)

    def receive(self) -> Any:
        """The next message; EOFError when the other end is gone."""
        while not self._waiting:
            self._waiting.extend(self.arrived())
        return self._waiting.pop(0)

    def arrived(self) -> Iterator[Any]:
        """The messages that one read completes; it does not block once the socket is readable."""
        return self._reader.feed(read_available(self._connection))

    def close(self) -> None:
        """End the connection, also for a thread that is in the middle of sending."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Listener:
    """Accepts connections on a thread of its own and hands on those that prove the token."""

    def __init__(self, host: str, token: bytes, on_link: Callable[[Link], None]) -> None:
        self._token = token
        self._on_link = on_link
        self._unproven = threading.Semaphore(_MOST_UNPROVEN)
        self._server = socket.create_server((host, 0), backlog=128)
        threading.Thread(target=self._accept, name="rank-connections", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._unproven.acquire()
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            with _closed_on_error(connection):
                prove(connection, self._token, accepting=True)
        except (OSError, EOFError, ServerError):
            return
        finally:
            self._unproven.release()
        self._on_link(Link(connection))


def connect(addresses: Sequence[str], port: int, token: bytes, timeout: float) -> Link:
    """A link to the first of `addresses` that answers and knows the token.

    Raises ServerError with what each of them said.
    """
    said = []
    deadline = time.monotonic() + timeout
    for address in addresses:
        left = max(0.5, (deadline - time.monotonic()) / 2)
        try:
            connection = socket.create_connection((address, port), left)
            with _closed_on_error(connection):
                prove(connection, token, accepting=False)
            return Link(connection)
        except (OSError, EOFError, ServerError) as error:
            said.append(f"{address}:{port}: {error}")
    raise ServerError(f"no connection to rank 0: {'; '.join(said)}")


def prove(connection: socket.socket, token: bytes, *, accepting: bool) -> None:
    """Challenge the other end and answer its challenge; ServerError where its answer is wrong."""
    connection.settimeout(PROVE_SECONDS)
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(own)
    other = _exactly(connection, _CHALLENGE_BYTES)
    first, second = (own, other) if accepting else (other, own)
    answers = [
        hmac.digest(token, side + first + second, hashlib.sha256)
        for side in (b"accepting", b"connecting")
    ]
    ours, theirs = answers if accepting else answers[::-1]
    if accepting:  # the end that connects proves itself first
        _check(connection, theirs)
        connection.sendall(ours)
    else:
        connection.sendall(ours)
        _check(connection, theirs)


def _check(connection: socket.socket, wanted: bytes) -> None:
    if not hmac.compare_digest(_exactly(connection, len(wanted)), wanted):
        raise ServerError("the other end does not know this engine's token")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the other end closed the connection before it proved itself")
        data += part
    return data


class _closed_on_error:
    """Closes a connection when the block raises."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._connection.close()
