"""Under which addresses a server is reached: from its own node, and from others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from launcher_scripts.common.hosts import address_towards
from launcher_scripts.config.security import LOOPBACK
from launcher_scripts.config.settings import DeploySettings, GatewayJobSettings
from launcher_scripts.server.ports import family_of

EVERY_ADDRESS = ("0.0.0.0", "::", "")
Listening = TypeVar("Listening", DeploySettings, GatewayJobSettings)
_ELSEWHERE = "192.0.2.1"  # of a network for documents
_REACH_SECONDS = 10.0


def local_address(host: str, port: int) -> str:
    """host:port for this node of what listens on `host`."""
    return _host_port(LOOPBACK if host in EVERY_ADDRESS else host, port)


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
    known = dict.fromkeys(_addresses_of(name), name) or dict.fromkeys(_way_out())
    for address, public in known.items():
        if _can_listen(address):
            return replace(settings, host=address, public_host=settings.public_host or public)
    return replace(settings, host=LOOPBACK)


def _addresses_of(name: str) -> list[str]:
    """The addresses that a name stands for, but those of this machine alone."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    except OSError:
        return []
    return [address for address in dict.fromkeys(found) if _is_reached(address)]


def _is_reached(address: str) -> bool:
    known = ipaddress.ip_address(address.partition("%")[0])
    return not (known.is_loopback or known.is_link_local or known.is_unspecified)


def _way_out() -> list[str]:
    """The address that this node's packets to other networks carry."""
    try:
        address = address_towards(_ELSEWHERE)
    except OSError:
        return []
    return [address] if _is_reached(address) else []


def _can_listen(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=family_of(address)):
            return True
    except OSError:
        return False


def _public_address(settings: Listening, host: str, port: int) -> str:
    """host:port under which clients reach what listens on `host`: LOOPBACK as it is.

    A configured one, else the one it listens on; for what listens everywhere the node's name, or
    the loopback address where the node cannot reach itself by name.
    """
    if host != LOOPBACK:
        host = settings.public_host or (_own_name(port) if host in EVERY_ADDRESS else host)
    return _host_port(host, port)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_name(port: int) -> str:
    """The node's name, if what listens on the port is reached by it."""
    name = socket.gethostname()
    try:
        with socket.create_connection((name, port), timeout=_REACH_SECONDS):
            return name
    except OSError:
        return LOOPBACK
