"""Questions over HTTP, to servers of all sorts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from launcher_scripts.common.http_client import query

FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nno \xff"


@contextlib.contextmanager
def server(answer: bytes) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that says this to one client, and what that one asked."""
    asked: list[str] = []

    def serve() -> None:
        connection, _ = opened.accept()
        with connection:
            asked.extend(connection.recv(4096).decode().splitlines())
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as opened:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{opened.getsockname()[1]}", asked
        thread.join(30)


def test_status_and_text() -> None:
    with server(FOUND) as (address, asked):
        said = query(address, "/v2", 30, method="POST", headers={"key": "secret"})
    assert said == (404, "no \N{REPLACEMENT CHARACTER}")
    assert asked[0] == "POST /v2 HTTP/1.1"
    assert "key: secret" in asked


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n", FOUND[:-2]])
def test_what_is_no_answer_is_one_kind_of_error(answer: bytes) -> None:
    with server(answer) as (address, _), pytest.raises(OSError, match=r"."):
        query(address, "/", 30)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:80", "node7:http"])
def test_nobody_is_there(address: str) -> None:
    with pytest.raises(OSError, match=r"."):
        query(address, "/", 30)


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        query(f"127.0.0.1:{silent.getsockname()[1]}", "/", 0.1)
