"""Health of a server, and proof that its ports refuse strangers."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import Problems, ServerError, problem
from launcher_scripts.common.hosts import host_port
from launcher_scripts.common.http_client import any_certificate, query
from launcher_scripts.config.gateway import OPEN_PATHS, GatewaySettings
from launcher_scripts.config.security import read_keys
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
    """The backend's status of one model: `<status dir>/<model>.json`.

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
                tuple((event, at) for event, at in values.get("timeline") or ()),
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
        """Return whether the server answers and has loaded every model."""
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
        return query(self.address, path, _REQUEST_SECONDS, method=method, headers=self.headers)


def all_ready(client: TritonClient, statuses: list[ModelStatus]) -> bool:
    """Triton has loaded every model, and every model of our backend says that it is ready."""
    if not client.ready():
        return False
    models = client.models()
    if not models or any(state != "READY" for state in models.values()):
        return False
    ready = {status.model for status in statuses if status.state == "ready"}
    served = {name for name in models if client.backend(name) == OUR_BACKEND_NAME}
    return served <= ready


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
            status, text = query(self._address, "/metrics", _METRICS_SECONDS)
        except OSError:
            return self._requests, True
        return _total(text, _COUNTERS), status != 200 or _total(text, _GAUGES) > 0


def _total(text: str, metrics: tuple[str, ...]) -> float:
    """The sum of the metrics' values, over all models."""
    values = names.parse_values(text)
    return sum(sum(values.get(name, ())) for name in metrics)


# One path of every part of Triton's interface, and those of the gateway that want a key.
PATHS = (
    ("GET", "/v2"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/{model}/config"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/models/{model}/infer"),
    ("POST", "/v2/models/{model}/generate"),
    ("POST", "/v2/repository/index"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/servers"),
    ("GET", "/servers/metrics"),
    ("GET", "/clients"),
    ("GET", "/tokenizer_info"),
    ("POST", "/admin/weights"),
    ("POST", "/admin/refit"),
    ("POST", "/admin/refit_socket"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/tokenize"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
)
_CLOSED = (401, 403)
_SECONDS = 5.0
_ANSWER_SECONDS = 120.0
# A client's first words in HTTP/2 (RFC 9113, 3.4), with an empty SETTINGS frame.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_SETTINGS = 4  # type of the frame that a server begins with


def check_key(openai: str, model: str, settings: GatewaySettings) -> None:
    """Ask the gateway for one token through its published address, with the first of its keys.

    openai: http://host:port/v1
    Raises ServerError where that is not answered.
    """
    key = next(iter(read_keys(Path(str(settings.api_keys)), "--api-keys").values()))
    try:
        status, text = query(
            openai,
            "/completions",
            _ANSWER_SECONDS,
            method="POST",
            headers={"Authorization": f"Bearer {key}"},
            body={"model": model, "prompt": "a", "max_tokens": 1},
            max_bytes=200,
            tls=_gateway_tls(settings),
        )
        reply = f"{status} {text[:200]}"
    except OSError as error:
        reply = f"{type(error).__name__}: {error}"
    if not reply.startswith("200 "):
        message = f"the gateway gives no token at its published address {openai}, with a key"
        change = "deploy.server.public_host, deploy.gateway.host"
        raise ServerError(problem(message, got=reply, change=change))


def check_closed(pids: Iterable[int], model: str, gateway_port: int | None = None) -> None:
    """Ask every port that the processes listen on without a key. Raises ServerError if one answers.

    gateway_port: where some paths are open to everybody
    """
    problems = Problems("the ports of the server, which has API keys")
    for host, port in sorted(set(listening(pids))):
        for method, path, reply in open_answers(host, port, model):
            if port != gateway_port or path not in OPEN_PATHS:
                problems.add(f"{host}:{port} answers {method} {path} without a key", got=reply)
    problems.raise_if_any(ServerError)


def open_answers(host: str, port: int, model: str) -> Iterator[tuple[str, str, str]]:
    """(method, path, answer) of everything at a port that answers without a key or certificate."""
    for tls in (False, True):
        for method, template in PATHS:
            path = template.format(model=model)
            reply = _query(host, port, method, path, tls)
            if reply is None:  # it speaks no HTTP
                break
            if reply not in _CLOSED:
                yield method, path, str(reply)
        if _speaks_http2(host, port, tls):
            yield "gRPC", "(any)", "HTTP/2"


def listening(pids: Iterable[int]) -> Iterator[tuple[str, int]]:
    """(address to ask, port) of the TCP sockets on which the processes listen (proc_net(5))."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(descriptor.readlink()))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in inodes:
                    yield _address(*local.split(":"))


def _address(host: str, port: str) -> tuple[str, int]:
    """An address of /proc/net, whose 32-bit words are those of the machine, little-endian."""
    raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    if raw.startswith(bytes(10) + b"\xff\xff"):  # IPv4 on a socket of IPv6
        raw = raw[12:]
    if not any(raw):
        return ("127.0.0.1" if len(raw) == 4 else "::1"), int(port, 16)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)


def _query(host: str, port: int, method: str, path: str, tls: bool) -> int | None:
    """The status of the answer; None where there is none in HTTP."""
    body: dict[str, str] | None = {} if method == "POST" else None
    context = any_certificate() if tls else None
    with contextlib.suppress(OSError):
        url = f"{'https' if tls else 'http'}://{host_port(host, port)}"
        return query(url, path, _SECONDS, method=method, body=body, max_bytes=0, tls=context)[0]
    return None


def _speaks_http2(host: str, port: int, tls: bool) -> bool:
    """Return whether gRPC lets in whoever comes: the server begins to speak HTTP/2."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=_SECONDS) as plain,
        any_certificate("h2").wrap_socket(plain)
        if tls
        else contextlib.nullcontext(plain) as opened,
    ):
        opened.sendall(_HTTP2)
        head = opened.recv(9)
        return len(head) == 9 and head[3] == _SETTINGS
    return False


def _gateway_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Trust of the very certificate of the gateway's settings alone."""
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(cafile=settings.tls_certificate)
    context.check_hostname = False  # the published address may be a number
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
