"""Links between the processes of an engine: how they find each other and prove their token.

How the nodes of one server find rank 0 of each model: a small file in a folder that all see.

It holds rank 0's addresses, port and the secret token, is readable by its owner alone, and is named
after the run, so that servers side by side never meet. No name service is needed.

Connections between the processes of an engine: both ends prove that they know its token.

multiprocessing's Connection carries the bytes and bounds a message before it is read. Its own
authentication uses HMAC-MD5 in Python 3.10 and 3.11, which systems in FIPS mode refuse, and the
answers of both ends look alike: somebody on rank 0's port could pass one rank's challenge to
another rank. So the proof is our own. The token is random and never sent: each end answers with an
HMAC over both challenges and its role. Nothing else is read before that.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.hosts import RENDEZVOUS_VARIABLE, SINGLE_NODE, NodeRank
from launcher_scripts.engine.messages.message import Decoder, Message, encode


@dataclass(frozen=True)
class NodeGroup:
    """The other nodes of an engine on node 0.

    node_rank: this process among them
    model:     the model's name, by which the others know what they join
    folders:   where rank 0 leaves its address
    interface: name or network of the interface that the ranks' connections use; None: any
    attempt:   how often the server was started again before
    """

    node_rank: NodeRank = SINGLE_NODE
    model: str = ""
    folders: tuple[Path, ...] = ()
    interface: str | None = None
    attempt: int = 0


ONE_NODE = NodeGroup()


ADVICE = f"the environment: {RENDEZVOUS_VARIABLE}=<a folder that all nodes see>"
_FOLDER = ".launcher"


class RendezvousInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of rank 0 of one model for the other nodes.

    attempt: how often the server was started again before
    """

    model: str
    addresses: tuple[str, ...]
    port: int
    token: str
    attempt: int = 0


def rendezvous_folders(env: Mapping[str, str], model_dir: Path) -> tuple[Path, ...]:
    """Folders that all nodes may see: the one that was named, else the model's and the home."""
    if RENDEZVOUS_VARIABLE in env:
        return (Path(env[RENDEZVOUS_VARIABLE]),)
    homes = [Path(env["HOME"])] if "HOME" in env else []
    return tuple(folder / _FOLDER for folder in (model_dir, *homes))


class RendezvousFile:
    """A RendezvousInfo in every folder that can be written, until it is withdrawn."""

    def __init__(self, folders: Sequence[Path], run: str, info: RendezvousInfo) -> None:
        """Raises ServerError where no folder can be written."""
        self._files: list[Path] = []
        name = f"{_prefix(run)}{secrets.token_hex(8)}.json"
        reasons = []
        for folder in folders:
            try:
                self._files.append(_write(folder, name, msgspec.json.encode(info)))
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
        if not self._files:
            message = "no folder to tell the other nodes where rank 0 is: " + "; ".join(reasons)
            raise ServerError(problem(message, change=ADVICE))

    def withdraw(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
            if path.parent.name == _FOLDER:
                with suppress(OSError):  # somebody else's files are still there
                    path.parent.rmdir()


def find_rendezvous(folders: Sequence[Path], run: str) -> dict[str, RendezvousInfo]:
    """name of the file -> what it holds, of this run; the files of other users do not count."""
    result = {}
    for folder in folders:
        for path in folder.glob(f"{_prefix(run)}*.json"):
            with suppress(OSError, ValueError):
                if path.stat().st_uid == os.geteuid():
                    result[path.name] = msgspec.json.decode(path.read_bytes(), type=RendezvousInfo)
    return result


def _prefix(run: str) -> str:
    return f"ranks-{run}-"


def _write(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = folder / f"{name}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return partial.replace(folder / name)


TOKEN_BYTES = 32
PROVE_SECONDS = 10.0
MAX_BYTES = (1 << 31) - 1
REMAINDER_SECONDS = (
    1  # that the rest of a message to rank 0 may take; a small one comes in one piece
)
_CHALLENGE_BYTES = 32
_MAX_UNPROVEN = 64


class Link:
    """A proven connection. Any thread may send; one reads."""

    def __init__(self, connection: socket.socket, token: bytes, *, accepting: bool) -> None:
        """Prove both ends to each other. `connection` is closed with the link.

        Raises ServerError where the other end gives a wrong answer, OSError or EOFError where it
        gives none within PROVE_SECONDS.
        """
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._connection = Connection(socket.dup(connection.fileno()))
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        overdue = threading.Timer(PROVE_SECONDS, self._shut_down)
        overdue.daemon = True
        overdue.start()
        try:
            _prove(self._connection, token, accepting)
        except BaseException:
            self.close()
            raise
        finally:
            overdue.cancel()
        if accepting:  # one thread of rank 0 reads for all
            limit = struct.pack("ll", REMAINDER_SECONDS, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def other_host(self) -> str:
        """Address of the other end."""
        return str(self._socket.getpeername()[0])

    @property
    def local_host(self) -> str:
        """This end's address."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that is encoded already."""
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self, decoder: Decoder) -> Any:
        """The next message, which does not block once the link is readable.

        Raises EOFError when the other end is gone, ServerError when it sends anything else.
        """
        try:
            with self._receiving:
                data = self._connection.recv_bytes(MAX_BYTES)
        except (EOFError, OSError) as error:
            raise EOFError(str(error) or "the other end closed the connection") from error
        return decoder.decode(data)

    def close(self) -> None:
        """End the connection, also for threads that are in the middle of sending or receiving."""
        self._shut_down()
        with self._sending, self._receiving:
            self._connection.close()
            self._socket.close()

    def _shut_down(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Listener:
    """Accepts connections on a thread of its own and hands on those that prove the token."""

    def __init__(self, host: str, token: bytes, on_link: Callable[[Link], None]) -> None:
        self._token = token
        self._on_link = on_link
        self._unproven = threading.Semaphore(_MAX_UNPROVEN)
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
            link = Link(connection, self._token, accepting=True)
        except (OSError, EOFError, ServerError):
            return
        finally:
            self._unproven.release()
        self._on_link(link)


def connect(addresses: Sequence[str], port: int, token: bytes, timeout: float) -> Link:
    """A link to the first of `addresses` that answers and knows the token.

    Raises ServerError with what each of them said.
    """
    reasons = []
    deadline = time.monotonic() + timeout
    for address in addresses:
        left = max(0.5, (deadline - time.monotonic()) / 2)
        try:
            connection = socket.create_connection((address, port), left)
            return Link(connection, token, accepting=False)
        except (OSError, EOFError, ServerError) as error:
            reasons.append(f"{address}:{port}: {str(error) or 'it proved nothing'}")
    raise ServerError(f"no connection to rank 0: {'; '.join(reasons)}")


def _prove(connection: Connection, token: bytes, accepting: bool) -> None:
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.send_bytes(challenge)
    other = connection.recv_bytes(_CHALLENGE_BYTES)
    if len(other) != _CHALLENGE_BYTES:
        raise ServerError("the other end does not speak as the processes of an engine do")
    challenges = challenge + other if accepting else other + challenge
    local_proof, remote_proof = (
        hmac.digest(token, role + challenges, "sha256")
        for role in ((b"accepting", b"connecting") if accepting else (b"connecting", b"accepting"))
    )
    if not accepting:  # the end that connects proves itself first
        connection.send_bytes(local_proof)
    if not hmac.compare_digest(connection.recv_bytes(len(remote_proof)), remote_proof):
        raise ServerError("the other end does not know this engine's token")
    if accepting:
        connection.send_bytes(local_proof)
