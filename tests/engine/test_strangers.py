"""Who else connects to the ranks of an engine costs them nothing, and is not believed."""

from __future__ import annotations

import os
import pickle
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Queue

import pytest
import torch
import torch.distributed as dist

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.distributed.communicator import (
    LOOPBACK,
    ProcessGroupCommunicator,
    drop_connections,
    join_store,
    listening_ports,
    open_store,
)
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import load_engine, random_tensors, small_config
from tests.forked_steps import FORKSERVER

pytestmark = pytest.mark.started_ranks

CONFIG = small_config(num_layers=2)
STRANGERS = 40
_LISTENS = "0A"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = load_engine(tmp_path_factory.mktemp("strangers"), CONFIG, random_tensors(CONFIG), 1, 2)
    yield engine
    engine.close()


def sockets(pid: int) -> list[str]:
    """The numbers of a process's sockets."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += re.findall(r"socket:\[(\d+)\]", str(entry.readlink()))
    return found


def ports(pid: int) -> list[int]:
    """The TCP ports that a process listens on."""
    own, found = set(sockets(pid)), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == _LISTENS and rest[5] in own:
                found.append(int(address.rpartition(":")[2], 16))
    return found


def test_connections_of_strangers_take_no_descriptors(engine: Engine) -> None:
    processes = [os.getpid(), *(info.pid for info in engine.ranks[1:])]
    listening = {pid: ports(pid) for pid in processes}
    assert all(listening[pid] for pid in processes[1:])  # gloo's, which cannot be closed
    before = {pid: len(sockets(pid)) for pid in processes}
    with ExitStack() as held:
        for pid in processes:
            for port in listening[pid]:
                for _ in range(STRANGERS):
                    stranger = held.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex((LOOPBACK, port))
        want = engine.submit(GenerateRequest((3, 4, 5), 8)).result(60)
        now = {pid: len(sockets(pid)) for pid in processes[1:]}
        assert now == {pid: before[pid] for pid in processes[1:]}
    assert engine.submit(GenerateRequest((3, 4, 5), 8)).result(60) == want


def test_the_ranks_own_listener_is_closed_once_all_are_ready(engine: Engine) -> None:
    workers = engine._ranks._workers
    assert workers is not None
    order = next(iter(workers._orders.values()))
    with pytest.raises(ConnectionRefusedError), socket.create_connection((LOOPBACK, order.port)):
        pass


def test_a_listener_that_drops_connections_keeps_those_it_has() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        assert listening_ports()[server.fileno()] == port
        with socket.create_connection((LOOPBACK, port)) as there:
            taken, _ = server.accept()
            drop_connections([server.fileno()])
            with pytest.raises(TimeoutError):
                socket.create_connection((LOOPBACK, port), timeout=0.2)
            there.sendall(b"still here")
            assert taken.recv(10) == b"still here"
            taken.close()


def meet(rank: int, port: int, results: Queue[tuple[int, list[str]]]) -> None:
    torch.set_num_threads(1)

    def forbidden(*_: object) -> None:
        raise AssertionError("a pickle of another rank")

    communicator = ProcessGroupCommunicator(
        Parallelism(2), rank, join_store(LOOPBACK, port, 60), torch.device("cpu"), 60
    )
    pickle.loads = dist.distributed_c10d._unpickler = forbidden  # type: ignore[assignment]
    communicator.use_peer_memory()
    peers = communicator._peer_devices()
    results.put((rank, [f"{host} {device}" for host, device in peers]))
    communicator.minimum(0)
    communicator.close()


def test_ranks_exchange_no_pickles() -> None:
    store, results = open_store(LOOPBACK, 60), FORKSERVER.Queue()
    ranks = [FORKSERVER.Process(target=meet, args=(rank, store.port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    said = dict(results.get(timeout=60) for _ in ranks)
    assert said[0] == said[1]
    assert len(set(said[0])) == 1 and said[0][0].endswith(" cpu")
