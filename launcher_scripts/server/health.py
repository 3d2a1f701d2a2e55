"""Is the server well: what Triton answers, and what our backend writes into its status files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.http_answer import ask
from launcher_scripts.contract import metric_names as names

OUR_BACKEND_NAME = "fastertransformer"
_REQUEST_SECONDS = 10.0
_METRICS_SECONDS = 2.0
_MAX_METRICS_INTERVAL = 5.0
# Triton's counters of requests, which also count those of text models and encoders, and our gauges.
_COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    names.PREFILL.samples[2],
)
_GAUGES = ("nv_inference_pending_request_count", names.RUNNING.name, names.WAITING.name)


@dataclass(frozen=True)
class ModelStatus:
    """What the backend says of one model: `<status dir>/<model>.json`.

    state: loading, ready or failed; ranks: rank, pid, host and device of each; timeline: what was
    done when in its start, in seconds since 1970
    """

    model: str
    state: str
    reason: str | None = None
    ranks: tuple[dict[str, Any], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    timeline: tuple[tuple[str, float], ...] = ()


def read_statuses(folder: Path) -> list[ModelStatus]:
    """All status files, by model name; they are written atomically, so each is whole."""
    statuses = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            status = ModelStatus(
                path.stem,
                values["state"],
                values.get("reason"),
                tuple(values.get("ranks") or ()),
                values.get("versions") or {},
                tuple((what, at) for what, at in values.get("timeline") or ()),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"cannot read the backend's status file {path}: {error}") from error
        statuses.append(status)
    return statuses


def failures(statuses: list[ModelStatus]) -> list[str]:
    """Why models failed, in the backend's words."""
    return [
        f"model {status.model} failed: {status.reason or 'no reason given'}"
        for status in statuses
        if status.state == "failed"
    ]


@dataclass(frozen=True)
class TritonClient:
    """The few questions about health, asked over Triton's HTTP interface (KServe v2).

    address: host:port
    headers: what opens interfaces that are restricted
    """

    address: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def ready(self) -> bool:
        """Whether the server answers and has loaded every model."""
        try:
            return self._ask("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def models(self) -> dict[str, str]:
        """name -> state of every model in the repository."""
        index = self._json("POST", "/v2/repository/index")
        return {entry["name"]: entry.get("state", "UNAVAILABLE") for entry in index}

    def backend(self, model: str) -> str:
        """The backend of a loaded model; empty for an ensemble."""
        return str(self._json("GET", f"/v2/models/{model}/config").get("backend", ""))

    def version(self) -> str:
        return str(self._json("GET", "/v2").get("version", "unknown"))

    def _json(self, method: str, path: str) -> Any:
        try:
            status, text = self._ask(method, path)
        except OSError as error:
            raise ServerError(f"the server does not answer {method} {path}: {error}") from error
        if status != 200:
            raise ServerError(f"the server answers {method} {path} with {status}: {text}")
        return json.loads(text)

    def _ask(self, method: str, path: str) -> tuple[int, str]:
        return ask(self.address, path, _REQUEST_SECONDS, method=method, headers=self.headers)


def all_ready(client: TritonClient, statuses: list[ModelStatus]) -> bool:
    """Triton has loaded every model, and every model of our backend says that it is ready."""
    if not client.ready():
        return False
    models = client.models()
    if not models or any(state != "READY" for state in models.values()):
        return False
    ready = {status.model for status in statuses if status.state == "ready"}
    ours = {name for name in models if client.backend(name) == OUR_BACKEND_NAME}
    return ours <= ready


class IdleDetector:
    """Detects a server without requests for a time, by its metrics.

    A server that does not answer counts as busy.
    """

    def __init__(self, address: str, timeout: float) -> None:
        """address: of the metrics, host:port or unix:PATH;  timeout: in seconds"""
        self._address = address
        self._timeout = timeout
        self._interval = min(_MAX_METRICS_INTERVAL, timeout / 4)
        self._requests: float | None = None
        self._active_at = self._next = time.monotonic()

    def __call__(self) -> bool:
        """Returns True once no request came for the time; asks the server every few seconds."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._interval
        requests, busy = self._read()
        if busy or requests != self._requests:
            self._requests, self._active_at = requests, now
        return now - self._active_at >= self._timeout

    def _read(self) -> tuple[float | None, bool]:
        """The number of requests since the start, and whether some run or wait."""
        try:
            status, text = ask(self._address, "/metrics", _METRICS_SECONDS)
        except OSError:
            return self._requests, True
        return _total(text, _COUNTERS), status != 200 or _total(text, _GAUGES) > 0


def _total(text: str, metrics: tuple[str, ...]) -> float:
    """The sum of the metrics' values, over all models."""
    values = re.findall(rf"^(?:{'|'.join(metrics)})(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))
