"""Processes of ranks on this node: how they are started, how they ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass

from launcher_scripts.common.processes import (
    PRIVATE,
    Activity,
    is_suspended,
    own_environment,
    own_python,
    signal_when_parent_dies,
)

WORKER = "launcher_scripts.engine.ranks.worker"


@dataclass(frozen=True)
class RankOrder:
    """What a rank's process is told through its standard input: whom to speak to, as whom.

    checkpoint_dir, draft_checkpoint_dir: where this node has the shards of the model and of its
    draft model, when not where rank 0 has them
    """

    rank: int
    addresses: tuple[str, ...]
    port: int
    token: str
    checkpoint_dir: str | None = None
    draft_checkpoint_dir: str | None = None


class RankProcess:
    """One rank; the thread that starts it must outlive it, since it ends with that thread."""

    def __init__(self, order: RankOrder) -> None:
        self.rank = order.rank
        self._process = subprocess.Popen(
            [own_python(), "-m", WORKER, "--parent", str(os.getpid())],
            env=own_environment(),
            stdin=subprocess.PIPE,
            umask=PRIVATE,
        )
        self._activity = Activity(self._process.pid)
        # The token is in nobody's command line or environment.
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as told:
                told.write(json.dumps(asdict(order)).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def trouble(self) -> str | None:
        """Why the rank cannot go on; None while it runs."""
        code = self._process.poll()
        if code is None:
            return "is stopped (SIGSTOP)" if is_suspended(self.pid) else None
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def works(self) -> bool:
        """Whether it gets on; see Activity."""
        return self._activity.works()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout: float) -> bool:
        """Whether the rank ends within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
