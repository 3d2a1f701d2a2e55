"""The other ranks of an engine as rank 0 sees them: started, told, watched and ended here."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.engine.loading import EngineSettings
from launcher_scripts.engine.messages import (
    Failed,
    Loaded,
    RankInfo,
    Ready,
    receive_message,
    send_message,
)
from launcher_scripts.engine.plan import Stop
from launcher_scripts.errors import ServerError

CHECKOUT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.2
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is told first."""

    settings: EngineSettings
    rank: int
    store_port: int


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    last_seen: float
    info: RankInfo | None = None

    @property
    def label(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"


class WorkerGroup:
    """Ranks 1 and up, each a process with one connection for plans and signs of life.

    One thread starts them and watches them until the group is closed. Its life is theirs: a
    worker asks the kernel to be killed when the thread that started it ends.
    """

    def __init__(
        self, settings: EngineSettings, store_port: int, on_failure: Callable[[ServerError], None]
    ) -> None:
        self._settings = settings
        self._store_port = store_port
        self._on_failure = on_failure
        self._workers: list[_Worker] = []
        self._started = threading.Event()
        self._arrived: dict[type, set[int]] = {Loaded: set(), Ready: set()}
        self._news = threading.Condition()
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-workers", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def infos(self) -> list[RankInfo]:
        return [worker.info for worker in self._workers if worker.info is not None]

    def wait_for(self, message: type, timeout: float) -> bool:
        """Whether every rank sends `message` (Loaded or Ready) within `timeout` seconds.

        False at once when a rank fails.
        """
        everyone = len(self._workers)
        with self._news:
            self._news.wait_for(
                lambda: self._failed or len(self._arrived[message]) == everyone, timeout
            )
            return not self._failed and len(self._arrived[message]) == everyone

    def send(self, message: object) -> None:
        """Tell every worker, in order."""
        for worker in self._workers:
            send_message(worker.connection, message)

    def dismiss(self) -> None:
        """Tell every worker to end; from now on one that ends is no failure."""
        if not self._closing.is_set():
            self._closing.set()
            with suppress(OSError):
                self.send(Stop())

    def close(self) -> None:
        """End every worker: told first, then terminated, then killed."""
        self.dismiss()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            self._end(worker, deadline)
        self._thread.join(STOP_SECONDS)

    def kill(self) -> None:
        """End every worker at once; for a group that failed."""
        self._closing.set()
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            worker.connection.close()

    def _end(self, worker: _Worker, deadline: float) -> None:
        for ask in (None, worker.process.terminate, worker.process.kill):
            if ask is not None:
                ask()
                deadline = time.monotonic() + STOP_SECONDS
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                continue
        worker.connection.close()

    def _watch(self) -> None:
        try:
            for rank in range(1, self._settings.parallelism.world_size):
                self._workers.append(self._spawn(rank))
        except OSError as error:
            self._on_failure(ServerError(f"cannot start the other ranks: {error}"))
            return
        finally:
            self._started.set()
        failure = self._until_failure()
        if failure is not None and not self._closing.is_set():
            self._on_failure(ServerError(failure))
            with self._news:
                self._failed = True
                self._news.notify_all()
        for worker in self._workers:
            worker.process.wait()

    def _spawn(self, rank: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    _python(),
                    "-m",
                    "launcher_scripts.engine.worker",
                    "--connection",
                    str(theirs.fileno()),
                    "--parent",
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
            )
        send_message(ours, WorkerSetup(self._settings, rank, self._store_port))
        return _Worker(rank, process, ours, time.monotonic() + self._settings.start_timeout)

    def _until_failure(self) -> str | None:
        """Read signs of life until a rank is lost (the reason) or the group closes (None)."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            while not self._closing.is_set():
                for key, _ in selector.select(POLL_SECONDS):
                    failure = self._hear(key.data)
                    if failure is not None:
                        return failure
                for worker in self._workers:
                    failure = self._check(worker)
                    if failure is not None:
                        return failure
        return None

    def _hear(self, worker: _Worker) -> str | None:
        try:
            message = receive_message(worker.connection)
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(2)
            return _ended(worker)
        if isinstance(message, Failed):
            return f"{worker.label}: {message.reason}"
        if isinstance(message, Ready):
            worker.info = message.info
        if type(message) in self._arrived:
            with self._news:
                self._arrived[type(message)].add(worker.rank)
                self._news.notify_all()
        worker.last_seen = time.monotonic()
        return None

    def _check(self, worker: _Worker) -> str | None:
        if worker.process.poll() is not None:
            return _ended(worker)
        silence = time.monotonic() - worker.last_seen
        if silence > self._settings.stall_timeout:
            return f"{worker.label} gave no sign of life for {silence:.0f} s"
        return None


def _ended(worker: _Worker) -> str:
    code = worker.process.poll()
    if code is None:
        return f"{worker.label} closed its connection"
    if code < 0:
        return f"{worker.label} was ended by {signal.Signals(-code).name}"
    return f"{worker.label} ended with exit code {code}"


def _python() -> str:
    """The interpreter of this process, also where Python is embedded in another program."""
    if sys.executable and "python" in Path(sys.executable).name:
        return sys.executable
    for folder in (sys.prefix, sys.exec_prefix):
        candidate = Path(folder) / "bin" / "python3"
        if candidate.exists():
            return str(candidate)
    found = shutil.which("python3")
    if found is None:
        raise FileNotFoundError("there is no python3 to run the other ranks with")
    return found


def _environment() -> dict[str, str]:
    """This process's environment, with the modules it can import."""
    paths = dict.fromkeys([str(CHECKOUT), *(path for path in sys.path if path)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
