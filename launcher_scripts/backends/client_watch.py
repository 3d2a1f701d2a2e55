"""Watch for clients that have disconnected. Triton only says so when it is asked, so a thread asks
all the time.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Protocol

POLL_SECONDS = 0.1  # how often each client is asked about, if the thread may rest as it should
POLLS_AT_ONCE = 8


class Watched(Protocol):
    """Somebody's request."""

    def check_client(self) -> None:
        """End the request if its client has gone."""


class ClientWatch:
    """The thread that asks about the clients of the requests that are not answered yet."""

    def __init__(self, interval: float) -> None:
        """interval: how much longer the thread rests than it asks, at least"""
        self._interval = interval
        self._lock = threading.Lock()
        self._open: dict[Watched, None] = {}  # those asked about last come last
        self._some = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="client-watch", daemon=True)
        self._thread.start()

    def watch(self, request: Watched) -> None:
        with self._lock:
            self._open[request] = None
        self._some.set()

    def forget(self, request: Watched) -> None:
        with self._lock:
            self._open.pop(request, None)

    def close(self) -> None:
        self._closed = True
        self._some.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._some.wait()
            if self._closed:
                return
            started = time.monotonic()
            count = self._ask_some()
            spent = time.monotonic() - started
            share = POLL_SECONDS * min(1.0, POLLS_AT_ONCE / max(count, 1))
            time.sleep(max(share - spent, self._interval * spent))

    def _ask_some(self) -> int:
        """Ask about those whose turn it is; returns how many are open, and keeps none."""
        with self._lock:
            some = list(itertools.islice(self._open, POLLS_AT_ONCE))
            for request in some:
                self._open[request] = self._open.pop(request)
            count = len(self._open)
            if not count:
                self._some.clear()
        for request in some:
            request.check_client()
        return count
