"""The state of a job, and the record in its folder: its cluster, its ID and its files.

What a job folder says of its job: who takes care of it, under which id, and where its files are.

<folder>/job.json      written when the job is handed over, with job_id, which has the id alone
<folder>/process.json  of a job on this machine: its process
<folder>/end_<id>.json how it ended, as soon as somebody has seen it

The user's index of job folders is $XDG_STATE_HOME/nemo-deployment-launcher/jobs, by default in
~/.local/state: a line of JSON for each; folders that have gone are skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from launcher_scripts.common.errors import ClusterError, ConfigError
from launcher_scripts.common.files import atomic_write, replica_file
from launcher_scripts.common.processes import STOP_SIGNALS, seconds_since, start_of
from launcher_scripts.config.options import build, is_same_path

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "RESIZING", "STAGE_OUT"})
# A cluster that cannot be asked; and one that has forgotten the job.
UNKNOWN, FORGOTTEN = "UNKNOWN", "FORGOTTEN"


@dataclass(frozen=True)
class JobState:
    """One look at a job.

    name:      Slurm's state; UNKNOWN: nobody answers, FORGOTTEN: nobody knows the job any more
    exit_code: of a job that has ended, as in a shell
    nodes:     where it runs or ran, in Slurm's notation
    reason:    why it waits or has failed, in the cluster's word
    seconds:   for how long it has run
    restarts:  how often it was started again
    """

    name: str
    exit_code: int | None = None
    nodes: str = ""
    reason: str = ""
    seconds: int | None = None
    restarts: int = 0

    @property
    def waiting(self) -> bool:
        return self.name in WAITING

    @property
    def running(self) -> bool:
        return self.name in RUNNING

    @property
    def finished(self) -> bool:
        return not (self.waiting or self.running or self.name == UNKNOWN)

    @property
    def succeeded(self) -> bool:
        return self.name == "COMPLETED"


def wait_for(done: Callable[[], bool], seconds: float, pause: float = 0.2) -> bool:
    """Return whether `done` came true within that time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


RECORD = "job.json"
ID_FILE = "job_id"
_MAX_INDEX_BYTES = 2**20  # a larger index is written anew, without the folders that have gone
Recorded = TypeVar("Recorded")


@dataclass(frozen=True)
class JobRecord:
    """The content of job.json. Paths are relative to the folder where they lie in it.

    job_id:       empty between the submission and the cluster's answer
    after:        id of the job that it waits for
    within:       the folder of the server's job that it runs in
    ready_file:   of a service; one per replica, see `ready_path`
    stop_timeout: seconds that a service may take to end
    submitted:    time of the submission, in seconds since 1970
    replicas:     how many servers the job is, as tasks of an array; 0: no array
    first_replica: the number of the first of them
    command:      the launcher's command line, which started the job in the folder `directory`
    """

    stage: str
    name: str
    cluster_type: str
    job_id: str
    after: str | None
    settings: str
    script: str
    log: str
    ready_file: str | None = None
    stop_timeout: float = 0.0
    submitted: float = 0.0
    within: str | None = None
    replicas: int = 0
    first_replica: int = 0
    command: tuple[str, ...] = ()
    directory: str = ""

    def write(self, folder: Path) -> None:
        write_text(folder / RECORD, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")
        write_text(folder / ID_FILE, f"{self.job_id}\n")

    @classmethod
    def read(cls, folder: Path) -> JobRecord:
        """The record in a job folder. Raises ClusterError where there is none."""
        record = read_fields(folder / RECORD, cls, "a job's record")
        if record is None:
            raise ClusterError(f"there is no {folder / RECORD}")
        return record

    def with_id(self, job_id: str) -> JobRecord:
        """The record of a job whose launcher has not written the id."""
        return replace(self, job_id=job_id, log=f"{self.log.removesuffix('_.out')}_{job_id}.out")

    def ids(self) -> tuple[str, ...]:
        """The cluster's id of every replica."""
        if not self.replicas:
            return (self.job_id,)
        numbers = range(self.first_replica, self.first_replica + self.replicas)
        return tuple(f"{self.job_id}_{number}" for number in numbers)

    def log_file(self, folder: Path, job_id: str) -> Path:
        """The log of one of `ids`."""
        log = folder / self.log
        return log.with_name(log.name.removesuffix(f"_{self.job_id}.out") + f"_{job_id}.out")

    def ready_path(self, job_id: str) -> Path:
        """The ready file of one of `ids`; the record is of a service."""
        number = int(job_id.rpartition("_")[2]) if self.replicas else None
        return replica_file(Path(self.ready_file or ""), number)


def index_file() -> Path:
    """The file of the user's index; it may not exist."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    return folder / "nemo-deployment-launcher" / "jobs"


def append_to_index(folder: Path) -> None:
    """Add a job folder to the user's index. A job runs also where that cannot be written."""
    path = index_file()
    with contextlib.suppress(OSError, RuntimeError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.tell() > _MAX_INDEX_BYTES:
                remaining = _indexed_folders(file)
                file.truncate(0)
                file.writelines(map(_index_line, remaining))
            file.write(_index_line(folder.absolute()))


def read_index() -> list[Path]:
    """Returns the job folders of the user's index that exist."""
    try:
        with index_file().open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return _indexed_folders(file)
    except (OSError, RuntimeError, UnicodeDecodeError):
        return []


def _indexed_folders(file: IO[str]) -> list[Path]:
    file.seek(0)
    return [path for path in dict.fromkeys(_index_paths(file)) if (path / RECORD).exists()]


def _index_paths(lines: Iterable[str]) -> Iterable[Path]:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            yield Path(json.loads(line))


def _index_line(folder: Path) -> str:
    return json.dumps(str(folder)) + "\n"


def write_end(folder: Path, job_id: str, state: JobState) -> None:
    """Remember how a job ended: clusters forget."""
    write_text(_end_file(folder, job_id), json.dumps(asdict(state)) + "\n")


def read_end(folder: Path, job_id: str) -> JobState | None:
    return read_fields(_end_file(folder, job_id), JobState, "a job's end")


def _end_file(folder: Path, job_id: str) -> Path:
    return folder / f"end_{job_id}.json"


def ready_of_run(path: Path, folder: Path) -> dict[str, Any] | None:
    """Return the contents of a ready file if it is of the run in this job folder, else None."""
    with contextlib.suppress(ClusterError):
        ready = read_json(path)
        local = ((ready or {}).get("job") or {}).get("folder")
        if isinstance(local, str) and is_same_path(local, folder):
            return ready
    return None


def read_fields(path: Path, kind: type[Recorded], message: str) -> Recorded | None:
    """The dataclass `kind` in a JSON file, without keys of other versions; None without the file.

    Raises ClusterError where the file is not `message`.
    """
    values = read_json(path)
    if values is None:
        return None
    names = {field.name for field in fields(cast(Any, kind))} & values.keys()
    try:
        return build(kind, {name: values[name] for name in names}, message)
    except ConfigError as error:
        raise ClusterError(f"{path} is not {message}: {', '.join(error.problems)}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in a file; None without the file. ClusterError where it is something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ClusterError(f"{path} holds no mapping")
    return values


def write_text(path: Path, text: str) -> None:
    """Write a file of the job folder, whole or not at all."""
    try:
        atomic_write(path, text)
    except OSError as error:
        raise ClusterError(f"cannot write {path}: {error}") from error


PROCESS = "process.json"
_KILL_SECONDS = 5.0
_STOPPED_CODES = tuple(128 + number for number in STOP_SIGNALS)


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
    if code and (stopped or code in _STOPPED_CODES):
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


def request_end(folder: Path, job_id: str, seconds: float) -> None:
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
    process = read_fields(folder / PROCESS, NotedProcess, "a job's process")
    # To signals such numbers are many processes, or the first one.
    if process is not None and process.pid <= 1:
        raise ClusterError(f"{folder / PROCESS} names no process of a job; got pid {process.pid}")
    return process


def _lives(pid: int, started: int | None) -> bool:
    """Return whether this very process runs: a process that nobody saw start is not known to."""
    return started is not None and start_of(pid) == started


def _lived(folder: Path) -> int | None:
    process = _noted(folder)
    if process is None or process.started is None:
        return None
    return round(seconds_since(process.started))
