"""Listening sockets of libraries, which have no switch to close them once the ranks have met.

gloo accepts whoever connects and keeps the connection indefinitely, so every stranger would cost a
rank a descriptor. Its loop aborts the process over a listener that is closed under it; so the
kernel is told to drop what comes for it: connections are opened no more, those there stay.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # of a classic BPF program: how many bytes of the packet are let through


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


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
    program = (_Instruction * 1)(_Instruction(_RETURN, 0, 0, 0))
    pointer = struct.pack("HL", len(program), ctypes.addressof(program))
    for descriptor in descriptors:
        with _duplicate(descriptor) as opened:
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def _duplicate(descriptor: int) -> socket.socket:
    """OSError where it is no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
