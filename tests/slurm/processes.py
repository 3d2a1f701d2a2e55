"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def processes() -> list[tuple[int, Path]]:
    """Every process id with its folder in /proc."""
    return [(int(f.name), f) for f in Path("/proc").iterdir() if f.name.isdecimal()]


def read(path: Path) -> bytes:
    """The content of a file in /proc; nothing when the process is gone or not ours to see."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for has no command line."""
    return bool(read(Path(f"/proc/{pid}/cmdline")))


def end(pid: int, timeout: float) -> None:
    """Ask a process to end, and kill it when it has not done so in `timeout` seconds."""
    deadline = time.monotonic() + timeout
    try:
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline and alive(pid):
            time.sleep(0.05)
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def step_daemon(daemons: Iterable[int], job_id: str, step: str) -> int:
    """The slurmstepd of a step: `slurmstepd: [7.0]`, or `[7.batch]` of the script.

    daemons: those of the cluster, since other clusters here may have a job of that number
    """
    for pid in daemons:
        if f"[{job_id}.{step}]".encode() in read(Path(f"/proc/{pid}/cmdline")):
            return pid
    raise AssertionError(f"no slurmstepd of {job_id}.{step}")
