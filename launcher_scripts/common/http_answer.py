"""A question to a server over HTTP, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from types import MappingProxyType


def ask(
    address: str,
    path: str,
    seconds: float,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str]:
    """Status and text of the answer of the server at host:port.

    seconds: how long it may be silent
    Raises OSError where it does not answer, or not in HTTP.
    """
    try:
        with closing(HTTPConnection(address, timeout=seconds)) as connection:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
    except HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
