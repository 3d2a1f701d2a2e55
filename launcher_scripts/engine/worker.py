"""One rank of an engine other than the first: `python -m launcher_scripts.engine.worker`.

Started by rank 0 only. It does what rank 0's plans say until it is told to stop or rank 0 is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from launcher_scripts.engine.messages import (
    Beat,
    Failed,
    Loaded,
    Ready,
    receive_message,
    send_message,
)
from launcher_scripts.engine.plan import Stop

if TYPE_CHECKING:
    from launcher_scripts.engine.workers import WorkerSetup

BEAT_SECONDS = 1.0
PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=int, required=True, help="inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when a rank ends
    link = _Link(socket.socket(fileno=arguments.connection))
    link.start_beating()
    try:
        _serve(link)
    except EOFError:
        return 0
    except Exception as error:
        link.send(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


class _Link:
    """The connection to rank 0; plans come in on one thread, signs of life go out on another."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        with self._lock:
            send_message(self._connection, message)

    def receive(self) -> object:
        return receive_message(self._connection)

    def start_beating(self) -> None:
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            try:
                self.send(Beat())
            except OSError:
                os._exit(0)  # rank 0 is gone; the main thread may wait for it in a collective
            time.sleep(BEAT_SECONDS)


def _serve(link: _Link) -> None:
    setup = link.receive()
    runner = _load(setup, link)
    while True:
        plan = link.receive()
        if isinstance(plan, Stop):
            break
        runner.execute(plan)
    runner.close()


def _load(setup: WorkerSetup, link: _Link):
    """Imports here: torch takes seconds, and rank 0 hears of this one from the start."""
    from launcher_scripts.engine.communicator import ProcessGroupCommunicator, join_store
    from launcher_scripts.engine.loading import (
        assemble_runner,
        load_weights,
        open_checkpoint,
        prepare_process,
        rank_device,
        rank_info,
    )

    settings, rank = setup.settings, setup.rank
    device = rank_device(settings, rank)
    prepare_process(settings, device)
    weights = load_weights(settings, open_checkpoint(settings, verify=False), rank, device)
    link.send(Loaded())
    store = join_store(setup.store_port, settings.start_timeout)
    communicator = ProcessGroupCommunicator(
        settings.parallelism, rank, store, device, settings.start_timeout
    )
    runner = assemble_runner(weights, settings, communicator, device)
    link.send(Ready(rank_info(rank, device)))
    return runner


if __name__ == "__main__":
    sys.exit(main())
