"""The order in which requests get their responses, and the thread that sends them.

The engine's stepping thread only says which request has news. The thread here turns the newest
state of a request into tensors and sends them: a slow client holds nobody up, and where tokens come
faster than responses can be sent, a response brings several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from launcher_scripts.backends.client_watch import ClientWatch

# How long the sending thread rests after a response, as a share of the time that it took, while
# several requests wait for one. The thread that steps needs Python's lock, too: without rests 128
# clients get more responses, and 15 % fewer tokens.
REST_SHARE = 0.75
WATCH_REST = 15.0  # of the thread that asks about clients, for the same reason


class Answering(Protocol):
    """One request on its way back."""

    def send_news(self, *, alone: bool) -> None:
        """Send a response if there is anything that the ones before did not have."""


class Answers:
    """The thread that sends responses, and the queue of requests that have news.

    Requests with a first or last response go before those in between, so that nobody's first token
    waits for everybody else's next one.
    """

    def __init__(self, on_failure: Callable[[str, int], None]) -> None:
        """on_failure: is called by the thread when rows of a request will not be answered: why (a
        reason of metric_names), and how many
        """
        self.on_failure = on_failure
        self.client_watch = ClientWatch(WATCH_REST)
        self._lock = Lock()
        self._urgent: dict[Answering, None] = {}
        self._others: dict[Answering, None] = {}
        self._tickets: SimpleQueue[bool] = SimpleQueue()  # one for each in the two queues
        self._thread = Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def put(self, answer: Answering, *, urgent: bool) -> None:
        """Have the thread send what is new of `answer`; returns at once."""
        with self._lock:
            queued = answer in self._others
            if answer in self._urgent or (queued and not urgent):
                return
            self._others.pop(answer, None)
            (self._urgent if urgent else self._others)[answer] = None
        if not queued:
            self._tickets.put(True)

    def close(self) -> None:
        """Return when everything that is queued was sent."""
        self._tickets.put(False)
        self._thread.join()
        self.client_watch.close()

    def _run(self) -> None:
        while self._tickets.get():
            start = time.perf_counter()
            self._send_next()
            if not self._urgent and len(self._others) > 1:
                time.sleep(REST_SHARE * (time.perf_counter() - start))
        while self._urgent or self._others:
            self._send_next()

    def _send_next(self) -> None:
        with self._lock:
            queue = self._urgent or self._others
            answer = next(iter(queue))
            del queue[answer]
            alone = not (self._urgent or self._others)
        answer.send_news(alone=alone)
