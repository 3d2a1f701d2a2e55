"""Processes of this machine, as /proc shows them, and waiting for what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T], timeout: float = 300, said: Callable[[], object] | None = None
) -> T:
    """Wait until a condition holds and return its value.

    timeout: seconds that only a hang reaches
    said:    what to show when the time is over, for example a log
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s: {said() if said else condition}")
        time.sleep(0.05)
    return value


def wait_for_file(path: Path) -> str:
    """Wait until a file is there and not empty; return its text."""
    return wait_for(lambda: path.read_text() if path.exists() else "", said=lambda: path)


def processes() -> list[tuple[int, Path]]:
    """Every process id with its folder in /proc."""
    return [(int(f.name), f) for f in Path("/proc").iterdir() if f.name.isdecimal()]


def read(path: Path) -> bytes:
    """The content of a file in /proc; nothing when the process is gone or not ours to see."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def command_line(pid: int) -> str:
    """The words of a process's command line with spaces between them."""
    return read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode()


def parent(pid: int) -> int:
    """Who started a process, or has taken it over. Raises LookupError when the process is gone."""
    for line in read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(b"PPid:"):
            return int(line.split()[1])
    raise LookupError(pid)


def variables(pid: int) -> list[bytes]:
    """NAME=value of the environment that a process was started with."""
    return read(Path(f"/proc/{pid}/environ")).split(b"\0")


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for has no command line."""
    return bool(read(Path(f"/proc/{pid}/cmdline")))


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until none of the processes runs."""
    left = list(pids)
    wait_for(lambda: not any(map(alive, left)), said=lambda: list(map(command_line, left)))


def end(pid: int, timeout: float) -> None:
    """Ask a process to end, and kill it when it has not done so in `timeout` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not alive(pid), timeout)
            return
        os.kill(pid, signal.SIGKILL)
