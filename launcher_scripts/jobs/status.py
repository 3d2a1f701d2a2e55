"""One look at a job: what its cluster says, what its server says once it is ready, and its logs,
printed from their end or as they grow.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher_scripts.cluster.record import (
    FORGOTTEN,
    RECORD,
    UNKNOWN,
    JobRecord,
    JobState,
    read_end,
    read_json,
    ready_of_run,
    write_end,
)
from launcher_scripts.cluster.slurm_queue import BLOCKING_REASONS
from launcher_scripts.common.errors import ClusterError, ServerError
from launcher_scripts.common.http_client import query
from launcher_scripts.common.packages import VERDICT_FILE
from launcher_scripts.config.security import read_keys
from launcher_scripts.contract import metric_names as names
from launcher_scripts.jobs.folders import JobEntry

_SECONDS = 2.0
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_GIB = 2.0**30

GPU_USE, GPU_USED, GPU_TOTAL = (
    f"nv_gpu_{name}" for name in ("utilization", "memory_used_bytes", "memory_total_bytes")
)


@dataclass(frozen=True)
class ServerLoad:
    """Load of a server; None for missing values.

    gpu_use:  mean share of the GPUs' time, 0 to 1
    gpu_used, gpu_total: bytes of memory of all GPUs
    kv_use:   share of the caches' tokens that hold keys and values, 0 to 1
    requests: rows answered since the start
    running, waiting: rows that run, and that wait for a place
    """

    gpu_use: float | None = None
    gpu_used: float | None = None
    gpu_total: float | None = None
    kv_use: float | None = None
    requests: int | None = None
    running: int | None = None
    waiting: int | None = None

    def gpu_text(self) -> str:
        if self.gpu_total is None or self.gpu_used is None:
            return ""
        share = "" if self.gpu_use is None else f"{self.gpu_use:.0%} "
        return f"{share}{self.gpu_used / _GIB:.1f}/{self.gpu_total / _GIB:.1f} GiB"

    def kv_text(self) -> str:
        return "" if self.kv_use is None else f"{self.kv_use:.0%}"

    def rows_text(self) -> str:
        """Rows that run, and where some wait, how many."""
        if self.running is None:
            return ""
        return f"{self.running}+{self.waiting}" if self.waiting else str(self.running)


def is_ready(ready: Mapping[str, Any]) -> bool | None:
    """Return whether the server of a ready file has loaded every model; None: nobody here can ask
    it.

    A closed server is asked through its gateway.
    """
    if "http" in ready:
        return _answer(str(ready["http"]), "/v2/health/ready") is not None
    address = _gateway(ready)
    return None if address is None else _answer(address, "/ready") is not None


def load_of(ready: Mapping[str, Any]) -> ServerLoad:
    """The load of the server of a ready file.

    A closed server is asked through its gateway, with the first of its keys, where they may be
    read.
    """
    if "metrics" in ready:
        return query_load(str(ready["metrics"]))
    address = _gateway(ready)
    if address is None or "api_keys" not in ready:
        return ServerLoad()
    try:
        keys = read_keys(Path(str(ready["api_keys"])), "deploy.gateway.api_keys")
    except (OSError, ServerError):  # another user's
        return ServerLoad()
    headers = {"Authorization": f"Bearer {next(iter(keys.values()))}"}
    return query_load(address, "/servers/metrics", headers)


def query_load(
    address: str, path: str = "/metrics", headers: Mapping[str, str] = _NO_HEADERS
) -> ServerLoad:
    """The load of the server whose metrics are at host:port."""
    text = _answer(address, path, headers)
    return ServerLoad() if text is None else parse_load(text)


def _gateway(ready: Mapping[str, Any]) -> str | None:
    """host:port of a server's gateway; None: it has none, or one that speaks TLS."""
    scheme, _, address = str(ready.get("openai", "")).partition("://")
    if scheme != "http" or "ranks" not in ready:  # a gateway's job has none
        return None
    return address.partition("/")[0]


def parse_load(text: str) -> ServerLoad:
    """The load in Prometheus' text format; samples of several GPUs and models are combined."""
    samples = names.parse_values(text)

    def total(name: str) -> float | None:
        return sum(samples[name]) if name in samples else None

    def count(metric: names.MetricSpec) -> int | None:
        value = total(metric.name)
        return None if value is None else int(value)

    use, tokens = samples.get(GPU_USE), total(names.CACHE_TOKENS.name)
    used_tokens = total(names.CACHE_USED.name)
    return ServerLoad(
        gpu_use=sum(use) / len(use) if use else None,
        gpu_used=total(GPU_USED),
        gpu_total=total(GPU_TOTAL),
        kv_use=used_tokens / tokens if tokens and used_tokens is not None else None,
        requests=count(names.SUCCESS),
        running=count(names.RUNNING),
        waiting=count(names.WAITING),
    )


def _answer(address: str, path: str, headers: Mapping[str, str] = _NO_HEADERS) -> str | None:
    """Return a server's response; None unless its status is 200."""
    try:
        status, text = query(address, path, _SECONDS, headers=headers)
    except OSError:
        return None
    return text if status == 200 else None


_ROUNDED_SECONDS = 1.0  # a verdict's date has whole seconds


@dataclass(frozen=True)
class Badge:
    """GO, NO-GO or INCONCLUSIVE, and the first reason."""

    verdict: str
    reason: str
    file: str

    def text(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def badge(folder: Path, record: JobRecord) -> Badge | None:
    """The verdict of the job in `folder`; None: it has none, or its file cannot be read.

    Runs share a results folder: the file is of the last one that was submitted before its date.
    """
    path = folder.parents[1] / VERDICT_FILE
    with contextlib.suppress(ClusterError, KeyError, TypeError, ValueError):
        values = read_json(path) if record.stage == "evaluate" else None
        if values is None or _judged_run(folder.parent, values) != folder:
            return None
        first: dict[str, Any] = next(iter(values["reasons"]), {})
        return Badge(str(values["verdict"]), str(first.get("text", "")), str(path))
    return None


def _judged_run(jobs: Path, verdict: dict[str, Any]) -> Path | None:
    """The folder of the run that a verdict is of."""
    judged = datetime.fromisoformat(verdict["date"]).timestamp() + _ROUNDED_SECONDS
    records = ((JobRecord.read(path.parent), path.parent) for path in jobs.glob(f"*/{RECORD}"))
    before = [(record.submitted, folder) for record, folder in records if record.submitted < judged]
    return max(before, default=(0.0, None))[1]


PROTOCOLS = ("http", "grpc", "metrics", "openai")
# Exit codes of `status`.
WELL, FAILED, NOT_YET, NOBODY_KNOWS = 0, 1, 3, 5


@dataclass(frozen=True)
class Status:
    """A job, or one replica of it.

    ready: what the server's ready file says, while the job runs; None: not ready
    answers: whether the server says so itself; None: not asked
    badge: what an evaluation decided; None: nothing
    """

    job: JobEntry
    job_id: str
    state: JobState
    ready: dict[str, Any] | None = None
    answers: bool | None = None
    load: ServerLoad = field(default_factory=ServerLoad)
    badge: Badge | None = None

    @property
    def is_service(self) -> bool:
        return self.job.record.ready_file is not None

    @property
    def held_back(self) -> bool:
        """Return whether the server waits for a verdict before it is published."""
        return self.ready is not None and bool(self.ready.get("candidate"))

    @property
    def serves(self) -> bool:
        return self.ready is not None and not self.held_back and self.answers is not False

    @property
    def word(self) -> str:
        """The state in one word: Slurm's, and what it means for a server."""
        if not (self.is_service and self.state.running):
            return self.state.name
        if self.ready is None:
            return "STARTING"
        if self.held_back:
            return "CANDIDATE"
        return "READY" if self.serves else "NOT ANSWERING"

    @property
    def blocked(self) -> bool:
        """Return whether the job waits for what will not come."""
        return self.state.waiting and self.state.reason in BLOCKING_REASONS

    @property
    def reason(self) -> str:
        """Why the job is not well, in a sentence where there is more to say than a word."""
        reason = self.state.reason
        if self.blocked:
            return f"{reason}, it will never start: {BLOCKING_REASONS[reason]}"
        return reason

    @property
    def endpoints(self) -> dict[str, str]:
        ready = self.ready or {}
        return {name: ready[name] for name in PROTOCOLS if name in ready}

    @property
    def exit_code(self) -> int:
        """Exit code of `status`: 0 serves or is done, 1 has failed, 3 is not so far, 5 unknown."""
        if self.state.name in (UNKNOWN, FORGOTTEN):
            return NOBODY_KNOWS
        if self.state.finished and not self.state.succeeded:
            return FAILED
        well = self.serves and self.state.running if self.is_service else self.state.finished
        return WELL if well else NOT_YET

    def to_json(self) -> dict[str, Any]:
        """All of it; `state` is the cluster's word, `status` what it means for a server."""
        record, state = self.job.record, asdict(self.state)
        return {
            "name": record.name,
            "run": self.job.run,
            "stage": record.stage,
            "cluster_type": record.cluster_type,
            "id": self.job_id,
            "folder": str(self.job.folder),
            "status": self.word,
            "state": state.pop("name"),
            **state,
            "ended": self.state.finished,
            "reason": self.reason,
            "verdict": None if self.badge is None else vars(self.badge),
            "ready": self.serves if self.is_service else None,
            "endpoints": self.endpoints,
            "models": (self.ready or {}).get("models", []),
            "ranks": (self.ready or {}).get("ranks", []),
            "load": vars(self.load),
        }


def query_statuses(jobs: Iterable[JobEntry], *, query_servers: bool = True) -> list[Status]:
    """The status of every job and replica, in order; they are asked at the same time."""
    pairs = [(job, job_id) for job in jobs for job_id in job.ids]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda pair: _status(*pair, query_servers=query_servers), pairs))


def read_job_state(job: JobEntry, job_id: str) -> JobState:
    """The state of a job or replica; its end is remembered in the job folder."""
    try:
        state = read_end(job.folder, job_id)
        if state is not None:
            return state
        state = job.cluster.state(job.folder, job.record, job_id)
    except ClusterError as error:  # a damaged job folder is no reason to say nothing of others
        return JobState(UNKNOWN, reason=str(error))
    if state.name == FORGOTTEN or not state.finished:
        return read_end(job.folder, job_id) or state
    with contextlib.suppress(ClusterError):  # the folder of somebody else's job
        write_end(job.folder, job_id, state)
    return state


def _status(job: JobEntry, job_id: str, *, query_servers: bool) -> Status:
    state = read_job_state(job, job_id)
    ready = _ready(job, job_id) if state.running else None
    if ready is None or not query_servers:
        return Status(job, job_id, state, ready, badge=badge(job.folder, job.record))
    answers = is_ready(ready)
    busy = load_of(ready) if answers else ServerLoad()
    return Status(job, job_id, state, ready, answers, busy)


def _ready(job: JobEntry, job_id: str) -> dict[str, Any] | None:
    """The ready file of this run of the server, and of no other."""
    if job.record.ready_file is None:
        return None
    shared = job.record.ready_path(job_id)
    ready = ready_of_run(job.folder / shared.name, job.folder)
    return ready or ready_of_run(shared, job.folder)


_POLL_SECONDS = 0.2
_STATE_SECONDS = 2.0
_CHUNK = 1 << 20
_TAIL_BYTES = 4 << 20
_MAX_REASONS = 5
_PLAIN_LINES = 5  # at the end of a log nothing is overlooked
# What says why a container could not start, among what follows from that: words of pyxis, of
# enroot, and of the launcher itself.
_REASON = re.compile(
    r"pyxis: (?:--container-|failed to |couldn't chdir|error: ).*"
    r"|enroot-\w+: .*|\[ERROR\] .*|^(?:\d+: )?error: .*"
)


def log_files(job: JobEntry) -> list[Path]:
    """The logs of a job's replicas, and of a server beside its client, as far as they are there."""
    paths = []
    for job_id in job.ids:
        paths.append(job.record.log_file(job.folder, job_id))
        paths.append(job.folder / f"server-{job.name}_{job_id}.out")
    return [path for path in paths if path.exists()]


def print_logs(jobs: Sequence[JobEntry], lines: int | None) -> dict[Path, int]:
    """Print every log, or its last lines; returns how much of each has been read."""
    paths = [path for job in jobs for path in log_files(job)]
    read = {}
    for path in paths:
        _head(path, len(paths))
        size = path.stat().st_size
        with path.open("rb") as file:
            if lines is None:
                while file.tell() < size:
                    sys.stdout.buffer.write(file.read(min(_CHUNK, size - file.tell())))
            else:
                sys.stdout.buffer.writelines(deque(file, maxlen=lines))
                size = file.tell()
        sys.stdout.buffer.flush()
        read[path] = size
    return read


def follow_logs(
    jobs: Sequence[JobEntry], choose: Callable[[], Sequence[JobEntry]], read: dict[Path, int]
) -> None:
    """Print what the logs gain until every job has ended.

    choose: chooses again, for jobs of later stages that are submitted meanwhile
    read:   bytes of each log that are printed already
    """
    last = next(reversed(read), None)
    looked = 0.0
    finished = False
    while True:
        for path in (path for job in jobs for path in log_files(job)):
            gained = _gained(path, read.get(path, 0))
            if gained:
                if path != last:
                    _head(path, 2)
                last = path
                read[path] = read.get(path, 0) + len(gained)
                sys.stdout.buffer.write(gained)
                sys.stdout.buffer.flush()
        if finished:
            return
        if time.monotonic() - looked > _STATE_SECONDS:
            looked = time.monotonic()
            finished = all(
                read_job_state(job, job_id).finished for job in jobs for job_id in job.ids
            )
        if not finished:
            time.sleep(_POLL_SECONDS)
        elif later := _later_jobs(jobs, choose):
            jobs, finished = [*jobs, *later], False


def _later_jobs(
    jobs: Sequence[JobEntry], choose: Callable[[], Sequence[JobEntry]]
) -> list[JobEntry]:
    """The jobs of further stages. On one machine each is submitted when the one before has ended,
    which takes the launcher a moment.
    """
    time.sleep(_POLL_SECONDS)
    stages = {job.record.stage for job in jobs}
    return [job for job in choose() if job.record.stage not in stages]


def tail(job: JobEntry, lines: int = 20) -> str:
    """The end of a job's logs, for an error; what says why comes first where other lines follow."""
    parts = []
    for path in log_files(job):
        log = list(_lines(path))
        matches = dict.fromkeys(match[0] for line in log if (match := _REASON.search(line)))
        last = "\n".join(log[-_PLAIN_LINES:])
        reasons = [reason for reason in matches if reason not in last][-_MAX_REASONS:]
        for label, lines_listed in (("lines", reasons), ("the end", log[-lines:])):
            text = "\n".join(f"  | {line}" for line in lines_listed)
            if lines_listed:
                parts.append(f"{label} of its log {path}:\n{text}")
    return "\n".join(parts)


def _lines(path: Path) -> Iterator[str]:
    """The lines of the last part of a log."""
    with path.open("rb") as file:
        file.seek(-min(_TAIL_BYTES, path.stat().st_size), os.SEEK_END)
        yield from file.read().decode("utf-8", errors="replace").rstrip().splitlines()


def _head(path: Path, count: int) -> None:
    """Print which log follows, if there are several."""
    if count > 1:
        print(f"==> {path} <==", flush=True)
    sys.stdout.flush()


def _gained(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start, os.SEEK_SET)
        return file.read(_CHUNK)
