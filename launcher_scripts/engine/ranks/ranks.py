"""All ranks of one engine from the side of rank 0: brought together, told, and taken apart."""

from __future__ import annotations

import secrets
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch
from torch.distributed import TCPStore

from launcher_scripts.common.errors import ServerError
from launcher_scripts.engine.distributed.communicator import (
    LOOPBACK,
    Communicator,
    ProcessGroupCommunicator,
    close_store,
    listening_address,
    open_store,
    published_addresses,
)
from launcher_scripts.engine.distributed.heartbeat import (
    EXCHANGE_SECONDS,
    WORKING_SECONDS,
    Heartbeat,
    RankProgress,
    Watchdog,
)
from launcher_scripts.engine.messages.message import (
    Decoder,
    Failed,
    GroupLost,
    Loaded,
    Meet,
    Message,
    NodeHello,
    OperationReply,
    OperationRequest,
    RankHello,
    RankInfo,
    RankLost,
    Ready,
    StartRanks,
    Stop,
    encode,
)
from launcher_scripts.engine.ranks.links import (
    TOKEN_BYTES,
    Link,
    Listener,
    NodeGroup,
    RendezvousFile,
    RendezvousInfo,
)
from launcher_scripts.engine.ranks.peers import (
    Node,
    Peer,
    PendingConnection,
    Rank,
    RankOrder,
    RankProcess,
)
from launcher_scripts.engine.runner.loading import EngineSettings, RankSetup, Timeline, rank_info

POLL_SECONDS = 0.2
DELAY_SECONDS = 1.0  # that the watching itself comes late, as when a node was suspended
STOP_SECONDS = 10.0
_HELLO = Decoder(RankHello, NodeHello)


class WorkerGroup:
    """Ranks 1 and up, each a process with one connection for plans and signs of life.

    One thread starts those of this node, lets the others join, and watches all of them until the
    group is closed. Its life is that of this node's ranks: a rank asks the kernel to be killed
    when the thread that started it ends.
    """

    def __init__(
        self,
        settings: EngineSettings,
        group: NodeGroup,
        progress: RankProgress,
        on_failure: Callable[[ServerError], None],
        on_reply: Callable[[int, OperationReply], None],
    ) -> None:
        """Raises ServerError where no address or no folder serves to meet other nodes."""
        self._settings = settings
        self._group = group
        self._progress = progress
        self._on_failure, self._on_reply = on_failure, on_reply
        self._watchdog = Watchdog(settings.parallelism, EXCHANGE_SECONDS[settings.device_type])
        # A host that waits for its device may look busy.
        self._working = WORKING_SECONDS if settings.device_type == "cpu" else 0.0
        self._ranks = {
            rank: Rank(rank, node, settings.nodes > 1)
            for node in range(settings.nodes)
            for rank in settings.ranks_of_node(node)
            if rank != 0
        }
        self._hosts: dict[int, Node] = {}
        self._arrivals: SimpleQueue[Link] = SimpleQueue()
        self._arrived: dict[type, set[int]] = {Loaded: set(), Ready: set()}
        self._events = threading.Condition()
        self._failed = False
        self._closing = threading.Event()
        self._sent = 0
        self._sent_at = time.monotonic()
        token = secrets.token_bytes(TOKEN_BYTES)
        self.host = listening_address(group.interface) if group.node_rank.nodes > 1 else LOOPBACK
        self._listener = Listener(self.host, token, self._arrivals.put)
        addresses = published_addresses(self.host)
        self._orders = {
            rank: RankOrder(rank, addresses, self._listener.port, token.hex())
            for rank in self._ranks
        }
        self._rendezvous: RendezvousFile | None = None
        if group.node_rank.nodes > 1:
            info = RendezvousInfo(
                group.model, addresses, self._listener.port, token.hex(), group.attempt
            )
            self._rendezvous = RendezvousFile(group.folders, group.node_rank.run, info)
        self._thread = threading.Thread(target=self._watch, name="engine-workers", daemon=True)
        self._thread.start()

    @property
    def infos(self) -> list[RankInfo]:
        return [rank.info for rank in self._ranks.values() if rank.info is not None]

    @property
    def meeting_host(self) -> str:
        """This node's address as the ranks of other nodes reach it."""
        for rank in self._ranks.values():
            if rank.node != 0 and rank.link is not None:
                return rank.link.local_host
        return LOOPBACK

    def wait_for(self, message: type, timeout: float) -> bool:
        """Return whether every rank sends `message` (Loaded or Ready) within `timeout` seconds.

        False at once when a rank fails.
        """
        with self._events:
            self._events.wait_for(
                lambda: self._failed or len(self._arrived[message]) == len(self._ranks), timeout
            )
            complete = not self._failed and len(self._arrived[message]) == len(self._ranks)
        if complete and message is Ready and len(self._hosts) == self._group.node_rank.nodes - 1:
            self._listener.close()
        return complete

    def missing(self) -> str:
        """Who is still awaited, in words."""
        late = [rank for rank in self._ranks.values() if rank.rank not in self._arrived[Ready]]
        away = [rank.label for rank in late if rank.link is None]
        here = [rank.label for rank in late if rank.link is not None]
        groups = (f"never joined: {', '.join(away)}", f"not ready: {', '.join(here)}")
        return "; ".join(text for text, of in zip(groups, (away, here), strict=True) if of)

    def meet(self, port: int) -> None:
        """Tell every rank where all meet."""
        self._tell(Meet(self.meeting_host, port))

    def send(self, plan: Message) -> None:
        """Tell every rank the next step, in order."""
        self._tell(plan)
        self._sent_at = time.monotonic()
        self._sent += 1

    def request(self, request: OperationRequest) -> None:
        """Tell every rank an action of an operation that is beside its steps; those that are lost
        are noticed otherwise.
        """
        for rank in self._ranks.values():
            rank.try_send(request)

    def label(self, rank: int) -> str:
        """Return the name of a rank for messages."""
        return self._ranks[rank].label

    def dismiss(self) -> None:
        """Tell everyone to end; from now on one that ends is no failure."""
        if not self._closing.is_set():
            self._closing.set()
            for peer in self._peers():
                peer.try_send(Stop())

    def close(self) -> None:
        """End every rank: told first, then killed."""
        self.dismiss()
        deadline = time.monotonic() + STOP_SECONDS
        for rank in self._ranks.values():
            rank.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        self._thread.join(STOP_SECONDS)

    def kill(self) -> None:
        """End every rank at once; for a group that failed."""
        self._closing.set()
        self._listener.close()
        self._withdraw()
        for peer in self._peers():
            peer.end()

    def _withdraw(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.withdraw()

    def _peers(self) -> list[Peer]:
        return [*self._ranks.values(), *self._hosts.values()]

    def _tell(self, message: Message) -> None:
        data = encode(message)
        for rank in self._ranks.values():
            rank.send_bytes(data)

    def _watch(self) -> None:
        try:
            for number in self._settings.ranks_of_node(0)[1:]:
                self._ranks[number].process = RankProcess(self._orders[number])
        except OSError as error:
            self._abort(f"cannot start the other ranks: {error}")
            return
        failure = self._until_failure()
        if failure is not None and not self._closing.is_set():
            self._abort(failure)
        self._closing.wait()
        for rank in self._ranks.values():
            rank.wait(2 * STOP_SECONDS)

    def _abort(self, reason: str) -> None:
        self._withdraw()
        for host in self._hosts.values():
            host.try_send(GroupLost(reason))
        self._on_failure(ServerError(reason))
        with self._events:
            self._failed = True
            self._events.notify_all()
        for rank in self._ranks.values():
            rank.disconnect()  # rank 0 may be in the middle of telling it something

    def _until_failure(self) -> str | None:
        """Read signs of life until a rank is lost (the reason) or the group closes (None)."""
        now = patient_until = time.monotonic()
        with selectors.DefaultSelector() as selector:
            while not self._closing.is_set():
                while not self._arrivals.empty():
                    link = self._arrivals.get()
                    selector.register(link, selectors.EVENT_READ, PendingConnection(link))
                for key, _ in selector.select(POLL_SECONDS):
                    failure = self._read(key.data)
                    if failure is not None:
                        return failure
                    if key.data.gone:
                        selector.unregister(key.fileobj)
                before, now = now, time.monotonic()
                if now - before > POLL_SECONDS + DELAY_SECONDS:
                    patient_until = now + self._settings.stall_timeout
                failure = self._check(patient=now < patient_until)
                if failure is not None:
                    return failure
        return None

    def _read(self, pending: PendingConnection) -> str | None:
        """Take a message; the reason when that says that a rank is lost."""
        peer = pending.peer
        try:
            if peer is not None:
                return self._hear(peer, pending.link.receive(peer.messages))
            pending.peer = self._admit(pending.link)
            pending.gone = pending.peer is None
        except (EOFError, OSError):
            pending.gone = True
            if peer is not None:
                peer.closed()
        except ServerError as error:
            return f"{peer.label}: {error}" if peer is not None else str(error)
        return None

    def _hear(self, peer: Peer, message: Message) -> str | None:
        peer.last_seen = time.monotonic()
        if isinstance(message, RankLost):
            lost = self._ranks[message.rank]
            return f"{lost.label} {message.reason} while {lost.heartbeat.doing()}"
        if isinstance(message, Failed):
            return f"{peer.label}: {message.reason}"
        if isinstance(peer, Rank):
            if isinstance(message, Heartbeat):
                peer.heartbeat = message
            if isinstance(message, Ready):
                peer.info = message.info
            if isinstance(message, OperationReply):
                self._on_reply(peer.rank, message)
            if type(message) in self._arrived:
                with self._events:
                    self._arrived[type(message)].add(peer.rank)
                    self._events.notify_all()
        return None

    def _admit(self, link: Link) -> Peer | None:
        """Who it is that came; None for an unexpected connection, which is told so."""
        try:
            hello = link.receive(_HELLO)
        except ServerError as error:
            refusal = str(error)
        else:
            if isinstance(hello, RankHello) and hello.rank in self._ranks:
                rank = self._ranks[hello.rank]
                if rank.link is None:
                    rank.joins(link, hello)
                    link.send(RankSetup(self._settings))
                    return rank
            if isinstance(hello, NodeHello) and self._awaits(hello):
                return self._admit_node(link, hello)
            refusal = f"unexpected connection from {hello}"
        with suppress(OSError):
            link.send(Failed(refusal))
        link.close()
        return None

    def _admit_node(self, link: Link, hello: NodeHello) -> Node:
        ranks = tuple(rank.rank for rank in self._ranks.values() if rank.node == hello.node)
        host = self._hosts[hello.node] = Node(link, hello, ranks)
        link.send(StartRanks(ranks))
        print(f"model {self._group.model}: {host.label} joins with ranks {list(ranks)}", flush=True)
        return host

    def _awaits(self, hello: NodeHello) -> bool:
        nodes = self._group.node_rank.nodes
        return hello.nodes == nodes and 0 < hello.node < nodes and hello.node not in self._hosts

    def _check(self, patient: bool) -> str | None:
        """Why a rank or a node counts as lost. patient: the others may have been held up, too."""
        for host in self._hosts.values():
            host.hear_of_us()
        # Asked while patient, too: a device's time at a step is counted from when the step before
        # was seen to end.
        try:
            local_heartbeat = self._progress.heartbeat()
        except ServerError as error:
            return f"rank 0: {error}"
        if patient:
            return None
        for host in self._hosts.values():
            failure = host.failure()
            if failure is not None:
                return failure
        for rank in self._ranks.values():
            failure = rank.failure(self._settings.stall_timeout, self._working)
            if failure is not None:
                return failure
        heartbeats = {0: local_heartbeat, **{r.rank: r.heartbeat for r in self._ranks.values()}}
        stuck = self._watchdog.stuck(heartbeats, self._sent, time.monotonic() - self._sent_at)
        names = [self._ranks[number].label if number else "rank 0" for number in stuck]
        reasons = [f"{name} {reason}" for name, reason in zip(names, stuck.values(), strict=True)]
        return "; ".join(reasons) or None


NAMING_SECONDS = 3.0
_POLL_SECONDS = 0.1


class Ranks:
    """Rank 0's own progress, the other ranks if there are any, and how they exchange tensors."""

    def __init__(
        self,
        settings: EngineSettings,
        on_failure: Callable[[ServerError], None],
        on_reply: Callable[[int, OperationReply], None],
    ) -> None:
        """on_reply: gets what the other ranks reply to requests"""
        self.progress = RankProgress()
        self.timeline = Timeline()
        self.infos: list[RankInfo] = []
        self._settings = settings
        self._failure: ServerError | None = None
        self._on_failure = on_failure
        self._on_reply = on_reply
        self._workers: WorkerGroup | None = None
        self._store: TCPStore | None = None
        self._communicator: Communicator | None = None

    def start(self, group: NodeGroup) -> None:
        """Start the other ranks of this node, let other nodes join, and open the meeting place."""
        several = self._settings.parallelism.world_size > 1
        if several or group.node_rank.nodes > 1:
            self._workers = WorkerGroup(
                self._settings, group, self.progress, self._lost, self._on_reply
            )
        if self._workers is not None and several:
            self._store = open_store(self._workers.host, self._settings.start_timeout)

    def meet(self, device: torch.device) -> Communicator:
        """Join the other ranks once all have read their weights."""
        if self._store is None or self._workers is None:
            return Communicator()
        self._await(Loaded)
        self.timeline.note("all ranks have their weights")
        self._workers.meet(self._store.port)
        self._communicator = ProcessGroupCommunicator(
            self._settings.parallelism,
            0,
            self._store,
            device,
            self._settings.start_timeout,
            host=self._workers.meeting_host,
            progress=self.progress,
        )
        if self._settings.device_type == "cpu":  # NCCL's watchdogs may connect again
            close_store(self._store)
        self.timeline.note("the ranks are connected")
        return self._communicator

    def complete(self, device: torch.device) -> None:
        """Wait until every rank waits for plans."""
        self._await(Ready)
        self.infos = [rank_info(0, device)]
        if self._workers is not None:
            self.infos += self._workers.infos
        self.progress.loaded()
        self.timeline.note("all ranks are ready")

    @property
    def failure(self) -> ServerError | None:
        """The loss of a rank, if there was one."""
        return self._failure

    def label(self, rank: int) -> str:
        """Return the name of a rank for messages."""
        return "rank 0" if rank == 0 or self._workers is None else self._workers.label(rank)

    def request(self, request: OperationRequest) -> None:
        """Tell every other rank an action of an operation that is beside its steps."""
        if self._workers is not None:
            self._workers.request(request)

    def begin_step(self, plan: Message) -> None:
        """Tell every rank the next step; rank 0 begins it as well."""
        if self._workers is not None:
            self._workers.send(plan)
        self.progress.begin_step()

    def dismiss(self) -> None:
        """Tell every rank to end; from now on one that ends is no failure."""
        if self._workers is not None:
            self._workers.dismiss()

    def close(self, *, failed: bool) -> None:
        """End every other rank: in order, or at once after a failure."""
        if self._workers is not None:
            self._workers.kill() if failed else self._workers.close()

    def cause(self, error: Exception) -> ServerError:
        """Why a step failed: a lost rank, where that is what broke an exchange."""
        if isinstance(error, ServerError):
            return error
        deadline = time.monotonic() + (NAMING_SECONDS if self._workers is not None else 0.0)
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._failure or ServerError(f"rank 0 failed: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """After a failure on the CPU; NCCL would wait for the lost rank, so it ends with us."""
        if self._communicator is not None and self._settings.device_type == "cpu":
            with suppress(RuntimeError):
                self._communicator.close()

    def _lost(self, error: ServerError) -> None:
        self._failure = error
        self._on_failure(error)

    def _await(self, message: type) -> None:
        timeout = self._settings.start_timeout
        if self._workers is not None and not self._workers.wait_for(message, timeout):
            late = f"not within {timeout:.0f} s: {self._workers.missing()}"
            raise self._failure or ServerError(late)
