"""The command that has a running server serve the weights of another export."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher_scripts.cluster.record import RECORD, read_json, ready_of_run
from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.files import READY_FILES
from launcher_scripts.config.security import read_keys
from launcher_scripts.jobs.folders import choose_jobs

# Beside the time that requests have to end: reading an export of hundreds of GB takes minutes.
_READ_SECONDS = 3600.0
_FORBIDDEN = 403


def exchange_weights(
    results: Path | None, name: str, checkpoint: Path, mode: str, drain_timeout: float
) -> int:
    """Ask the gateway of a server for it, and print the results.

    name: a ready file, or a job as `choose_jobs` takes it
    Raises ServerError with the gateway's reason, and the server serves the weights before.
    """
    ready = ready_content(results, name)
    body = {
        "checkpoint": str(checkpoint.expanduser().absolute()),
        "mode": mode,
        "drain_timeout": drain_timeout,
    }
    started = time.monotonic()
    status, reply = 0, {}
    for key in admin_keys(ready):
        status, reply = post(str(ready["openai"]), body, key, _READ_SECONDS + drain_timeout)
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


def ready_content(results: Path | None, name: str) -> Mapping[str, Any]:
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


def admin_keys(ready: Mapping[str, Any]) -> list[str]:
    """The keys of the gateway, one of which is an admin's. Raises ServerError."""
    return list(read_keys(Path(str(ready["api_keys"])), "deploy.gateway.api_keys").values())


def post(
    openai: str, body: Mapping[str, Any], key: str, seconds: float
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the gateway's answer; openai: http(s)://host:port/v1"""
    url = urlsplit(openai)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection: HTTPConnection = HTTPConnection(url.netloc, timeout=seconds)
    if url.scheme == "https":
        context = ssl.create_default_context()
        connection = HTTPSConnection(url.netloc, timeout=seconds, context=context)
    try:
        with contextlib.closing(connection):
            connection.request("POST", "/admin/weights", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(f"the gateway at {openai} did not answer: {error}") from error
