"""The socket on which token models send what they generate for this text model's requests.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What the id of a request begins with that goes on to a token model; then its key, the channel, and
# 1 where it streams.
FORWARDED = "launcher-errand"
PEER = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True)
class ChannelMessage:
    """A response of the token model.

    key:     which request it answers
    last:    no more will come
    error:   the message and the name of Triton's code, if it is one
    tensors: the outputs by name
    """

    key: str
    last: bool
    error: tuple[str, str] | None
    tensors: dict[str, NDArray[Any]]

    def pack(self) -> bytes:
        """As it is on the socket: UINT32, so many bytes of JSON, the tensors' values."""
        tensors = [(name, at.dtype.str, at.shape) for name, at in self.tensors.items()]
        header = {"key": self.key, "last": self.last, "error": self.error, "tensors": tensors}
        head = json.dumps(header).encode()
        values = [at.tobytes() for at in self.tensors.values()]
        return b"".join([struct.pack("<I", len(head)), head, *values])


class Channel:
    """Listens for token models, each in a thread of its own.

    name: of the socket, which is in no file system
    """

    def __init__(
        self, on_message: Callable[[ChannelMessage], None], lost: Callable[[], None]
    ) -> None:
        """on_message: called with every message; lost: called when a token model has gone"""
        self.name = f"launcher-text-{uuid.uuid4().hex}"
        self._take, self._lost = on_message, lost
        self._connections: list[Connection] = []
        self._writing = Lock()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen()
        Thread(target=self._accept, name="channel", daemon=True).start()

    def cancel(self, key: str) -> None:
        """Have the token model end a request."""
        with self._writing:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send_bytes(key.encode())

    def close(self) -> None:
        """Leave the token models, which cancel what is open."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._writing:
            for connection in self._connections:
                _hang_up(connection)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:  # closed
                return
            raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            if PEER.unpack(raw)[1] != os.geteuid():
                connected.close()
                continue
            connection = Connection(connected.detach())
            self._connections.append(connection)
            Thread(target=self._read, args=(connection,), name="channel", daemon=True).start()

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take(parse(connection.recv_bytes()))
        with self._writing:
            self._connections.remove(connection)
        connection.close()
        self._lost()


def _hang_up(connection: Connection) -> None:
    """End a connection that another thread reads from."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def parse(raw: bytes) -> ChannelMessage:
    """The message that was packed."""
    (length,) = struct.unpack_from("<I", raw)
    head = json.loads(raw[4 : 4 + length])
    offset = 4 + length
    tensors = {}
    for name, kind, shape in head["tensors"]:
        count = int(np.prod(shape, dtype=np.int64))
        values = np.frombuffer(raw, np.dtype(kind), count, offset)
        tensors[name] = values.reshape(shape)
        offset += values.nbytes
    error = head.get("error")
    return ChannelMessage(
        head["key"], head["last"], None if error is None else tuple(error), tensors
    )
