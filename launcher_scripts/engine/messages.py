"""Messages between the processes of one engine: rank 0, other ranks, and hosts of other nodes.

Every message is a dataclass of the table MESSAGES, written by the codec; a connection carries
frames of a length, the message's number in the table, and its bytes.
"""

from __future__ import annotations

import importlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher_scripts.engine.codec import MOST_BYTES, decode, encode
from launcher_scripts.errors import ServerError

_FRAME = struct.Struct("!QH")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    pid: int
    host: str
    device: str


@dataclass(frozen=True)
class RankHello:
    """First words of a rank to rank 0."""

    rank: int
    pid: int
    host: str


@dataclass(frozen=True)
class NodeHello:
    """First words of the process that starts the ranks of another node."""

    node: int
    nodes: int
    pid: int
    host: str


@dataclass(frozen=True)
class StartRanks:
    """The ranks that a node is to start; none where the model needs fewer nodes."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Meet:
    """Every rank has its weights: they meet now, through the store at this address."""

    host: str
    port: int


@dataclass(frozen=True)
class Loaded:
    """A rank has read its weights and waits to meet the others."""


@dataclass(frozen=True)
class Ready:
    """A rank waits for plans."""

    info: RankInfo


@dataclass(frozen=True)
class Beat:
    """A sign of life, and what a rank is doing; see progress.py. A node's host leaves it empty.

    step:    the latest step that the rank has begun
    phase:   loading, waiting, computing, or the exchange that it is in
    ticks:   how many exchanges with other ranks it has begun
    quiet:   seconds since it last went from one thing to the next
    stretch: seconds that it computed before its latest exchange
    patience: seconds that what it is in may rightly take beyond the usual
    launched, finished, held, allowed: its device's steps; see device_steps.py
    alone:   seconds beyond the usual that it may compute while other stages wait for it
    """

    step: int = 0
    phase: str = "waiting"
    ticks: int = 0
    quiet: float = 0.0
    stretch: float = 0.0
    patience: float = 0.0
    launched: int = 0
    finished: int = 0
    held: float = 0.0
    allowed: float = 0.0
    alone: float = 0.0


@dataclass(frozen=True)
class Failed:
    """A rank cannot go on, or rank 0 turns somebody away."""

    reason: str


@dataclass(frozen=True)
class RankLost:
    """A node's host has lost one of its ranks."""

    rank: int
    reason: str


@dataclass(frozen=True)
class GroupLost:
    """Rank 0 has given up: some rank is lost."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """The engine is closing."""


# Each message and the module that has it. A module is imported when its message comes: a rank hears
# and speaks before it imports torch. The order is part of the protocol.
_HERE = "launcher_scripts.engine.messages"
MESSAGES = {
    "RankHello": _HERE,
    "NodeHello": _HERE,
    "StartRanks": _HERE,
    "RankSetup": "launcher_scripts.engine.loading",
    "Loaded": _HERE,
    "Meet": _HERE,
    "Ready": _HERE,
    "Beat": _HERE,
    "Plan": "launcher_scripts.engine.plan",
    "Stop": _HERE,
    "Failed": _HERE,
    "RankLost": _HERE,
    "GroupLost": _HERE,
}
_NUMBERS = {name: number for number, name in enumerate(MESSAGES)}


@cache
def _kind(number: int) -> type:
    name = list(MESSAGES)[number]
    kind: type = getattr(importlib.import_module(MESSAGES[name]), name)
    return kind


def pack_message(message: Any) -> bytes:
    """A message as one frame."""
    body = encode(type(message), message)
    return _FRAME.pack(len(body), _NUMBERS[type(message).__name__]) + body


class FrameReader:
    """Messages out of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. ServerError where it is none of ours."""
        self._data += data
        while len(self._data) >= _FRAME.size:
            length, number = _FRAME.unpack_from(self._data)
            if length > MOST_BYTES or number >= len(MESSAGES):
                raise ServerError(f"no message between ranks: {length} bytes of kind {number}")
            end = _FRAME.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_FRAME.size : end])
            del self._data[:end]
            yield decode(_kind(number), memoryview(body))


def read_available(connection: socket.socket) -> bytes:
    """What has arrived; EOFError when the other end is gone."""
    data = connection.recv(_CHUNK)
    if not data:
        raise EOFError("the other end closed the connection")
    return data
