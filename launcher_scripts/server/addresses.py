"""Ports and addresses of a server, and the ready files that publish them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from launcher_scripts.common.errors import Problems, ServerError, problem
from launcher_scripts.common.files import STALE_SECONDS, atomic_write, may_publish, seconds_silent
from launcher_scripts.common.hosts import address_towards, host_port
from launcher_scripts.config.gateway import GatewayJobSettings
from launcher_scripts.config.security import LOOPBACK
from launcher_scripts.config.settings import DeploySettings

PORT_NAMES = ("http", "grpc", "metrics")
GATEWAY = "gateway"


def reserved_ports(settings: DeploySettings) -> AbstractContextManager[dict[str, int]]:
    """The ports of settings.hosts, and of the GATEWAY where there is one, as `reserved` does."""
    return reserved(_requested(settings))


@contextlib.contextmanager
def reserved(requested: Iterable[tuple[str, str, int, str]]) -> Iterator[dict[str, int]]:
    """name -> port, a free one in place of 0, held until the end of the block.

    requested: name, address, number and configuration key of every port

    A held port is bound but not listening and marked reusable, so the server can listen on it
    while nobody else is given it. Triton opens its ports only after the models are loaded, which
    may take long. Raises ServerError naming every port that is in use and its key.
    """
    problems = Problems("the ports to listen on")
    ports = {}
    with contextlib.ExitStack() as stack:
        for name, host, port, key in requested:
            try:
                ports[name] = stack.enter_context(_hold(host, port)).getsockname()[1]
            except OSError as error:
                problems.add(_reason(error), **_advice(error, host, port, key))
        problems.raise_if_any(ServerError)
        yield ports


def gateway_host(settings: DeploySettings) -> str:
    """The address that the gateway listens on."""
    host = settings.gateway and settings.gateway.host
    return host or settings.hosts["grpc"]


def ports_in_use(hosts: Mapping[str, str], ports: Mapping[str, int]) -> dict[str, int]:
    """name -> port of those on which somebody else listens now."""
    used = {}
    for name, host in hosts.items():
        try:
            _probe(host, ports[name])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                used[name] = ports[name]
    return used


def address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _requested(settings: DeploySettings) -> Iterator[tuple[str, str, int, str]]:
    """Name, address, number and configuration key of every port."""
    for name, host in settings.hosts.items():
        yield name, host, getattr(settings, f"{name}_port"), f"deploy.server.{name}_port"
    if settings.gateway is not None and settings.gateway.port is not None:
        yield GATEWAY, gateway_host(settings), settings.gateway.port, "deploy.gateway.port"


def _hold(host: str, port: int) -> socket.socket:
    if port:
        _probe(host, port)
    return _bound(host, port)


def _probe(host: str, port: int) -> None:
    """Listen for a moment: raises OSError where somebody listens already."""
    with _bound(host, port) as probe:
        probe.listen(1)


def _bound(host: str, port: int) -> socket.socket:
    holder = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use by another program"
    return f"the port cannot be opened: {error.strerror or error}"


def _advice(error: OSError, host: str, port: int, key: str) -> dict[str, Any]:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return {"got": host, "change": f"{key.rpartition('.')[0]}.host"}
    return {"got": port, "change": f"{key} (0: a free one)"}


EVERY_ADDRESS = ("0.0.0.0", "::", "")
Listening = TypeVar("Listening", DeploySettings, GatewayJobSettings)
_ELSEWHERE = "192.0.2.1"  # of a network for documents
_CONNECT_SECONDS = 10.0


def local_address(host: str, port: int) -> str:
    """host:port for this node of what listens on `host`."""
    return host_port(LOOPBACK if host in EVERY_ADDRESS else host, port)


def addresses(settings: DeploySettings, ports: Mapping[str, int]) -> dict[str, str]:
    """host:port of every interface, as clients use it. The interfaces have to listen."""
    return {
        name: _public_address(settings, host, ports[name]) for name, host in settings.hosts.items()
    }


def openai_url(settings: Listening, host: str, port: int) -> str:
    """The base URL of the gateway that listens on `host`, as its clients are told it."""
    tls = settings.gateway is not None and settings.gateway.tls_certificate is not None
    return f"{'https' if tls else 'http'}://{_public_address(settings, host, port)}/v1"


def with_node_address(settings: Listening) -> Listening:
    """The settings with an address to listen on, where they leave it to the node.

    It is the one that the node's name stands for, which clients are then given; where that is no
    address that others reach, the one of the node's way to other networks, else the loopback one.
    """
    if settings.host is not None:
        return settings
    name = socket.gethostname()
    supported = dict.fromkeys(_addresses_of(name), name) or dict.fromkeys(_way_out())
    for address, public in supported.items():
        if _can_listen(address):
            return replace(settings, host=address, public_host=settings.public_host or public)
    return replace(settings, host=LOOPBACK)


def _addresses_of(name: str) -> list[str]:
    """The addresses that a name stands for, but those of this machine alone."""
    try:
        result = [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    except OSError:
        return []
    return [address for address in dict.fromkeys(result) if _is_reached(address)]


def _is_reached(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def _way_out() -> list[str]:
    """The address that this node's packets to other networks carry."""
    try:
        address = address_towards(_ELSEWHERE)
    except OSError:
        return []
    return [address] if _is_reached(address) else []


def _can_listen(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=address_family(address)):
            return True
    except OSError:
        return False


def _public_address(settings: Listening, host: str, port: int) -> str:
    """host:port under which clients reach what listens on `host`: LOOPBACK as it is.

    A configured one, else the one it listens on; for what listens everywhere the node's name, or
    the loopback address where the node cannot reach itself by name.
    """
    if host != LOOPBACK:
        host = settings.public_host or (_host_name(port) if host in EVERY_ADDRESS else host)
    return host_port(host, port)


def _host_name(port: int) -> str:
    """The node's name, if what listens on the port is reached by it."""
    name = socket.gethostname()
    try:
        with socket.create_connection((name, port), timeout=_CONNECT_SECONDS):
            return name
    except OSError:
        return LOOPBACK


RENEW_SECONDS = 5.0
_TIMEOUT_SECONDS = 2.5 * RENEW_SECONDS
_POLL_SECONDS = 0.2


class ReadyFiles:
    """The ready file of the results folder, which one living server has, and this run's own.

    A server that is held back has the candidate file first. Once it may publish, it takes the place
    of the server that has the ready file, which goes on without one.
    """

    def __init__(self, settings: DeploySettings | GatewayJobSettings) -> None:
        self._kind = "server" if settings.stage == "deploy" else settings.stage
        self._key = f"{settings.stage}.run.results_dir"
        self._shared = settings.ready_file
        folder = settings.job_folder
        self._local = None if folder is None else Path(folder) / self._shared.name
        self._identity: dict[str, Any] = {}
        self._written = 0.0
        self._before: dict[str, Any] = {}  # the facts of the server whose place it took
        self._published = self._shared
        candidate = settings.candidate_file if isinstance(settings, DeploySettings) else None
        if candidate is not None and not self._may_publish():
            self._shared = candidate

    @property
    def _held_back(self) -> bool:
        return self._shared != self._published

    def _may_publish(self) -> bool:
        return self._local is not None and may_publish(self._local.parent)

    def prepare(self) -> None:
        """Make the folder of the ready file, and remove what a dead server has left there.

        Raises ServerError where another server is alive.
        """
        try:
            self._shared.parent.mkdir(parents=True, exist_ok=True)
            self._reject_living()
            self._shared.unlink(missing_ok=True)
        except OSError as error:
            raise ServerError(
                problem(f"cannot write the ready file: {error}", change=self._key)
            ) from error

    def write(self, content: dict[str, Any]) -> None:
        """From now on others may use the server. Raises ServerError where one has come before."""
        self._reject_living()
        self._identity = json.loads(json.dumps(content))  # as it will be read
        if self._held_back:
            self._identity["candidate"] = True
        self._write(filter(None, (self._local, self._shared)))

    def publish(self) -> Path | None:
        """The ready file, as soon as a server that was held back may have it; None before."""
        if not (self._held_back and self._may_publish()):
            return None
        candidate, self._shared = self._shared, self._published
        self._before = self._content()
        del self._identity["candidate"]
        self._write(filter(None, (self._local, self._shared)))
        candidate.unlink(missing_ok=True)
        return self._shared

    def keep_alive(self) -> None:
        """Renew the files when it is time to; for those who watch a server."""
        if time.monotonic() - self._written > RENEW_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Say that the server still lives; who finds an old time knows that it was killed.

        A disk that is full now is no reason to end a server. Another server's file stays, but for
        the one whose place was taken: it may just have been renewing its file.
        """
        is_current = self._owns_shared() or (self._before and _same(self._content(), self._before))
        with contextlib.suppress(ServerError):
            self._write(filter(None, (self._local, self._shared if is_current else None)))

    def _write(self, paths: Iterable[Path]) -> None:
        self._written = time.monotonic()
        alive_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({**self._identity, "alive_at": alive_at}, indent=2) + "\n"
        for path in paths:
            try:
                atomic_write(path, text)
            except OSError as error:
                raise ServerError(f"cannot write {path}: {error}") from error

    def remove(self) -> None:
        """Take the address back; another server's stays."""
        if self._local is not None:
            self._local.unlink(missing_ok=True)
        if self._owns_shared():
            self._shared.unlink(missing_ok=True)

    def _owns_shared(self) -> bool:
        return bool(self._identity) and _same(self._content(), self._identity)

    def _content(self) -> dict[str, Any]:
        """Read the shared file; {} if it is missing or of another run."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self._shared.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return content
        return {}

    def _reject_living(self) -> None:
        """Raise ServerError if the shared file is another server's that is alive.

        One that was killed looks alive for a while: the file must be seen to be renewed.
        """
        first = self._content()
        try:
            silent = seconds_silent(first)
        except (TypeError, ValueError):
            return
        if silent is None or silent > STALE_SECONDS or self._owns_shared():
            return
        print(f"{self._shared} names a {self._kind}: waiting for its next sign of life", flush=True)
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while (content := self._content()) == first:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        if content:
            raise ServerError(
                problem(
                    f"another {self._kind} is alive with this results_dir",
                    got=f"{content.get('http') or content.get('openai')} of {content.get('job')}",
                    change=f"{self._key}, or stop that {self._kind} first",
                )
            )


def _same(content: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
    """Return whether both are of one run of a server, however long ago it said that it lives."""
    return {**content, "alive_at": None} == {**metadata, "alive_at": None}


def job_identity(settings: DeploySettings) -> dict[str, Any]:
    """Identify this run of a server: its job folder, and Slurm's job id and number of restarts."""
    return {
        "folder": settings.job_folder,
        "id": os.environ.get("SLURM_JOB_ID"),
        "replica": settings.replica,
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }
