"""Steps and ranks that are forked from a process that has imported what all of them do.

That is most of what their start costs. Some tests start them as they are where a user runs them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
STEPS = "launcher_scripts.steps"
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "httpx",
        "launcher_scripts.engine.ranks.worker",
        "launcher_scripts.engine.runner.loading",
        "launcher_scripts.engine.distributed.communicator",
        f"{STEPS}.start_server",
        f"{STEPS}.start_gateway",
        f"{STEPS}.run_gateway",
        __name__,
    ]
)


class ForkedStep:
    """Stands for the Popen of `python -m launcher_scripts.steps.<step>`."""

    def __init__(
        self, step: str, arguments: Sequence[str], env: dict[str, str], outputs: tuple[str, str]
    ) -> None:
        self._process = FORKSERVER.Process(target=run_step, args=(step, arguments, env, outputs))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_step(
    step: str, arguments: Sequence[str], env: dict[str, str], outputs: tuple[str, str]
) -> None:
    """Be the step, from its first line on."""
    os.chdir(CHECKOUT)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # so that TMPDIR counts
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    module = f"{STEPS}.{step}"
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
