"""Ports of the server: checked before it starts, and held while its models load."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from launcher_scripts.common.errors import Problems, ServerError
from launcher_scripts.config.settings import DeploySettings

PORT_NAMES = ("http", "grpc", "metrics")
GATEWAY = "gateway"


def reserved_ports(settings: DeploySettings) -> AbstractContextManager[dict[str, int]]:
    """The ports of settings.hosts, and of the GATEWAY where there is one, as `reserved` does."""
    return reserved(_wanted(settings))


@contextlib.contextmanager
def reserved(wanted: Iterable[tuple[str, str, int, str]]) -> Iterator[dict[str, int]]:
    """name -> port, a free one in place of 0, held until the end of the block.

    wanted: name, address, number and configuration key of every port

    A held port is bound but not listening and marked reusable, so the server can listen on it
    while nobody else is given it. Triton opens its ports only after the models are loaded, which
    may take long. Raises ServerError naming every port that is in use and its key.
    """
    problems = Problems("the ports to listen on")
    ports = {}
    with contextlib.ExitStack() as held:
        for name, host, port, key in wanted:
            try:
                ports[name] = held.enter_context(_hold(host, port)).getsockname()[1]
            except OSError as error:
                problems.add(_reason(error), **_advice(error, host, port, key))
        problems.raise_if_any(ServerError)
        yield ports


def gateway_host(settings: DeploySettings) -> str:
    """The address that the gateway listens on."""
    own = settings.gateway and settings.gateway.host
    return own or settings.hosts["grpc"]


def ports_in_use(hosts: Mapping[str, str], ports: Mapping[str, int]) -> dict[str, int]:
    """name -> port of those on which somebody else listens now."""
    taken = {}
    for name, host in hosts.items():
        try:
            _probe(host, ports[name])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                taken[name] = ports[name]
    return taken


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _wanted(settings: DeploySettings) -> Iterator[tuple[str, str, int, str]]:
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
    holder = socket.socket(family_of(host), socket.SOCK_STREAM)
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
