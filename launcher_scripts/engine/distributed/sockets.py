"""Addresses, network interfaces and listening sockets of this node.

Listening sockets of libraries, which have no switch to close them once the ranks have met.

gloo accepts whoever connects and keeps the connection indefinitely, so every stranger would cost a
rank a descriptor. Its loop aborts the process over a listener that is closed under it; so the
kernel is told to drop what comes for it: connections are opened no more, those there stay.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.hosts import address_towards
from launcher_scripts.common.processes import BPF_RETURN, BpfProgram

LOOPBACK = "127.0.0.1"
EVERY = "0.0.0.0"
_SIOCGIFADDR = 0x8915
_CHANGE = "deploy.server.network_interface (an interface's name or a network as 10.0.0.0/16)"


def interface_addresses() -> dict[str, str]:
    """name -> address of every interface that has one, loopback last."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return dict(sorted(addresses.items(), key=lambda item: item[1].startswith("127.")))


def listening_address(requested: str | None) -> str:
    """The address to listen on for other nodes: that of the interface or network asked for.

    Without a wish every address; the connections prove themselves. Raises ServerError where this
    node has no such interface.
    """
    if requested is None:
        return EVERY
    addresses = interface_addresses()
    if requested in addresses:
        return addresses[requested]
    try:
        network = ipaddress.ip_network(requested, strict=False)
    except ValueError:
        network = None
    for address in addresses.values():
        if network is not None and ipaddress.ip_address(address) in network:
            return address
    choices = [f"{name} ({address})" for name, address in addresses.items()]
    message = f"{socket.gethostname()} has no such network interface"
    raise ServerError(problem(message, got=requested, choices=choices, change=_CHANGE))


def published_addresses(listening: str) -> tuple[str, ...]:
    """Return addresses at which others find a listening socket, the most likely first; names come
    last."""
    if listening != EVERY:
        return (listening,)
    return tuple(dict.fromkeys([*interface_addresses().values(), socket.gethostname()]))


def interface_towards(host: str) -> str | None:
    """The interface over which this node reaches `host`; None where that cannot be told."""
    local_address = address_towards(host)
    for name, address in interface_addresses().items():
        if address == local_address:
            return name
    return None


_SO_ATTACH_FILTER = 26


def listening_ports() -> dict[int, int]:
    """descriptor -> port of this process's sockets that listen for TCP connections."""
    result = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), _duplicate(int(entry.name)) as opened:
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = opened.getsockname()
                if opened.family in (socket.AF_INET, socket.AF_INET6):
                    result[int(entry.name)] = int(name[1])
    return result


def drop_connections(descriptors: Iterable[int]) -> None:
    """Let nobody connect to these listening sockets any more; OSError where that is forbidden."""
    program = BpfProgram((BPF_RETURN, 0, 0, 0))  # no byte of a packet passes
    for descriptor in descriptors:
        with _duplicate(descriptor) as opened:
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


def _duplicate(descriptor: int) -> socket.socket:
    """OSError where it is no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
