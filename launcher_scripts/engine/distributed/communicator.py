"""Exchange of tensors between the ranks of one engine: torch.distributed over gloo or NCCL.

GPU memory that the ranks of a node map into each other's address space: the peer buffers.

torch's symmetric memory makes it. NVLink multicast is never asked for.

Addresses, network interfaces and listening sockets of this node.

Listening sockets of libraries, which have no switch to close them once the ranks have met.

gloo accepts whoever connects and keeps the connection indefinitely, so every stranger would cost a
rank a descriptor. Its loop aborts the process over a listener that is closed under it; so the
kernel is told to drop what comes for it: connections are opened no more, those there stay.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.hosts import address_towards
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.processes import BPF_RETURN, BpfProgram
from launcher_scripts.engine.distributed.heartbeat import RankProgress
from launcher_scripts.kernels.operands import PeerBuffers

LOOPBACK = "127.0.0.1"
EVERY = "0.0.0.0"
_SIOCGIFADDR = 0x8915
_CHANGE = "deploy.server.network_interface (an interface's name or a network as 10.0.0.0/16)"


def interface_addresses() -> dict[str, str]:
    """name -> address of every interface that has one, loopback last."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return dict(sorted(addresses.items(), key=lambda item: item[1].startswith("127.")))


def listening_address(requested: str | None) -> str:
    """The address to listen on for other nodes: that of the interface or network asked for.

    Without a wish every address; the connections prove themselves. Raises ServerError where this
    node has no such interface.
    """
    if requested is None:
        return EVERY
    addresses = interface_addresses()
    if requested in addresses:
        return addresses[requested]
    try:
        network = ipaddress.ip_network(requested, strict=False)
    except ValueError:
        network = None
    for address in addresses.values():
        if network is not None and ipaddress.ip_address(address) in network:
            return address
    choices = [f"{name} ({address})" for name, address in addresses.items()]
    message = f"{socket.gethostname()} has no such network interface"
    raise ServerError(problem(message, got=requested, choices=choices, change=_CHANGE))


def published_addresses(listening: str) -> tuple[str, ...]:
    """Return addresses at which others find a listening socket, the most likely first; names come
    last."""
    if listening != EVERY:
        return (listening,)
    return tuple(dict.fromkeys([*interface_addresses().values(), socket.gethostname()]))


def interface_towards(host: str) -> str | None:
    """The interface over which this node reaches `host`; None where that cannot be told."""
    local_address = address_towards(host)
    for name, address in interface_addresses().items():
        if address == local_address:
            return name
    return None


_SO_ATTACH_FILTER = 26


def listening_ports() -> dict[int, int]:
    """descriptor -> port of this process's sockets that listen for TCP connections."""
    result = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), _duplicate(int(entry.name)) as opened:
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = opened.getsockname()
                if opened.family in (socket.AF_INET, socket.AF_INET6):
                    result[int(entry.name)] = int(name[1])
    return result


def drop_connections(descriptors: Iterable[int]) -> None:
    """Let nobody connect to these listening sockets any more; OSError where that is forbidden."""
    program = BpfProgram((BPF_RETURN, 0, 0, 0))  # no byte of a packet passes
    for descriptor in descriptors:
        with _duplicate(descriptor) as opened:
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


def _duplicate(descriptor: int) -> socket.socket:
    """OSError where it is no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


# Of 8 bytes, for all ranks' parts of two exchanges: 64 rows of 8,192 numbers over four ranks.
PEER_BUFFER_WORDS = 1 << 22


def lane_words(ranks: int) -> int:
    """Number of words that a rank can send at a time, which limits what it sends to all ranks."""
    return PEER_BUFFER_WORDS // (2 * ranks)


def unsupported_reason(peers: Sequence[tuple[str, torch.device]]) -> str | None:
    """Why ranks on these hosts and devices cannot sum through each other's memory, if so."""
    if any(device.type != "cuda" for _, device in peers):
        return "the ranks are not on CUDA devices"
    if len({host for host, _ in peers}) > 1:
        return "the ranks are on different nodes"
    for _, device in peers:
        for _, peer in peers:
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"{device} has no peer access to {peer}"
    return None


class SymmetricMemory:
    """Peer buffers and what keeps them mapped; every rank of `group` makes one."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises RuntimeError where the memory cannot be shared."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric_memory

        lanes = (2, group.size(), lane_words(group.size()))
        buffer = symmetric_memory.empty(lanes, dtype=torch.int64, device=device).zero_()
        self._handle = symmetric_memory.rendezvous(buffer, group)
        self.peer_buffers = PeerBuffers(
            buffer,
            torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device),
            torch.zeros(lanes[-1], dtype=torch.int32, device=device),
            group.rank(),
        )
        # No rank writes into a peer buffer before it is zeroed: the ranks agree on its use later.
        torch.cuda.synchronize(device)


# Which network interface the libraries below open their connections on. Within a node NCCL knows
# better ways, and finds its own interface to agree on them.
_LOCAL_VARIABLES = ("GLOO_SOCKET_IFNAME",)
_INTERFACE_VARIABLES = (*_LOCAL_VARIABLES, "NCCL_SOCKET_IFNAME")

# Newer releases of torch give the operation this name and warn at the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """One rank alone: every exchange is the identity."""

    def __init__(
        self,
        parallelism: Parallelism = Parallelism(),
        rank: int = 0,
        progress: RankProgress | None = None,
    ) -> None:
        self.parallelism = parallelism
        self.rank = rank
        self.tp_rank = parallelism.tp_rank(rank)
        self.pp_rank = parallelism.pp_rank(rank)
        self.progress = progress or RankProgress()

    @property
    def tp_size(self) -> int:
        return self.parallelism.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.parallelism.pp_size - 1

    def tp_sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the tensor-parallel ranks; may overwrite `tensor`."""
        return tensor

    @property
    def peer_buffers(self) -> PeerBuffers | None:
        """Buffers through which the tensor-parallel ranks write to each other, if they share
        memory."""
        return None

    def tp_concat(self, tensor: Tensor) -> Tensor:
        """[N, part] of every tensor-parallel rank side by side: [N, part * tp_size]."""
        return tensor

    def tp_stack(self, tensor: Tensor) -> Tensor:
        """A few values of every tensor-parallel rank: [...] -> [tp_size, ...]."""
        return tensor[None]

    def use_peer_memory(self) -> None:
        """Sum through the GPUs' shared memory where they can, and say so on rank 0."""

    def to_next_stage(self, tensor: Tensor) -> None:
        """Send to the same tensor-parallel rank of the next pipeline stage."""
        raise ServerError(f"no pipeline stage follows; {list(tensor.shape)} was to be sent")

    def from_previous_stage(self, tensor: Tensor) -> Tensor:
        """Fill `tensor` with what the previous pipeline stage sent."""
        raise ServerError(f"no pipeline stage comes before; {list(tensor.shape)} was expected")

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Fill `tensor` on every pipeline stage with the last stage's values."""
        self.begin_from_last_stage([tensor])()
        return tensor

    def begin_from_last_stage(self, tensors: Sequence[Tensor]) -> Callable[[], None]:  # noqa: ARG002
        """`from_last_stage` of several tensors, which are not used before a call of what it gives.

        Exchanges are begun, and waited for, in the same order on every stage.
        """
        return _done

    def minimum(self, value: int) -> int:
        """The least `value` over all ranks."""
        return value

    def close(self) -> None:
        """Leave the group."""


class ProcessGroupCommunicator(Communicator):
    """Ranks in processes of their own, one group per engine.

    The rendezvous is a TCP store that rank 0 opens on a port the system picks, so two engines on
    one machine never meet. A process can hold one such group at a time. Connections go through the
    interface towards `host`, where the store is.
    """

    def __init__(
        self,
        parallelism: Parallelism,
        rank: int,
        store: dist.TCPStore,
        device: torch.device,
        timeout: float,
        host: str = LOOPBACK,
        progress: RankProgress | None = None,
    ) -> None:
        super().__init__(parallelism, rank, progress)
        if dist.is_initialized():
            raise ServerError("this process already runs an engine of several ranks; close it")
        interface = interface_towards(host)
        if interface is not None:
            for name in _LOCAL_VARIABLES if host == LOOPBACK else _INTERFACE_VARIABLES:
                os.environ.setdefault(name, interface)
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # nobody connects after the meeting
        limit = timedelta(seconds=timeout)
        others = listening_ports()
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("engine", store),
            rank=rank,
            world_size=parallelism.world_size,
            timeout=limit,
            device_id=device if cuda else None,
        )
        self.device = device
        self._shared: SymmetricMemory | None = None
        # A rank alone has no group: each is a thread of gloo's, which wakes up every 10 ms.
        if parallelism.tp_size > 1:
            self.tp_group = self._local_group(
                [list(parallelism.tp_group(stage)) for stage in range(parallelism.pp_size)]
            )
        if parallelism.pp_size > 1:
            chains = [
                [parallelism.rank(tp_rank, stage) for stage in range(parallelism.pp_size)]
                for tp_rank in range(parallelism.tp_size)
            ]
            # Hidden states and tokens go different ways, so that neither waits for the other.
            self._pp_group = self._local_group(chains)
            self._token_group = self._local_group(chains)
        if not cuda:
            _let_nobody_else_in(listening_ports().keys() - others.keys())

    def _local_group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Every rank creates every group, in the same order, and keeps the one it is in."""
        created: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in groups]
        return next(
            group for group, ranks in zip(created, groups, strict=True) if self.rank in ranks
        )

    def tp_sum(self, tensor: Tensor) -> Tensor:
        if self.tp_size > 1 and tensor.numel():
            with self.progress.exchange("all_reduce", tensor.nbytes):
                dist.all_reduce(tensor, group=self.tp_group)
        return tensor

    @property
    def peer_buffers(self) -> PeerBuffers | None:
        return None if self._shared is None else self._shared.peer_buffers

    def tp_concat(self, tensor: Tensor) -> Tensor:
        if self.tp_size == 1:
            return tensor
        rows, part = tensor.shape
        gathered = tensor.new_empty(self.tp_size * rows, part)
        with self.progress.exchange("all_gather", gathered.nbytes):
            _all_gather(gathered, tensor.contiguous(), group=self.tp_group)
        return gathered.view(self.tp_size, rows, part).transpose(0, 1).reshape(rows, -1)

    def tp_stack(self, tensor: Tensor) -> Tensor:
        padded = tensor.new_zeros(self.tp_size, *tensor.shape)
        padded[self.tp_rank] = tensor
        return self.tp_sum(padded)

    def use_peer_memory(self) -> None:
        if self.tp_size == 1:
            return
        reason = unsupported_reason(self._peer_devices())
        if self._all_agree(reason is None):
            try:
                self._shared = SymmetricMemory(self.tp_group, self.device)
            except RuntimeError as error:
                reason = f"sharing memory failed: {error}"
            if not self._all_agree(reason is None):
                self._shared = None
        if self.rank == 0:
            print(f"enable_custom_all_reduce: {self._sums_are_over(reason)}", flush=True)

    def _peer_devices(self) -> list[tuple[str, torch.device]]:
        """Host, as a digest, and device of every tensor-parallel rank."""
        host = hashlib.sha256(socket.gethostname().encode()).digest()[:8]
        cuda = self.device.type == "cuda"
        mine = [int.from_bytes(host, "big", signed=True), self.device.index or 0, int(cuda)]
        gathered = self.tp_concat(torch.tensor([mine], dtype=torch.int64, device=self.device))
        return [
            (f"{digest:x}", torch.device(f"cuda:{at}") if cuda else torch.device("cpu"))
            for digest, at, cuda in gathered.view(self.tp_size, len(mine)).tolist()
        ]

    def _all_agree(self, mine: bool) -> bool:
        return self.minimum(int(mine)) == 1

    def _sums_are_over(self, reason: str | None) -> str:
        group = "NCCL" if self.device.type == "cuda" else "gloo"
        if self._shared is None:
            return f"ranks sum over {group}: {reason or 'another rank cannot share its memory'}"
        return f"ranks sum decode steps through each other's memory, and prompts over {group}"

    def to_next_stage(self, tensor: Tensor) -> None:
        to = self.parallelism.rank(self.tp_rank, self.pp_rank + 1)
        with self.progress.exchange(f"send to rank {to}", tensor.nbytes):
            dist.send(tensor.contiguous(), to, group=self._pp_group)

    def from_previous_stage(self, tensor: Tensor) -> Tensor:
        source = self.parallelism.rank(self.tp_rank, self.pp_rank - 1)
        with self.progress.exchange(f"receive from rank {source}", tensor.nbytes):
            dist.recv(tensor, source, group=self._pp_group)
        return tensor

    def begin_from_last_stage(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        if self.parallelism.pp_size == 1:
            return _done
        last = self.parallelism.rank(self.tp_rank, self.parallelism.pp_size - 1)
        results = [
            dist.broadcast(tensor, last, group=self._token_group, async_op=True)
            for tensor in tensors
        ]

        def wait() -> None:
            size = sum(tensor.nbytes for tensor in tensors)
            with self.progress.exchange(f"broadcast from rank {last}", size):
                for work in results:
                    work.wait()

        return wait

    def minimum(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor.item())

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _done() -> None:
    """Return the result of an exchange with no other rank."""


def close_store(store: dist.TCPStore) -> None:
    """Let no further rank join the store that this process opened."""
    _let_nobody_else_in(fd for fd, port in listening_ports().items() if port == store.port)


def _let_nobody_else_in(descriptors: Iterable[int]) -> None:
    try:
        drop_connections(descriptors)
    except OSError as error:
        message = "strangers can connect to this rank's gloo, and take a descriptor each"
        print(f"{message}: {error}", flush=True)


def open_store(host: str, timeout: float) -> dist.TCPStore:
    """The rendezvous rank 0 opens on the address `host`, on a port that the system chooses."""
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """The rendezvous as the other ranks reach it."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
