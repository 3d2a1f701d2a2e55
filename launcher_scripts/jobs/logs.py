"""The logs of jobs, printed whole, from their end, or as they grow."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher_scripts.jobs.folders import Job
from launcher_scripts.jobs.status import job_state

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


def log_files(job: Job) -> list[Path]:
    """The logs of a job's replicas, and of a server beside its client, as far as they are there."""
    paths = []
    for job_id in job.ids:
        paths.append(job.record.log_file(job.folder, job_id))
        paths.append(job.folder / f"server-{job.name}_{job_id}.out")
    return [path for path in paths if path.exists()]


def print_logs(jobs: Sequence[Job], lines: int | None) -> dict[Path, int]:
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
    jobs: Sequence[Job], choose: Callable[[], Sequence[Job]], read: dict[Path, int]
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
            finished = all(job_state(job, job_id).finished for job in jobs for job_id in job.ids)
        if not finished:
            time.sleep(_POLL_SECONDS)
        elif later := _later_jobs(jobs, choose):
            jobs, finished = [*jobs, *later], False


def _later_jobs(jobs: Sequence[Job], choose: Callable[[], Sequence[Job]]) -> list[Job]:
    """The jobs of further stages. On one machine each is submitted when the one before has ended,
    which takes the launcher a moment.
    """
    time.sleep(_POLL_SECONDS)
    stages = {job.record.stage for job in jobs}
    return [job for job in choose() if job.record.stage not in stages]


def tail(job: Job, lines: int = 20) -> str:
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
