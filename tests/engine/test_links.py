"""Connections between ranks prove themselves, and listen where they are asked to."""

from __future__ import annotations

import os
import socket
import threading
from queue import SimpleQueue

import pytest

from launcher_scripts.engine import links
from launcher_scripts.engine.interfaces import (
    EVERY,
    LOOPBACK,
    interface_addresses,
    interface_towards,
    listening_address,
    published_addresses,
)
from launcher_scripts.engine.links import Link, Listener, connect
from launcher_scripts.engine.messages import Failed, Stop
from launcher_scripts.errors import ServerError

TOKEN = b"t" * 32


@pytest.fixture
def listener():
    arrived: SimpleQueue[Link] = SimpleQueue()
    made = Listener(LOOPBACK, TOKEN, arrived.put)
    made.arrived = arrived
    yield made
    made.close()


def test_both_ends_speak_once_proven(listener):
    link = connect(["127.0.0.2", LOOPBACK], listener.port, TOKEN, 5)
    other = listener.arrived.get(timeout=60)
    link.send(Failed("one"))
    link.send(Stop())
    assert [other.receive(), other.receive()] == [Failed("one"), Stop()]
    other.send(Stop())
    assert link.receive() == Stop()
    assert other.other_host == link.own_host == LOOPBACK
    link.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def test_a_wrong_token_is_turned_away(listener):
    with pytest.raises(ServerError, match=r"no connection to rank 0: 127\.0\.0\.1"):
        connect([LOOPBACK], listener.port, b"x" * 32, 2)
    assert listener.arrived.empty()


def test_who_answers_with_the_others_challenge_is_turned_away(listener):
    """A mirror: it sends back whatever it is sent."""
    with socket.create_connection((LOOPBACK, listener.port), 5) as mirror:
        mirror.sendall(mirror.recv(32))
        mirror.sendall(b"\0" * 32)
        assert mirror.recv(1) == b""
    assert listener.arrived.empty()


def test_an_engine_without_the_token_is_not_believed():
    """Who connects must not obey somebody who only listens on the port."""
    with socket.create_server((LOOPBACK, 0)) as false:
        port = false.getsockname()[1]

        def answer():
            connection, _ = false.accept()
            with connection:
                connection.sendall(os.urandom(32))
                connection.recv(64)
                connection.sendall(os.urandom(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerError, match="does not know this engine's token"):
            connect([LOOPBACK], port, TOKEN, 5)
        thread.join()


def test_one_that_says_nothing_holds_up_nobody(listener, monkeypatch):
    monkeypatch.setattr(links, "PROVE_SECONDS", 2.0)
    with socket.create_connection((LOOPBACK, listener.port), 5):
        link = connect([LOOPBACK], listener.port, TOKEN, 5)
        listener.arrived.get(timeout=60).close()
        link.close()


def test_interfaces():
    addresses = interface_addresses()
    assert addresses["lo"] == LOOPBACK
    assert listening_address(None) == EVERY
    assert listening_address("lo") == LOOPBACK
    assert listening_address("127.0.0.0/8") == LOOPBACK
    assert interface_towards(LOOPBACK) == "lo"
    assert published_addresses(LOOPBACK) == (LOOPBACK,)
    assert set(addresses.values()) < set(published_addresses(EVERY))
    with pytest.raises(ServerError, match=r"no such network interface.*ib7.*lo \(127.0.0.1\)"):
        listening_address("ib7")
