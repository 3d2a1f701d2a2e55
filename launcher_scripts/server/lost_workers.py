"""Workers of Triton's Python backend that the server gave up while they started.

The server wants a sign of life from a starting worker every second (ReceiveMessageFromStub in
stub_launcher.cc of triton-inference-server/python_backend). A worker that was held up for longer,
because its node was too busy or was suspended, is lost even when it goes on. The server then ends
with an error, or is aborted by a lock in the memory that both shared, or waits for the worker's end
and never gets ready. Another start helps.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

SECOND_STARTS = 1
REASON = (
    "the server gave up a worker of its Python backend that was held up for more than a second "
    "while it started: the node is too busy, or was suspended; or the worker died"
)
_SIGNS = (
    "boost::interprocess::lock_exception",
    "' is not healthy.",
    "Failed to obtain the health mutex.",
)
# The server also waits so, briefly, for a first trial of the worker's program.
_WAITING_SECONDS = 15.0


def is_sign(line: str) -> bool:
    """Whether the line of a server's log says that it has given up a worker."""
    return any(sign in line for sign in _SIGNS)


class LostWorkerDetector:
    """Notices a starting server that waits for the end of a worker, which does not come."""

    def __init__(self, pid: int) -> None:
        self._threads = Path(f"/proc/{pid}/task")
        self._since: float | None = None

    def __call__(self) -> bool:
        """Whether it has waited long; always False where the kernel does not tell."""
        if not self._waits():
            self._since = None
            return False
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since > _WAITING_SECONDS

    def _waits(self) -> bool:
        with contextlib.suppress(OSError):
            for thread in self._threads.iterdir():
                if (thread / "wchan").read_text() == "do_wait":
                    return True
        return False
