"""The answers that an engine still owes."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError

from launcher_scripts.common.errors import ServerError
from launcher_scripts.contract.requests import GenerateOutput


class Pending:
    """Futures that are neither answered nor cancelled; each leaves by itself when it is."""

    def __init__(self) -> None:
        self._futures: set[Future[GenerateOutput]] = set()
        self._lock = threading.Lock()

    def add(self, future: Future[GenerateOutput]) -> None:
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._done)

    def __len__(self) -> int:
        return len(self._futures)

    def fail(self, error: ServerError) -> None:
        """Answer all of them with `error`."""
        with self._lock:
            futures, self._futures = self._futures, set()
        for future in futures:
            try:
                future.set_exception(error)
            except InvalidStateError:
                continue  # answered or cancelled meanwhile

    def _done(self, future: Future[GenerateOutput]) -> None:
        with self._lock:
            self._futures.discard(future)
