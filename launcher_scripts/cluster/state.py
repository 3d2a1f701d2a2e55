"""What has become of a job, in Slurm's words for every kind of cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "RESIZING", "STAGE_OUT"})
# A cluster that cannot be asked; and one that has forgotten the job.
UNKNOWN, FORGOTTEN = "UNKNOWN", "FORGOTTEN"


@dataclass(frozen=True)
class JobState:
    """One look at a job.

    name:      Slurm's state; UNKNOWN: nobody answers, FORGOTTEN: nobody knows the job any more
    exit_code: of a job that has ended, as in a shell
    nodes:     where it runs or ran, in Slurm's notation
    reason:    why it waits or has failed, in the cluster's word
    seconds:   for how long it has run
    restarts:  how often it was started again
    """

    name: str
    exit_code: int | None = None
    nodes: str = ""
    reason: str = ""
    seconds: int | None = None
    restarts: int = 0

    @property
    def waiting(self) -> bool:
        return self.name in WAITING

    @property
    def running(self) -> bool:
        return self.name in RUNNING

    @property
    def ended(self) -> bool:
        return not (self.waiting or self.running or self.name == UNKNOWN)

    @property
    def succeeded(self) -> bool:
        return self.name == "COMPLETED"


def wait_for(done: Callable[[], bool], seconds: float, pause: float = 0.2) -> bool:
    """Whether `done` came true within that time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
