"""Processes that work on untrusted inputs, within limits of time and memory.

    python3 -m launcher_scripts.common.limited_process FD MODULE:FUNCTION CPU_SECONDS MEMORY NICE

A thread cannot be stopped, and a library that overflows its stack ends its process: such work is
done in a process that may be killed. FUNCTION gets an argument once and returns the function that
is called with each item. Argument, items and results are JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from typing import Any

from launcher_scripts.common.processes import this_environment, this_python

MIB = 1 << 20
START_SECONDS = 300.0  # to import what the function needs, on a busy machine
EXIT_SECONDS = 10.0  # for the exit code of a process that has closed its connection
STACK_BYTES = MIB  # of the thread that works; threads of other processes have at least twice that
_CODES = {
    -signal.SIGPROF: "it takes more than {cpu_seconds:g} s of a processor",
    -signal.SIGABRT: "it needs more than {memory_mib} MiB of memory",
    -signal.SIGSEGV: "it is nested too deeply",
}


@dataclass(frozen=True)
class WorkLimits:
    """Limits of one item.

    cpu_seconds: of the process
    seconds:     by the clock; more than cpu_seconds, because the machine may be busy
    memory_mib:  address space beyond that of the process after its start
    niceness:    how much longer it waits for a processor than the process that needs its result
    """

    cpu_seconds: float = 2.0
    seconds: float = 60.0
    memory_mib: int = 256
    niceness: int = 0


class WorkLimitError(Exception):
    """An item that exceeds a limit, or that crashes the process that works on it."""


class WorkTimeoutError(WorkLimitError):
    """An item that takes too long by the clock: the machine may be busy."""


class LimitedProcesses:
    """Processes of one function. They start when they are needed, and again after one was killed.

    They exit when this process does, or when this object is collected.
    """

    def __init__(
        self, function: str, argument: Any = None, limits: WorkLimits | None = None, count: int = 2
    ) -> None:
        """function: MODULE:FUNCTION
        count: maximum number of processes, and so of items at a time
        """
        self._idle: LifoQueue[_Process] = LifoQueue()
        for _ in range(count):
            self._idle.put(_Process(function, argument, limits or WorkLimits()))

    def call(self, item: Any) -> Any:
        """The function's result; blocks until a process is idle, and then until it replies.

        Raises WorkLimitError.
        """
        process = self._idle.get()
        try:
            return process.call(item)
        finally:
            self._idle.put(process)


class _Process:
    """One process, which one thread calls at a time."""

    def __init__(self, function: str, argument: Any, limits: WorkLimits) -> None:
        self._function = function
        self._argument = argument
        self._limits = limits
        self._started: tuple[subprocess.Popen[bytes], Connection] | None = None

    def call(self, item: Any) -> Any:
        if self._started is None or self._started[0].poll() is not None:
            self._started = self._start()
            self._exchange(self._argument, START_SECONDS)
        reply = self._exchange(item, self._limits.seconds)
        if "limit" in reply:
            raise WorkLimitError(self._reason(self._end(reply["limit"])))
        return reply["result"]

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        parent_end, other = socket.socketpair()
        limits = self._limits
        values = map(str, (limits.cpu_seconds, limits.memory_mib, limits.niceness))
        with other:
            process = subprocess.Popen(
                [this_python(), "-m", __name__, str(other.fileno()), self._function, *values],
                # Each further arena of malloc takes 64 MiB of address space.
                env={**this_environment(), "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        connection = Connection(parent_end.detach())
        weakref.finalize(self, _stop, process, connection)
        return process, connection

    def _exchange(self, message: Any, seconds: float) -> dict[str, Any]:
        """The reply to a message. Raises WorkLimitError, with the process ended."""
        if self._started is None:
            raise WorkLimitError(self._reason(0))
        _, connection = self._started
        try:
            connection.send_bytes(json.dumps(message).encode())
            if connection.poll(seconds):
                return dict(json.loads(connection.recv_bytes()))
        except (OSError, EOFError) as error:
            raise WorkLimitError(self._reason(self._end())) from error
        self._end(-signal.SIGKILL)
        raise WorkTimeoutError(f"it takes longer than {seconds:g} s")

    def _end(self, code: int | None = None) -> int:
        """End the process; returns `code`, or else the one that it ended with by itself."""
        if self._started is None:
            return 0
        process, connection = self._started
        self._started = None
        if code is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
        _stop(process, connection)
        return process.returncode if code is None else code

    def _reason(self, code: int) -> str:
        text = _CODES.get(code, "the process that works on it ended with exit code {code}")
        return text.format(**vars(self._limits), code=code)


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def serve(fd: int, function: str, cpu_seconds: float, memory_mib: int, niceness: int) -> None:
    """Call the function with every item that comes, until the other end is closed."""
    connection = Connection(fd)
    os.nice(niceness)
    try:
        module, _, name = function.partition(":")
        work = getattr(importlib.import_module(module), name)(json.loads(connection.recv_bytes()))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + memory_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        connection.send_bytes(b"{}")
        while True:
            item = json.loads(connection.recv_bytes())
            # Its signal ends the process, whatever library runs.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            try:
                reply = json.dumps({"result": work(item)}).encode()
            except MemoryError:
                reply = json.dumps({"limit": -signal.SIGABRT}).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            del item
            connection.send_bytes(reply)
    except (EOFError, OSError):
        return


def main(fd: str, function: str, cpu_seconds: str, memory_mib: str, niceness: str) -> None:
    """Serve in a thread of a small stack; the process that started this one ends it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    values = (int(fd), function, float(cpu_seconds), int(memory_mib), int(niceness))
    thread = threading.Thread(target=serve, args=values, daemon=True)
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
