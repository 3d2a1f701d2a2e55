"""A node that does not serve: it joins rank 0 of each model and hosts the ranks it is told to.

Imports no torch: the ranks are processes of their own.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.hosts import NodeRank, node_name
from launcher_scripts.engine.distributed.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from launcher_scripts.engine.messages.message import (
    Decoder,
    Failed,
    GroupLost,
    Message,
    NodeHello,
    RankLost,
    StartRanks,
    Stop,
)
from launcher_scripts.engine.ranks.links import ADVICE, RendezvousInfo, connect, find_rendezvous
from launcher_scripts.engine.ranks.peers import RankOrder, RankProcess

POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
STOP_SECONDS = 10.0
SUSPENDED_SECONDS = 1.5  # a rank may be suspended this long without counting as lost
LEADER_SILENCE = 30.0  # rank 0 may be busy with its device while it loads
LINGER_SECONDS = 20.0  # the node that serves tells why and ends first
_MESSAGES = Decoder(StartRanks, Heartbeat, Stop, GroupLost, Failed)


class RankHost:
    """This node's ranks of one model. The thread that runs it must outlive them."""

    def __init__(
        self, node_rank: NodeRank, info: RendezvousInfo, folders: Sequence[Path | None] = ()
    ) -> None:
        """Join rank 0; raises ServerError where it cannot be reached.

        folders: of the shards of the model, and of its draft model, when not where rank 0 has them
        """
        token = bytes.fromhex(info.token)
        self._link = connect(info.addresses, info.port, token, CONNECT_SECONDS)
        self._link.send(
            NodeHello(node_rank.node, node_rank.nodes, os.getpid(), node_name(os.environ))
        )
        self._node_rank = node_rank
        self._info = info
        self._folders = [None if folder is None else str(folder) for folder in folders]
        self._ranks: list[RankProcess] = []
        self._suspended: dict[int, float] = {}
        self._reported: set[int] = set()
        self._end: str | None = None
        self._completed = False

    @property
    def model(self) -> str:
        return self._info.model

    def run(self) -> str | None:
        """Host the ranks until the model's engine ends: None in order, else the reason."""
        reported_at, heard = 0.0, time.monotonic()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link, selectors.EVENT_READ)
                while not self._completed:
                    if selector.select(POLL_SECONDS):
                        heard = time.monotonic()
                        self._hear(self._link.receive(_MESSAGES))
                    if time.monotonic() - heard > LEADER_SILENCE:
                        raise EOFError(f"no sign of life for {LEADER_SILENCE:g} s")
                    self._watch_ranks()
                    if time.monotonic() - reported_at > HEARTBEAT_SECONDS:
                        self._link.send(Heartbeat())
                        reported_at = time.monotonic()
        except (EOFError, OSError, ServerError) as error:
            self._finish(f"the connection to rank 0 ended: {error}")
        finally:
            self._end_ranks()
            self._link.close()
        return self._end

    def leave(self) -> None:
        """Have run() return soon, from any thread; rank 0 takes it for a loss."""
        self._link.close()

    def _hear(self, message: Message) -> None:
        if isinstance(message, StartRanks):
            rank0 = f"rank 0 at {self._link.other_host}:{self._info.port}"
            self._say(f"hosts ranks {list(message.ranks)} of model {self.model} for {rank0}")
            for rank in message.ranks:
                self._ranks.append(RankProcess(self._order(rank)))
        elif isinstance(message, Stop):
            self._say(f"model {self.model} is closed")
            self._finish(None)
        elif isinstance(message, GroupLost):
            self._finish(f"model {self.model} failed: {message.reason}")
        elif isinstance(message, Failed):
            self._finish(f"model {self.model} does not take this node: {message.reason}")

    def _order(self, rank: int) -> RankOrder:
        """Return the instructions of a rank, with the address by which this process reached
        rank 0."""
        return RankOrder(
            rank,
            (self._link.other_host,),
            self._info.port,
            self._info.token,
            *self._folders,
        )

    def _watch_ranks(self) -> None:
        """Tell rank 0, once, of each rank that has ended or is suspended."""
        for process in self._ranks:
            failure = process.failure()
            if failure is None:
                self._suspended.pop(process.rank, None)
                continue
            since = self._suspended.setdefault(process.rank, time.monotonic())
            lost = process.finished() or time.monotonic() - since > SUSPENDED_SECONDS
            if lost and process.rank not in self._reported:
                self._reported.add(process.rank)
                self._link.send(RankLost(process.rank, failure))

    def _finish(self, reason: str | None) -> None:
        if not self._completed:
            self._completed, self._end = True, reason

    def _end_ranks(self) -> None:
        """In order: each rank has been told itself. Otherwise at once."""
        deadline = time.monotonic() + (STOP_SECONDS if self._end is None else 0.0)
        for process in self._ranks:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()

    def _say(self, event: str) -> None:
        where = f"node {self._node_rank.node} of {self._node_rank.nodes} ({node_name(os.environ)})"
        print(f"{where}: {event}", flush=True)


class _Hosting:
    """A RankHost on a thread of its own."""

    def __init__(self, host: RankHost, attempt: int) -> None:
        self.host = host
        self.attempt = attempt
        self.reason: str | None = None
        self.thread = threading.Thread(target=self._run, name=f"ranks of {host.model}")
        self.thread.start()

    def _run(self) -> None:
        self.reason = self.host.run()
        if self.reason is not None:
            print(self.reason, flush=True)


class NodeHost:
    """All models' ranks of a node: joins every engine of the run, also after a restart.

    folders:  where rank 0 of a model leaves its address
    restarts: how often the server may be started again
    timeout:  seconds until a first or next engine must be there
    """

    def __init__(
        self, node_rank: NodeRank, folders: Sequence[Path], *, restarts: int = 0, timeout: float
    ) -> None:
        self._node_rank = node_rank
        self._folders = folders
        self._restarts = restarts
        self._timeout = timeout
        self._known: set[str] = set()
        self._hosted: list[_Hosting] = []
        self._refusals: dict[str, str] = {}

    def run(self, stopped: Callable[[], bool], stop_timeout: float) -> None:
        """Host ranks until every engine has ended in order, or `stopped` and they end.

        Raises ServerError when an engine is lost for good or none comes.
        """
        try:
            self._run(stopped, stop_timeout)
        finally:
            for hosting in self._hosted:
                hosting.host.leave()
            for hosting in self._hosted:
                hosting.thread.join()

    def _run(self, stopped: Callable[[], bool], stop_timeout: float) -> None:
        late = time.monotonic() + self._timeout
        linger: float | None = None
        while True:
            now = time.monotonic()
            self._join_new()
            if self._active():
                late = now + self._timeout
            elif stopped() or self._exited_in_order():
                return
            lost = self._lost_for_good()
            if lost is not None:
                linger = linger or now + LINGER_SECONDS
                if now > linger:
                    raise ServerError(lost)
            if stopped():
                self._timeout = min(self._timeout, stop_timeout)
                late = min(late, now + self._timeout)
            if now > late:
                if stopped():
                    return
                raise ServerError(self._nobody())
            time.sleep(POLL_SECONDS)

    def _active(self) -> bool:
        return any(hosting.thread.is_alive() for hosting in self._hosted)

    def _exited_in_order(self) -> bool:
        latest = max((hosting.attempt for hosting in self._hosted), default=None)
        return latest is not None and all(
            hosting.reason is None for hosting in self._hosted if hosting.attempt == latest
        )

    def _lost_for_good(self) -> str | None:
        for hosting in self._hosted:
            if hosting.reason is not None and hosting.attempt >= self._restarts:
                return hosting.reason
        return None

    def _join_new(self) -> None:
        for name, info in find_rendezvous(self._folders, self._node_rank.run).items():
            if name in self._known:
                continue
            try:
                host = RankHost(self._node_rank, info)
            except (ServerError, OSError) as error:
                self._refusals[name] = str(error)
                continue
            self._known.add(name)
            self._hosted.append(_Hosting(host, info.attempt))

    def _nobody(self) -> str:
        """Why nothing is hosted."""
        looked = ", ".join(map(str, self._folders))
        message = (
            f"node {self._node_rank.node} found no rank 0 within {self._timeout:g} s in {looked}"
        )
        return problem(message, got=list(self._refusals.values()) or "nothing", change=ADVICE)
