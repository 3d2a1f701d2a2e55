"""The other ranks and the other nodes' hosts, each as rank 0 knows it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from launcher_scripts.common.processes import (
    PRIVATE,
    Activity,
    is_suspended,
    signal_when_parent_dies,
    this_environment,
    this_python,
)
from launcher_scripts.engine.distributed.heartbeat import HEARTBEAT_SECONDS, LOADING, Heartbeat
from launcher_scripts.engine.messages.message import (
    Decoder,
    Failed,
    Loaded,
    Message,
    NodeHello,
    OperationReply,
    RankHello,
    RankInfo,
    RankLost,
    Ready,
    encode,
)
from launcher_scripts.engine.ranks.links import Link

WORKER = "launcher_scripts.engine.ranks.worker"


@dataclass(frozen=True)
class RankOrder:
    """Instructions of a rank's process on its standard input: the address of rank 0, and its rank.

    checkpoint_dir, draft_checkpoint_dir: where this node has the shards of the model and of its
    draft model, when not where rank 0 has them
    """

    rank: int
    addresses: tuple[str, ...]
    port: int
    token: str
    checkpoint_dir: str | None = None
    draft_checkpoint_dir: str | None = None


class RankProcess:
    """One rank; the thread that starts it must outlive it, since it ends with that thread."""

    def __init__(self, order: RankOrder) -> None:
        self.rank = order.rank
        self._process = subprocess.Popen(
            [this_python(), "-m", WORKER, "--parent", str(os.getpid())],
            env=this_environment(),
            stdin=subprocess.PIPE,
            umask=PRIVATE,
        )
        self._activity = Activity(self._process.pid)
        # The token is in nobody's command line or environment.
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(json.dumps(asdict(order)).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def failure(self) -> str | None:
        """Why the rank cannot go on; None while it runs."""
        code = self._process.poll()
        if code is None:
            return "is stopped (SIGSTOP)" if is_suspended(self.pid) else None
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def works(self) -> bool:
        """Return whether it gets on; see Activity."""
        return self._activity.works()

    def finished(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout: float) -> bool:
        """Return whether the rank ends within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


# Importing torch and opening a device hold up the signs of life.
LOADING_SILENCE = 30.0
NODE_SILENCE = 4.0
GRACE_SECONDS = 1.5  # the end of a process and the last words of it come separately


class Peer:
    """Somebody at the other end of a link, once it is there. messages: what they may send."""

    messages: Decoder

    def __init__(self, name: str) -> None:
        self.label = name
        self.link: Link | None = None
        self.last_seen = time.monotonic()
        self._closed_at: float | None = None

    def closed(self) -> None:
        """Its end of the connection is gone."""
        self._closed_at = time.monotonic()
        self.disconnect()

    def closed_for(self) -> float:
        """Seconds since the connection ended; 0 while it lasts."""
        return 0.0 if self._closed_at is None else time.monotonic() - self._closed_at

    def silence(self) -> float:
        return time.monotonic() - self.last_seen

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        if self.link is None:
            raise ConnectionError(f"{self.label} is not connected")
        self.link.send_bytes(data)

    def try_send(self, message: Message) -> None:
        with suppress(OSError):
            self.send(message)

    def disconnect(self) -> None:
        if self.link is not None:
            self.link.close()

    def end(self) -> None:
        """Have it end at once: who loses rank 0 ends."""
        self.disconnect()


class Rank(Peer):
    """A rank other than 0; `process` is set where it runs on this node."""

    messages = Decoder(Heartbeat, Loaded, Ready, OperationReply, Failed)

    def __init__(self, rank: int, node: int, several_nodes: bool) -> None:
        self.rank = rank
        self.node = node
        self.process: RankProcess | None = None
        self.info: RankInfo | None = None
        self.heartbeat = Heartbeat(phase=LOADING)
        self._where = f" on node {node}" if several_nodes else ""
        self._failing_since: float | None = None
        self._worked = -math.inf  # when its process was last seen at work
        super().__init__(f"rank {rank}{self._where}")

    def joins(self, link: Link, hello: RankHello) -> None:
        host = f"{hello.host}, " if self._where else ""
        self.label = f"rank {self.rank}{self._where} ({host}pid {hello.pid})"
        self.link = link

    def failure(self, stall_timeout: float, working: float) -> str | None:
        """Why the rank counts as lost, and what it was doing; None while it is well.

        working: seconds more without a sign of life while its process here gets on
        """
        failure = self._failure(stall_timeout, working)
        return None if failure is None else f"{self.label} {failure} while {self.heartbeat.doing()}"

    def _failure(self, stall_timeout: float, working: float) -> str | None:
        if self.process is not None:
            failure = self.process.failure()
            if failure is None:
                self._failing_since = None
            else:
                self._failing_since = self._failing_since or time.monotonic()
                has_sent_all = self.link is None or self.closed_for() > 0
                if has_sent_all or time.monotonic() - self._failing_since > GRACE_SECONDS:
                    return failure
        if self.closed_for() > GRACE_SECONDS:
            return "closed its connection"
        if self.link is None:
            return None
        limit = max(stall_timeout, LOADING_SILENCE if self.heartbeat.phase == LOADING else 0.0)
        if self.process is not None and self.process.works():
            self._worked = time.monotonic()
        if time.monotonic() - self._worked <= limit:
            limit += working
        if self.silence() > limit:
            return f"gave no sign of life for {self.silence():.0f} s"
        return None

    def wait(self, timeout: float) -> None:
        """Wait for the rank's end, where this node can see it."""
        if self.process is not None:
            self.process.wait(timeout)

    def end(self) -> None:
        super().end()
        if self.process is not None:
            self.process.kill()


class Node(Peer):
    """The process that starts the ranks of another node."""

    messages = Decoder(Heartbeat, RankLost)

    def __init__(self, link: Link, hello: NodeHello, ranks: tuple[int, ...]) -> None:
        super().__init__(f"node {hello.node} ({hello.host}, pid {hello.pid})")
        self.link = link
        self.ranks = ranks
        self._sent_at = 0.0

    def hear_of_us(self) -> None:
        """Give it a sign of life, now and then."""
        if time.monotonic() - self._sent_at > HEARTBEAT_SECONDS:
            self._sent_at = time.monotonic()
            self.try_send(Heartbeat())

    def failure(self) -> str | None:
        """Why the node counts as lost; None while it is well."""
        holds = f", with rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        if self.closed_for() > 0:
            return f"{self.label} closed its connection{holds}"
        if self.silence() > NODE_SILENCE:
            return f"{self.label} gave no sign of life for {self.silence():.0f} s{holds}"
        return None


@dataclass
class PendingConnection:
    """A connection, and who is at its other end once that is known."""

    link: Link
    peer: Peer | None = None
    gone: bool = False
