"""The commands on jobs. Each returns the exit code of the program."""

from __future__ import annotations

import getpass
import json
import shlex
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from launcher_scripts.cluster.record import FORGOTTEN, RECORD, read_json, ready_of_run
from launcher_scripts.common.errors import ClusterError, ServerError, problem
from launcher_scripts.common.files import READY_FILES
from launcher_scripts.common.hosts import host_port
from launcher_scripts.common.http_client import query
from launcher_scripts.common.processes import remove_leftovers
from launcher_scripts.common.rendering import align
from launcher_scripts.config.security import read_keys
from launcher_scripts.jobs.folders import JobEntry, NoSuchJob, choose_jobs, read_jobs
from launcher_scripts.jobs.status import (
    FAILED,
    NOBODY_KNOWS,
    NOT_YET,
    Status,
    follow_logs,
    log_files,
    print_logs,
    query_statuses,
    tail,
)

if TYPE_CHECKING:
    from rich.table import Table

LIST_COLUMNS = (
    "JOB",
    "RUN",
    "ID",
    "CLUSTER",
    "STATE",
    "NODES",
    "TIME",
    "EXIT",
    "REASON",
    "VERDICT",
)
STATUS_COLUMNS = (
    *("JOB", "RUN", "ID", "STATE", "NODES", "TIME"),
    *("HTTP", "GRPC", "OPENAI", "GPU", "KV", "ROWS", "REQUESTS", "REASON", "VERDICT"),
)
_COLOURS = {
    **dict.fromkeys(("READY", "COMPLETED"), "green"),
    **dict.fromkeys(("RUNNING", "STARTING", "COMPLETING", "CANDIDATE"), "cyan"),
    **dict.fromkeys(("PENDING", "CONFIGURING", "UNKNOWN", "FORGOTTEN"), "yellow"),
    "CANCELLED": "magenta",
}


def cells(status: Status, columns: Sequence[str]) -> list[str]:
    """The texts of one row."""
    state, endpoints, load = status.state, status.endpoints, status.load
    texts = {
        "JOB": status.job.name,
        "RUN": status.job.run,
        "ID": status.job_id,
        "CLUSTER": status.job.record.cluster_type,
        "STATE": status.word,
        "NODES": state.nodes,
        "TIME": "" if state.seconds is None else str(timedelta(seconds=state.seconds)),
        "EXIT": "" if state.exit_code is None else str(state.exit_code),
        "HTTP": endpoints.get("http", ""),
        "GRPC": endpoints.get("grpc", ""),
        "OPENAI": endpoints.get("openai", ""),
        "GPU": load.gpu_text(),
        "KV": load.kv_text(),
        "ROWS": load.rows_text(),
        "REQUESTS": "" if load.requests is None else str(load.requests),
        "REASON": status.reason,
        "VERDICT": "" if status.badge is None else status.badge.text(),
    }
    return [texts[column] for column in columns]


def plain_table(statuses: Sequence[Status], columns: Sequence[str]) -> str:
    """Columns of equal width, for pipes: one job per line, `-` for nothing."""
    rows = [list(columns), *([text or "-" for text in cells(s, columns)] for s in statuses)]
    return align(rows, left=True)


def coloured(statuses: Sequence[Status], columns: Sequence[str]) -> Table:
    """The same for a terminal; columns that say nothing are left out."""
    from rich.table import Table
    from rich.text import Text

    rows = [cells(status, columns) for status in statuses]
    used = [n for n, column in enumerate(columns) if any(r[n] for r in rows) or column == "STATE"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in used:
        table.add_column(columns[number], overflow="fold")
    for status, row in zip(statuses, rows, strict=True):
        colour = _COLOURS.get(status.word, "red")
        table.add_row(*(Text(row[n], style=colour if columns[n] == "STATE" else "") for n in used))
    return table


TIMED_OUT = 124  # as timeout(1) says it
_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """Options of the command line; see their help."""

    results: Path | None
    jobs: tuple[str, ...] = ()
    as_json: bool = False
    every: float | None = None
    follow: bool = False
    lines: int | None = None
    stage: str | None = None
    ready: bool = False
    timeout: float | None = None
    via: str | None = None
    port: int | None = None
    open: bool = False
    checkpoint: Path = Path()
    mode: str = ""
    drain_timeout: float = 0.0
    ca: str | None = None

    def select(self) -> list[JobEntry]:
        jobs = choose_jobs(self.results, self.jobs)
        selected = [job for job in jobs if self.stage in (None, job.record.stage)]
        if not selected:
            stages = dict.fromkeys(job.record.stage for job in jobs)
            raise NoSuchJob(
                problem("no job of that stage", got=self.stage, choices=stages, change="--stage")
            )
        return selected


def list_jobs(request: Request) -> int:
    """Every job and its state."""
    jobs, damaged = read_jobs(request.results)
    _complain(damaged)
    print_statuses(query_statuses(jobs, query_servers=False), LIST_COLUMNS, request.as_json)
    return 0


def status(request: Request) -> int:
    """The state of the named jobs, or of all that have not ended, and what their servers say."""
    statuses, damaged = _requested(request)
    _complain(damaged)
    if request.every is not None:
        return _watch(request, request.every)
    print_statuses(statuses, STATUS_COLUMNS, request.as_json)
    if not statuses:
        below = "" if request.results is None else f" below {request.results}"
        print(f"note: no job{below} runs or waits", file=sys.stderr)
    return worst(statuses)


def logs(request: Request) -> int:
    """The logs; with `follow` as they grow, until the jobs of all stages have ended."""
    jobs = request.select()
    if not request.follow and not any(map(log_files, jobs)):
        raise NoSuchJob("there is no log yet: " + ", ".join(str(job.folder) for job in jobs))
    read = print_logs(jobs, request.lines)
    if request.follow:
        follow_logs(jobs, request.select, read)
    return 0


def wait(request: Request) -> int:
    """Wait until every job has ended, or with `ready` until every server is ready.

    Returns 0, the exit code of the first job that failed, 1 for one that will never start, or 124
    when the time is over.
    """
    jobs = request.select()
    timeout = float("inf") if request.timeout is None else request.timeout
    deadline = time.monotonic() + timeout
    while True:
        statuses = query_statuses(jobs, query_servers=request.ready)
        lost = [s for s in statuses if s.state.name == FORGOTTEN or s.blocked]
        if lost:
            print(f"error: {_described(lost[0])}", file=sys.stderr)
            return FAILED if lost[0].blocked else NOBODY_KNOWS
        failed = [s for s in statuses if s.state.finished and _disappoints(s, request.ready)]
        if failed:
            print(f"error: {_described(failed[0])}\n{tail(failed[0].job)}", file=sys.stderr)
            return failed[0].state.exit_code or 1
        if all(_is_running(s, request.ready) for s in statuses):
            print_statuses(statuses, STATUS_COLUMNS, request.as_json)
            return 0
        if time.monotonic() > deadline:
            waiting = next(s for s in statuses if not _is_running(s, request.ready))
            print(f"error: after {timeout:g} s: {_described(waiting)}", file=sys.stderr)
            return TIMED_OUT
        time.sleep(_WAIT_SECONDS)


def info(request: Request) -> int:
    """Print the location of the jobs, and the command line that started them."""
    information = [
        _information(item) for item in query_statuses(request.select(), query_servers=False)
    ]
    if request.as_json:
        print(json.dumps(information, indent=2))
        return 0
    for number, values in enumerate(information):
        if number:
            print()
        width = max(map(len, values))
        lines = (f"{name:{width}}  {value}" for name, value in values.items() if value)
        print("\n".join(lines))
    return 0


def _information(item: Status) -> dict[str, str]:
    record, folder = item.job.record, item.job.folder
    submitted = datetime.fromtimestamp(record.submitted, tz=timezone.utc)
    return {
        "job": f"{record.name}/{item.job.run}",
        "stage": record.stage,
        "id": item.job_id,
        "cluster": record.cluster_type,
        "state": item.word,
        "reason": item.reason,
        "submitted": submitted.isoformat(timespec="seconds"),
        "after": record.after or "",
        "results": str(folder.parents[1]),
        "folder": str(folder),
        "settings": str(folder / record.settings),
        "script": str(Path(record.within or folder) / record.script),
        "log": str(record.log_file(folder, item.job_id)),
        "ready file": str(record.ready_path(item.job_id)) if record.ready_file else "",
        "command": shlex.join(record.command),
        "directory": record.directory,
    }


def resume(request: Request) -> int:
    """Run the command line of a job that has ended again; returns its exit code.

    The export keeps what is the same, and the evaluation continues with its journals.
    """
    (*_, item) = query_statuses(request.select(), query_servers=False)
    record = item.job.record
    if not item.state.finished:
        raise ClusterError(f"{_described(item)}: it can be resumed when it has ended")
    if not record.command:
        raise ClusterError(f"{item.job.folder / RECORD} has no command line")
    print(f"in {record.directory}: {shlex.join(record.command)}", flush=True)
    try:
        return subprocess.run(record.command, cwd=record.directory, check=False).returncode
    except OSError as error:
        raise ClusterError(f"cannot run the command of {item.job.folder}: {error}") from error


def tunnel(request: Request) -> int:
    """Print the ssh line by which a laptop reaches a ready server; with `open` also run it."""
    (*_, item) = query_statuses(request.select(), query_servers=False)
    endpoints = item.endpoints
    if not (item.is_service and endpoints):
        print(f"error: {_described(item)}: it has no address yet", file=sys.stderr)
        return NOT_YET
    address = endpoints.get("openai") or f"http://{endpoints.get('http') or endpoints['grpc']}"
    parts = urlsplit(address)
    port = request.port or parts.port
    via = request.via or f"{getpass.getuser()}@{socket.getfqdn()}"
    command = ["ssh", "-N", "-L", f"{port}:{host_port(str(parts.hostname), parts.port)}", via]
    print(shlex.join(command), flush=True)
    print(f"then: {parts.scheme}://127.0.0.1:{port}{parts.path}", flush=True)
    if not request.open:
        return 0
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise ClusterError(f"cannot run ssh: {error}") from error


# Beside the time that requests have to end: reading an export of hundreds of GB takes minutes.
_READ_SECONDS = 3600.0
_FORBIDDEN = 403


def swap(request: Request) -> int:
    """Have a server serve the weights of another export, and print the results.

    Raises ServerError with the gateway's reason, and the server serves the weights before.
    """
    ready = _ready_content(request.results, request.jobs[0])
    body = {
        "checkpoint": str(request.checkpoint.expanduser().absolute()),
        "mode": request.mode,
        "drain_timeout": request.drain_timeout,
    }
    keys = read_keys(Path(str(ready["api_keys"])), "deploy.gateway.api_keys").values()
    started = time.monotonic()
    status, reply = 0, dict[str, Any]()
    for key in keys:  # one of them is an admin's
        seconds = _READ_SECONDS + request.drain_timeout
        status, reply = _post(str(ready["openai"]), body, key, seconds, request.ca)
        if status != _FORBIDDEN:
            break
    if status != 200:
        reason = reply.get("error", {}).get("message") or json.dumps(reply)
        raise ServerError(f"the weights were not exchanged: {reason}")
    for server in reply["servers"]:
        print(
            f"{reply['model']} at {server['server']}: {server['digests']['system_fingerprint']}, "
            f"version {server['version']}; pause {server['pause_seconds']:.3f} s, "
            f"{server['mixed_rows']} rows went on, probe {server['difference']:.1g}"
        )
    print(f"served after {time.monotonic() - started:.1f} s")
    return 0


def _ready_content(results: Path | None, name: str) -> Mapping[str, Any]:
    """The content of the ready file of a server whose gateway has keys. Raises ServerError."""
    for path, ready in _ready_files(results, name):
        if "openai" not in ready:
            message = f"{path}: the server has no gateway, which exchanges weights"
            raise ServerError(problem(message, change="deploy.gateway.port"))
        if "api_keys" not in ready:
            message = f"{path}: weights are exchanged for the keys of admins alone"
            change = "deploy.gateway.api_keys and deploy.gateway.admins"
            raise ServerError(problem(message, change=change))
        return ready
    raise ServerError(problem("no server is ready", got=name, choices=["a ready file", "a job"]))


def _ready_files(results: Path | None, name: str) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    path = Path(name).expanduser()
    if not (path / RECORD).exists():
        files = [path / file for file in READY_FILES] if path.is_dir() else [path]
        for file in files:
            if file.is_file() and (content := read_json(file)) is not None:
                yield file, content
                return
    for job in choose_jobs(results, (name,)):
        for job_id in job.ids if job.record.ready_file else ():
            file = job.record.ready_path(job_id)
            if (content := ready_of_run(file, job.folder)) is not None:
                yield file, content


def _post(
    openai: str, body: Mapping[str, Any], key: str, seconds: float, ca: str | None
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the gateway's answer; openai: http(s)://host:port/v1, ca: a PEM file"""
    tls = None
    if openai.startswith("https:"):
        try:
            tls = ssl.create_default_context(cafile=ca)
        except OSError as error:  # SSLError, too
            message = f"cannot read the certificates: {error}"
            raise ServerError(problem(message, got=ca, change="--ca")) from error
    url, headers = openai.removesuffix("/v1"), {"Authorization": f"Bearer {key}"}
    try:
        status, text = query(
            url, "/admin/weights", seconds, method="POST", headers=headers, body=body, tls=tls
        )
        return status, json.loads(text)
    except ssl.SSLCertVerificationError as error:
        message = f"the certificate of the gateway at {openai} is not trusted: {error}"
        change = "--ca (a PEM file, for example deploy.gateway.tls_certificate)"
        raise ServerError(problem(message, got=ca, change=change)) from error
    except (OSError, ValueError) as error:
        raise ServerError(f"the gateway at {openai} did not answer: {error}") from error


def stop(request: Request) -> int:
    """Let the jobs end in order: servers finish their requests. Returns when they have ended."""
    return _end(request, lambda kind: kind.stop)


def cancel(request: Request) -> int:
    """End the jobs at once."""
    return _end(request, lambda kind: kind.cancel)


COMMANDS: dict[str, Callable[[Request], int]] = {
    "list": list_jobs,
    "status": status,
    "logs": logs,
    "info": info,
    "resume": resume,
    "wait": wait,
    "tunnel": tunnel,
    "swap": swap,
    "stop": stop,
    "cancel": cancel,
}


def print_statuses(statuses: Sequence[Status], columns: Sequence[str], as_json: bool) -> None:
    """Print a table, for people or for programs."""
    if as_json:
        print(json.dumps([item.to_json() for item in statuses], indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(coloured(statuses, columns))
    else:
        print(plain_table(statuses, columns))


def worst(statuses: Sequence[Status]) -> int:
    """The exit code for several jobs: a failure before ignorance, that before patience."""
    codes = {item.exit_code for item in statuses}
    return next((code for code in (FAILED, NOBODY_KNOWS, NOT_YET) if code in codes), 0)


def _complain(damaged: Sequence[str]) -> None:
    """Say which jobs the table leaves out."""
    for message in damaged:
        print(f"warning: left out: {message}", file=sys.stderr)


def _requested(request: Request) -> tuple[list[Status], list[str]]:
    """The named jobs, or all that have not ended; and what is wrong with the records of others."""
    if request.jobs:
        return query_statuses(request.select()), []
    jobs, damaged = read_jobs(request.results)
    return [s for s in query_statuses(jobs) if not s.state.finished], damaged


def _watch(request: Request, every: float) -> int:
    """The table again and again until Ctrl-C, in place where there is a terminal."""
    if not sys.stdout.isatty():
        while True:
            print_statuses(_requested(request)[0], STATUS_COLUMNS, request.as_json)
            sys.stdout.flush()
            time.sleep(every)
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            live.update(coloured(_requested(request)[0], STATUS_COLUMNS), refresh=True)
            time.sleep(every)


def _end(request: Request, end_job: Callable[[Any], Callable[..., None]]) -> int:
    jobs = request.select()
    for item in query_statuses(jobs, query_servers=False):
        if not item.state.finished:
            end_job(item.job.cluster)(item.job.folder, item.job.record, item.job_id)
    remove_leftovers()
    statuses = query_statuses(jobs, query_servers=False)
    print_statuses(statuses, LIST_COLUMNS, request.as_json)
    return 0 if all(item.state.finished for item in statuses) else 1


def _disappoints(item: Status, ready: bool) -> bool:
    return not item.state.succeeded or (ready and item.is_service)


def _is_running(item: Status, ready: bool) -> bool:
    return item.serves if ready and item.is_service else item.state.finished


def _described(item: Status) -> str:
    code = "" if item.state.exit_code is None else f" with exit code {item.state.exit_code}"
    reason = f" ({item.reason})" if item.reason else ""
    return f"job {item.job_id} {item.job.name} is {item.word}{code}{reason}"
