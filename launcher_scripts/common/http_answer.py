"""A question to a server over HTTP, and its answer."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from types import MappingProxyType

UNIX = "unix:"  # how an address begins that is the path of a socket


class _SocketConnection(HTTPConnection):
    """HTTP over a socket of the file system."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def query(
    address: str,
    path: str,
    seconds: float,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str]:
    """Status and text of the answer of the server at host:port, or at unix:PATH.

    seconds: how long it may be silent
    Raises OSError where it does not answer, or not in HTTP.
    """
    try:
        with closing(_connection(address, seconds)) as connection:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
    except HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _connection(address: str, seconds: float) -> HTTPConnection:
    if address.startswith(UNIX):
        return _SocketConnection(address.removeprefix(UNIX), seconds)
    return HTTPConnection(address, timeout=seconds)
