"""A running job script: its process group, its log and the end of both.

Every script leads a process group of its own, and the group is ended with it. Output goes to the
job's log; the log of what one waits for is repeated on the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher_scripts.cluster.job import Service, Submitted
from launcher_scripts.cluster.local_state import note_end, note_process
from launcher_scripts.cluster.record import read_json
from launcher_scripts.common.errors import ClusterError
from launcher_scripts.common.processes import signal_when_parent_dies

POLL_SECONDS = 0.05
_GROUP_SECONDS = 5.0
_LOG_TAIL_LINES = 20


class Process:
    """A running job script: its process group, and how much of its log has been repeated."""

    def __init__(self, submitted: Submitted) -> None:
        self.submitted = submitted
        self.log = submitted.log
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                ["bash", str(submitted.job.folder.script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(signal_when_parent_dies, signal.SIGTERM),
            )
        self._shown = 0
        self._stopped = False
        self._end_noted = False
        note_process(submitted.job.folder.root, self._popen.pid)

    @property
    def name(self) -> str:
        return f"{self.submitted.job.stage} job {self.submitted.job.name}"

    def exit_code(self) -> int | None:
        """None while the script runs; a death by signal counts as in a shell."""
        code = self._popen.poll()
        if code is None:
            return None
        code = 128 - code if code < 0 else code
        if not self._end_noted:
            self._end_noted = True
            root, job_id = self.submitted.job.folder.root, self.submitted.job_id
            note_end(root, job_id, code, stopped=self._stopped)
        return code

    def ended(self) -> bool:
        return self.exit_code() is not None

    def show_log(self) -> None:
        """Repeat on the terminal what the log has gained."""
        with self.log.open("rb") as log:
            log.seek(self._shown)
            gained = log.read()
        self._shown += len(gained)
        sys.stdout.flush()
        sys.stdout.buffer.write(gained)
        sys.stdout.buffer.flush()

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])

    def stop(self, leader_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End the script and all of its group.

        The leader is asked first and has `leader_seconds` to end its children in order, or until
        `hurry` says otherwise; what is left of the group is asked then, and killed at last. Where
        the leader ends without its children, they have the rest of that time.
        """
        deadline = time.monotonic() + leader_seconds
        if not self.ended():
            self._stopped = True
            self._popen.terminate()
            _wait_for(self.ended, leader_seconds, hurry)
        self._signal_group(signal.SIGTERM)
        left = max(_GROUP_SECONDS, deadline - time.monotonic())
        _wait_for(lambda: not self._group_lives(), left, hurry)
        self._signal_group(signal.SIGKILL)
        self._popen.wait()
        self.ended()

    def _group_lives(self) -> bool:
        """Dead members count until they are reaped; adopt_orphans makes that our part."""
        if self._popen.poll() is None:
            return True
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._popen.pid, os.WNOHANG) != (0, 0):
                pass
        return self._signal_group(0)

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return False
        return True


class ServiceProcess(Process):
    """A service: ready when one of its ready files names this run, and no other one."""

    def __init__(self, submitted: Submitted, service: Service) -> None:
        self.service = service
        super().__init__(submitted)

    def ready(self) -> Path | None:
        """The file that says so; None: it is not ready."""
        folder = str(self.submitted.job.folder.root)
        for path in dict.fromkeys((self.service.ready_file, self.service.first_file)):
            with contextlib.suppress(ClusterError):
                ready = read_json(path) or {}
                if (ready.get("job") or {}).get("folder") == folder:
                    return path
        return None


def _wait_for(done: Callable[[], bool], seconds: float, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not (done() or hurry()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
