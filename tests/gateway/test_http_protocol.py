"""What the gateway reads of a request before anybody looks at its key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from launcher_scripts.gateway.app import make_app
from launcher_scripts.gateway.middleware import Keys
from launcher_scripts.gateway.service import MAX_HEAD, BoundedProtocol
from tests.gateway.fakes import SETTINGS, FakeBackend, listening, served
from tests.http_requests import is_served, open_client
from tests.processes import wait_for

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def opened(address: str, buffer: int = 1 << 16) -> Iterator[socket.socket]:
    """A connection; buffer: bytes of answers that wait for their reader"""
    found = urlsplit(address)
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        link.settimeout(60)
        link.connect((str(found.hostname), int(found.port or 0)))
        yield link


def answer(link: socket.socket) -> bytes:
    """Everything until the gateway closes the connection."""
    received = b""
    try:
        while part := link.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: ", b"b"),
        (b"GET /health HTTP/1.1\r\n", b"A"),
        (b"GET /", b"a"),
        (b"", b"\r\n"),
        (CHUNKED + b"1;", b"a=b;"),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"A: b\r\n"),
        (CHUNKED, b"1\r\n \r\n"),
    ],
    ids=["headers", "value", "name", "path", "lines", "extensions", "trailers", "tiny chunks"],
)
@pytest.mark.parametrize("keys", [{}, {"alice": "sk-1"}], ids=["open", "keyed"])
def test_a_head_without_end_is_refused(begin: bytes, repeated: bytes, keys: dict[str, str]) -> None:
    app = make_app([served(FakeBackend())], SETTINGS, Keys(keys))
    block = repeated * (4096 // len(repeated))
    with listening(app) as address, opened(address) as link:
        link.settimeout(0.01)
        sent, received = 0, b""
        link.sendall(begin)
        while not received and sent < 1_000_000:
            try:
                link.sendall(block)
                sent += len(block)
                received = link.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                break
        statuses = (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ", b"HTTP/1.1 401 ")
        assert received.startswith(statuses), received[:200]
        assert sent < 1_000_000
        assert is_served(f"{address}health")


def test_a_large_head_in_one_piece_is_refused_and_large_bodies_are_not() -> None:
    app = make_app([served(FakeBackend())], SETTINGS)
    with listening(app) as address:
        with opened(address) as link:
            link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * MAX_HEAD + b"\r\n\r\n")
            assert answer(link).startswith(b"HTTP/1.1 431 ")
        large = json.dumps({"prompt": "Hello", "max_tokens": 2, "user": "u" * 700_000}).encode()
        for body in (large, iter([large[i : i + 16384] for i in range(0, len(large), 16384)])):
            with open_client() as client:
                headers = {"Content-Type": "application/json"}
                response = client.post(f"{address}v1/completions", content=body, headers=headers)
                assert response.status_code == 200


def test_requests_one_after_the_other_have_their_own_limits() -> None:
    app = make_app([served(FakeBackend())], SETTINGS)
    with listening(app) as address, open_client() as client:
        for _ in range(4):
            response = client.get(f"{address}health", headers={"A": "b" * 30_000})
            assert (response.status_code, response.content != b"") == (200, True)


@pytest.mark.parametrize(
    ("half", "status"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost", b"HTTP/1.1 408 "),
        (POST + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "headers", "body"],
)
def test_half_a_request_ends_after_its_time(
    half: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "seconds", 0.2)
    app = make_app([served(FakeBackend())], SETTINGS)
    with listening(app) as address, opened(address) as link:
        link.sendall(half)
        assert answer(link).startswith(status)
        assert app.state.gateway.life.working == 0


def test_a_request_that_was_complete_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "seconds", 0.1)
    app = make_app([served(FakeBackend(waits=True))], SETTINGS)
    body = json.dumps({"prompt": "Hello", "max_tokens": 40, "timeout": 0.5}).encode()
    with listening(app) as address, opened(address) as link:
        head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        link.sendall(head + body)
        assert answer(link).startswith(b"HTTP/1.1 504 ")


def test_a_client_that_reads_nothing_gives_its_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is larger than all buffers on the way, so the gateway would wait indefinitely."""
    monkeypatch.setattr(BoundedProtocol, "unread_seconds", 0.2)
    backend = FakeBackend(lambda _: [5] * 20_000, at_once=100)
    app = make_app([served(backend, max_len=None)], SETTINGS)
    values = {"prompt": "Hello", "max_tokens": 20_000, "n": 4, "stream": True}
    body = json.dumps({**values, "stop": "never" * 9}).encode()
    with listening(app) as address, opened(address, buffer=4096) as link:
        link.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: app.state.gateway.admission.running)
        wait_for(lambda: not app.state.gateway.life.working)
        assert backend.running == app.state.gateway.admission.running == 0
        assert is_served(f"{address}health")
