"""Whether the server that started this process still lives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

POLL_SECONDS = 1.0


def started_by(words: Sequence[bytes]) -> int:
    """The server's process id, by the stub's command line: its parent may have gone before now.

    words: triton_python_backend_stub MODEL REGION SIZE GROWTH SERVER ...
    """
    if words[0].endswith(b"triton_python_backend_stub") and len(words) > 5:
        return int(words[5])
    return os.getppid()


class ServerWatch:
    """Ends this process when its server is gone.

    Triton's stub waits in shared memory for a server that was killed, indefinitely where the server
    held a lock; its ranks, and those of other nodes, would stay with it. The kernel's own signal
    (PR_SET_PDEATHSIG) cannot be used: it comes when the thread that started the stub ends.
    """

    def __init__(self) -> None:
        self._server = started_by(Path("/proc/self/cmdline").read_bytes().split(b"\0"))
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="server-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if os.getppid() != self._server:
                os.kill(os.getpid(), signal.SIGKILL)
