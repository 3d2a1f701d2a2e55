"""Messages between rank 0 and the other ranks, over a pair of connected sockets.

Both ends are processes of one engine, and the sockets have no name that others could reach, so
the messages are pickles.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    pid: int
    host: str
    device: str


@dataclass(frozen=True)
class Loaded:
    """A rank has read its weights and goes to meet the others."""


@dataclass(frozen=True)
class Ready:
    """A rank waits for plans."""

    info: RankInfo


@dataclass(frozen=True)
class Beat:
    """A rank is alive."""


@dataclass(frozen=True)
class Failed:
    """A rank cannot go on."""

    reason: str


def send_message(connection: socket.socket, message: Any) -> None:
    body = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_message(connection: socket.socket) -> Any:
    """The next message; EOFError when the other end is gone."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return pickle.loads(_receive(connection, length))


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other rank closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
