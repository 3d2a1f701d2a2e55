"""The logs of jobs, printed whole, from their end, or as they grow."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.jobs.folders import KnownJob
from launcher_scripts.jobs.status import job_state

_POLL_SECONDS = 0.2
_STATE_SECONDS = 2.0
_CHUNK = 1 << 20


def log_files(job: KnownJob) -> list[Path]:
    """The logs of a job's replicas, and of a server beside its client, as far as they are there."""
    paths = []
    for job_id in job.ids:
        paths.append(job.record.log_file(job.folder, job_id))
        paths.append(job.folder / f"server-{job.name}_{job_id}.out")
    return [path for path in paths if path.exists()]


def print_logs(jobs: Sequence[KnownJob], lines: int | None) -> dict[Path, int]:
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


def follow_logs(jobs: Sequence[KnownJob], read: dict[Path, int]) -> None:
    """Print what the logs gain until every job has ended."""
    last = next(reversed(read), None)
    looked = 0.0
    ended = False
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
        if ended:
            return
        if time.monotonic() - looked > _STATE_SECONDS:
            looked = time.monotonic()
            ended = all(job_state(job, job_id).ended for job in jobs for job_id in job.ids)
        if not ended:
            time.sleep(_POLL_SECONDS)


def tail(job: KnownJob, lines: int = 20) -> str:
    """The end of a job's logs, for an error."""
    parts = []
    for path in log_files(job):
        with path.open(encoding="utf-8", errors="replace") as file:
            end = "".join(f"  | {line}" for line in deque(file, maxlen=lines))
        parts.append(f"the end of its log {path}:\n{end.rstrip()}")
    return "\n".join(parts)


def _head(path: Path, count: int) -> None:
    """Which log follows, where there are several."""
    if count > 1:
        print(f"==> {path} <==", flush=True)
    sys.stdout.flush()


def _gained(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start, os.SEEK_SET)
        return file.read(_CHUNK)
