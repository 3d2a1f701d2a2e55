"""Under which addresses a server is reached: from its own node, and from others."""

from __future__ import annotations

import socket
from dataclasses import replace

from launcher_scripts.security import LOOPBACK
from launcher_scripts.server.health import TritonClient
from launcher_scripts.server.ports import Ports
from launcher_scripts.settings import DeploySettings

_EVERY_ADDRESS = ("0.0.0.0", "::", "")


def local_host(host: str) -> str:
    """The address for this node of what listens on `host`."""
    return LOOPBACK if host in _EVERY_ADDRESS else host


def addresses(settings: DeploySettings, ports: Ports, client: TritonClient) -> dict[str, str]:
    """host:port of every interface, as clients use it."""
    found = {}
    for name, host in settings.hosts.items():
        reached = host if host == LOOPBACK else public_host(settings, host, client)
        found[name] = _address(reached, getattr(ports, name))
    return found


def public_host(settings: DeploySettings, host: str, client: TritonClient) -> str:
    """The address under which other nodes reach what listens on `host`.

    A configured one, else the one it listens on; for a server that listens everywhere the
    node's name, or the loopback address where the node cannot reach itself by name.
    """
    if settings.public_host is not None:
        return settings.public_host
    if host not in _EVERY_ADDRESS:
        return host
    name = socket.gethostname()
    return name if replace(client, host=name).ready() else LOOPBACK


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
