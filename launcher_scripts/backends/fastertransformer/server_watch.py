"""Whether the server that started this process still lives."""

from __future__ import annotations

import os
import signal
import threading

POLL_SECONDS = 1.0


class ServerWatch:
    """Ends this process when its server is gone.

    Triton's stub waits in shared memory for a server that was killed, indefinitely where the server
    held a lock; its ranks, and those of other nodes, would stay with it. The kernel's own signal
    (PR_SET_PDEATHSIG) cannot be used: it comes when the thread that started the stub ends.
    """

    def __init__(self) -> None:
        self._server = os.getppid()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="server-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if os.getppid() != self._server:
                os.kill(os.getpid(), signal.SIGKILL)
