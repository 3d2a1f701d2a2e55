"""Connections between ranks prove themselves, and listen where they are asked to."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.engine.distributed.communicator import (
    EVERY,
    LOOPBACK,
    interface_addresses,
    interface_towards,
    listening_address,
    published_addresses,
)
from launcher_scripts.engine.messages.message import Decoder, Failed, Stop
from launcher_scripts.engine.ranks import links
from launcher_scripts.engine.ranks.links import Link, Listener, connect

TOKEN = b"t" * 32
MESSAGES = Decoder(Failed, Stop)


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
    assert [other.receive(MESSAGES), other.receive(MESSAGES)] == [Failed("one"), Stop()]
    other.send(Stop())
    assert link.receive(MESSAGES) == Stop()
    assert other.other_host == link.local_host == LOOPBACK
    link.close()
    with pytest.raises(EOFError, match="the other end closed the connection"):
        other.receive(MESSAGES)
    other.close()


def test_a_link_is_closed_only_when_nobody_reads_it(listener, monkeypatch):
    """Otherwise the reader would read what took the place of the closed file."""
    link = connect([LOOPBACK], listener.port, TOKEN, 5)
    other = listener.arrived.get(timeout=60)
    connection, begun, going_on = link._connection, threading.Event(), threading.Event()
    real = connection.recv_bytes

    def read_slowly(maximum):
        begun.set()
        going_on.wait()
        return real(maximum)

    monkeypatch.setattr(connection, "recv_bytes", read_slowly)
    said = SimpleQueue()

    def read():
        try:
            link.receive(MESSAGES)
        except BaseException as error:
            said.put(error)

    threads = [threading.Thread(target=read), threading.Thread(target=link.close)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    with pytest.raises(EOFError):  # the link is shut down at once
        other.receive(MESSAGES)
    threads[1].join(0.2)
    assert not connection.closed
    going_on.set()
    assert isinstance(said.get(timeout=60), EOFError)
    for thread in threads:
        thread.join()
    assert connection.closed
    other.close()


def test_a_wrong_token_is_turned_away(listener):
    with pytest.raises(ServerError, match=r"no connection to rank 0: 127\.0\.0\.1"):
        connect([LOOPBACK], listener.port, b"x" * 32, 2)
    assert listener.arrived.empty()


def frame(data: bytes) -> bytes:
    """As multiprocessing's Connection sends it: the length, then the bytes."""
    return struct.pack("!i", len(data)) + data


def test_who_answers_with_the_others_challenge_is_turned_away(listener):
    """A mirror: it sends back whatever it is sent."""
    with socket.create_connection((LOOPBACK, listener.port), 5) as mirror:
        mirror.sendall(mirror.recv(36))
        mirror.sendall(frame(b"\0" * 32))
        assert mirror.recv(1) == b""
    assert listener.arrived.empty()


def test_one_rank_s_answer_proves_nothing_to_another():
    """Somebody waits for two ranks, and gives each the other's challenge and answer."""
    with socket.create_server((LOOPBACK, 0)) as false:
        port = false.getsockname()[1]

        def pass_on():
            with false.accept()[0] as one, false.accept()[0] as other:
                for _ in range(2):
                    sent = one.recv(36), other.recv(36)
                    one.sendall(sent[1])
                    other.sendall(sent[0])

        passing = threading.Thread(target=pass_on)
        passing.start()
        refusals: SimpleQueue[str] = SimpleQueue()

        def join():
            try:
                connect([LOOPBACK], port, TOKEN, 5).close()
            except ServerError as error:
                refusals.put(str(error))

        ranks = [threading.Thread(target=join) for _ in range(2)]
        for thread in ranks:
            thread.start()
        for thread in [*ranks, passing]:
            thread.join()
    said = [refusals.get(timeout=60) for _ in ranks]
    assert all("does not know this engine's token" in text for text in said), said


def test_an_engine_without_the_token_is_not_believed():
    """Who connects must not obey somebody who only listens on the port."""
    with socket.create_server((LOOPBACK, 0)) as false:
        port = false.getsockname()[1]

        def answer():
            connection, _ = false.accept()
            with connection:
                connection.sendall(frame(os.urandom(32)))
                connection.recv(72)
                connection.sendall(frame(os.urandom(32)))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerError, match="does not know this engine's token"):
            connect([LOOPBACK], port, TOKEN, 5)
        thread.join()


def open_sockets() -> set[str]:
    """Those of this process; what other tests leave to be collected may go at any time."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(entry.readlink()))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!i", -1) + b"\xff" * 8,
        struct.pack("!i", -5),
        struct.pack("!i", 1 << 30),
        frame(b""),
        frame(b"short"),
        frame(b"x" * 32) + frame(b"x" * 32),
    ],
    ids=repr,
)
def test_a_stranger_s_words_are_refused_and_leave_nothing(listener, said):
    before = open_sockets()
    with socket.create_connection((LOOPBACK, listener.port), 5) as stranger:
        stranger.sendall(said)
        with suppress(OSError):  # it may be refused before it ends
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(100):
                pass
    link = connect([LOOPBACK], listener.port, TOKEN, 5)
    listener.arrived.get(timeout=60).close()
    link.close()
    assert listener.arrived.empty()
    limit = time.monotonic() + 60
    while open_sockets() - before and time.monotonic() < limit:
        time.sleep(0.01)  # the listener's thread closes it
    assert not open_sockets() - before


def test_one_that_says_nothing_holds_up_nobody(listener):
    with socket.create_connection((LOOPBACK, listener.port), 5):
        link = connect([LOOPBACK], listener.port, TOKEN, 5)
        other = listener.arrived.get(timeout=60)
        link.send(Stop())
        assert other.receive(MESSAGES) == Stop()
        assert listener.arrived.empty()
        other.close()
        link.close()


def test_one_that_speaks_a_byte_at_a_time_is_turned_away_in_time(listener, monkeypatch):
    monkeypatch.setattr(links, "PROVE_SECONDS", 0.5)
    with socket.create_connection((LOOPBACK, listener.port), 5) as slow:
        slow.recv(36)
        with suppress(ConnectionError):
            for byte in frame(b"x" * 32) + struct.pack("!i", 32):
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
            slow.sendall(b"x")
        with suppress(ConnectionError):
            assert slow.recv(1) == b""
    assert listener.arrived.empty()


def test_a_message_that_stops_in_the_middle_ends_the_connection(listener):
    """One thread of rank 0 reads what all others send."""
    link = connect([LOOPBACK], listener.port, TOKEN, 5)
    other = listener.arrived.get(timeout=60)
    link._socket.sendall(struct.pack("!i", 100) + b"x")
    with pytest.raises(EOFError, match="temporarily unavailable"):
        other.receive(MESSAGES)
    link.close()
    other.close()


@pytest.mark.parametrize("size", [links.MAX_BYTES + 1, (1 << 64) - 1])
def test_the_size_of_a_message_is_bounded_before_it_is_read(listener, size):
    link = connect([LOOPBACK], listener.port, TOKEN, 5)
    other = listener.arrived.get(timeout=60)
    link._socket.sendall(struct.pack("!iQ", -1, size))
    with pytest.raises(EOFError, match="bad message length"):
        other.receive(MESSAGES)
    link.close()
    other.close()


def test_closing_ends_a_send_that_nobody_reads(listener):
    link = connect([LOOPBACK], listener.port, TOKEN, 5)
    other = listener.arrived.get(timeout=60)
    ended: SimpleQueue[type] = SimpleQueue()

    def send():
        try:
            while True:
                link.send_bytes(bytes(1 << 20))
        except OSError as error:
            ended.put(type(error))

    thread = threading.Thread(target=send)
    thread.start()
    while not select.select([link], [], [], 0)[0] and select.select([], [link], [], 0.1)[1]:
        pass  # until the buffers are full
    link.close()
    assert issubclass(ended.get(timeout=60), OSError)
    thread.join()
    other.close()


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
