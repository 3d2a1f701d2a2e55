"""Ends a model's process when its server is gone.

    python3 -m launcher_scripts.backends.fastertransformer.server_watch SERVER

Triton's stub waits in shared memory for a server that was killed, indefinitely where the server
held a lock, and may hold Python's own lock meanwhile: no thread of it can run. So a process of its
own looks after it: this module, run. The kernel's own signal (PR_SET_PDEATHSIG) cannot be used: it
comes when the thread that started the stub ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from launcher_scripts.common.processes import (
    process_stat,
    signal_when_parent_dies,
    this_environment,
    this_python,
)

POLL_SECONDS = 1.0


def started_by(words: Sequence[bytes]) -> int:
    """The server's process id, by the stub's command line: its parent may have gone before now.

    words: triton_python_backend_stub MODEL REGION SIZE GROWTH SERVER ...
    """
    if words[0].endswith(b"triton_python_backend_stub") and len(words) > 5:
        return int(words[5])
    return os.getppid()


class ServerWatch:
    """Ends this process when its server is gone; else its ranks, and those of other nodes, would
    stay with it.
    """

    def __init__(self) -> None:
        server = started_by(Path("/proc/self/cmdline").read_bytes().split(b"\0"))
        self._process = subprocess.Popen(
            [this_python(), "-m", __name__, str(server)],
            env=this_environment(),
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(signal_when_parent_dies, signal.SIGKILL),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def watch_parent(server: int) -> None:
    """Kill this process's parent once `server` is no more the parent of that."""
    model = os.getppid()
    with suppress(OSError):  # it has ended by itself
        while process_stat(model).parent == server:
            time.sleep(POLL_SECONDS)
        if os.getppid() == model:
            os.kill(model, signal.SIGKILL)


if __name__ == "__main__":
    watch_parent(int(sys.argv[1]))
