"""What has become of a job on this machine: its process, noted when it started, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher_scripts.cluster.record import read_end, read_known, write_end, write_text
from launcher_scripts.cluster.state import UNKNOWN, JobState, wait_for
from launcher_scripts.common.errors import ClusterError
from launcher_scripts.common.processes import STOP_SIGNALS, seconds_since, start_of

PROCESS = "process.json"
_KILL_SECONDS = 5.0
_ASKED_TO_END = tuple(128 + number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class NotedProcess:
    """The process that leads a job and the launcher's; when both started, in clock ticks."""

    pid: int
    host: str
    started: int | None
    launcher: int
    launcher_started: int | None


def note_process(folder: Path, pid: int) -> None:
    """Remember the process that leads a job, and this one, which will note its end: their starts
    tell them from later ones of their numbers.
    """
    launcher, host = os.getpid(), socket.gethostname()
    noted = NotedProcess(pid, host, start_of(pid), launcher, start_of(launcher))
    write_text(folder / PROCESS, json.dumps(asdict(noted)) + "\n")


def note_end(folder: Path, job_id: str, code: int, *, stopped: bool) -> None:
    """Remember how a job ended. A folder that is gone or full is no reason to fail."""
    name = "COMPLETED" if code == 0 else "FAILED"
    if code and (stopped or code in _ASKED_TO_END):
        name = "CANCELLED"
    state = JobState(name, code, socket.gethostname(), seconds=_lived(folder))
    with contextlib.suppress(ClusterError):
        write_end(folder, job_id, state)


def process_state(folder: Path, job_id: str) -> JobState:
    """The state of a job that has left no word of its end. job_id: the launcher's process id.

    A job whose process has ended still runs until its launcher has noted the end.
    """
    process = _noted(folder)
    if process is None:
        if job_id.isdecimal() and start_of(int(job_id)) is not None:
            return JobState("PENDING", reason="the launcher has not started it yet")
        return JobState("CANCELLED", 143, reason="the launcher ended before it was started")
    host = process.host
    if host != socket.gethostname():
        return JobState(UNKNOWN, nodes=host, reason=f"it runs on {host}: ask there")
    launcher_lives = _lives(process.launcher, process.launcher_started)
    if launcher_lives or _lives(process.pid, process.started):
        return JobState("RUNNING", nodes=host, seconds=_lived(folder))
    reason = "the launcher was killed, and the job with it"
    # Both may have ended in order since the caller looked for the word of the end.
    return read_end(folder, job_id) or JobState("CANCELLED", 143, nodes=host, reason=reason)


def ask_to_end(folder: Path, job_id: str, seconds: float) -> None:
    """Ask the job's leading process to end, and end its group when it has not done so in time."""
    if process_state(folder, job_id).running:
        _signal(os.kill, folder, signal.SIGTERM)
        if not wait_for(lambda: not process_state(folder, job_id).running, seconds):
            end_group(folder, job_id)


def end_group(folder: Path, job_id: str) -> None:
    """End all processes of a job."""
    if not process_state(folder, job_id).running:
        return
    _signal(os.killpg, folder, signal.SIGTERM)
    if not wait_for(lambda: not process_state(folder, job_id).running, _KILL_SECONDS):
        _signal(os.killpg, folder, signal.SIGKILL)


def _signal(send: Callable[[int, int], None], folder: Path, number: int) -> None:
    """Signal the job's process or its group, but no later process that has its number."""
    process = _noted(folder)
    if process is None:
        raise ClusterError(f"{folder} does not say which process its job is")
    if start_of(process.pid) in (None, process.started):
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)


def _noted(folder: Path) -> NotedProcess | None:
    process = read_known(folder / PROCESS, NotedProcess, "a job's process")
    # To signals such numbers are many processes, or the first one.
    if process is not None and process.pid <= 1:
        raise ClusterError(f"{folder / PROCESS} names no process of a job; got pid {process.pid}")
    return process


def _lives(pid: int, started: int | None) -> bool:
    """Whether this very process runs: a process that nobody saw start is not known to."""
    return started is not None and start_of(pid) == started


def _lived(folder: Path) -> int | None:
    process = _noted(folder)
    if process is None or process.started is None:
        return None
    return round(seconds_since(process.started))
