"""Finding the server: the address in its ready file, waited for until the model is served."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.ready_file import STALE_SECONDS, replica_files, seconds_silent
from launcher_scripts.config.paths import is_same_path
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.served.client import Client

POLL_SECONDS = 0.2
PROBE_SECONDS = 10.0  # how long a server may take to say that it is ready


def connect(settings: EvaluateSettings) -> tuple[Client, dict[str, Any]]:
    """A client of the servers that the ready files name, and what the first of them says.

    Waits until every file is there and every server answers that the model is ready, at most
    settings.ready_timeout seconds. With several servers the content has their addresses under
    `replicas`; `protocol` is the client's, which is gRPC for a model that streams wherever the
    servers answer over it. Raises ServerError when that time is over.
    """
    deadline = time.monotonic() + settings.ready_timeout
    while True:
        reason, ready = _read_ready_files(settings)
        if ready is not None:
            with _client(ready, settings, PROBE_SECONDS) as probe:
                answers = probe.is_ready()
            if answers:
                ready = _for_streams(ready, settings)
                return _client(ready, settings, settings.request_timeout), ready
            reason = f"{_addresses(ready)}, which {settings.ready_file} names, does not "
            reason += "answer ready"
        if time.monotonic() >= deadline:
            raise ServerError(
                problem(
                    f"no server was ready within {settings.ready_timeout:g} s: {reason}",
                    change="evaluate.ready_timeout or evaluate.ready_file",
                )
            )
        time.sleep(POLL_SECONDS)


def _for_streams(ready: dict[str, Any], settings: EvaluateSettings) -> dict[str, Any]:
    """`ready`; of a model that streams, what the files say for gRPC where that is answered."""
    with _client(ready, settings, settings.request_timeout) as client:
        if not client.streams:
            return ready
    _, found = _read_ready_files(replace(settings, protocol="grpc"))
    if found is None:
        return ready
    with _client(found, settings, PROBE_SECONDS) as probe:
        return found if probe.is_ready() else ready


def _client(ready: dict[str, Any], settings: EvaluateSettings, request_timeout: float) -> Client:
    return Client(
        _addresses(ready),
        settings.model_name,
        protocol=ready["protocol"],
        request_timeout=request_timeout,
        tls=settings.grpc_tls,
    )


def _addresses(ready: dict[str, Any]) -> str:
    """The address to ask, or those of all replicas with commas between them."""
    return ",".join(ready.get("replicas", [ready[ready["protocol"]]]))


def _read_ready_files(settings: EvaluateSettings) -> tuple[str, dict[str, Any] | None]:
    """What the first server says, with all addresses; or why there is nothing to use yet."""
    found = []
    for path in replica_files(Path(settings.ready_file), settings.replicas):
        reason, ready = _read_ready_file(path, settings)
        if ready is None:
            return reason, None
        found.append(ready)
    if settings.replicas:
        found[0]["replicas"] = [ready[found[0]["protocol"]] for ready in found]
    return "", found[0]


def _read_ready_file(path: Path, settings: EvaluateSettings) -> tuple[str, dict[str, Any] | None]:
    """The server's ready file with the `protocol` to use, or why there is none to use yet.

    A closed server, whose gateway has keys, speaks gRPC alone.
    """
    try:
        ready = json.loads(path.read_text(encoding="utf-8"))
        ready["protocol"] = "grpc" if "#" in ready.get("grpc", "") else settings.protocol
        if ready["protocol"] not in ready:
            return f"{path} gives no {settings.protocol} address", None
        if settings.model_name not in ready.get("models", [settings.model_name]):
            return f"{path} names models {ready['models']}, not {settings.model_name}", None
        wanted = settings.server_job_folder
        folder = ready.get("job", {}).get("folder")
        if wanted is not None and not is_same_path(folder or "", wanted):
            return f"{path} is of the server of {folder}, not of {wanted}", None
        age = seconds_silent(ready)
        if age is not None and age > STALE_SECONDS:
            return f"{path} was last renewed {age:.0f} s ago: its server was killed", None
    except FileNotFoundError:
        return f"{path} is not there", None
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}", None
    return "", ready
