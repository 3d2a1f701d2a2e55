"""Ranks of these tests' engines are forked from a process that has imported torch.

That import takes seconds of every rank, and is the same for all. Tests of how ranks are started,
watched and ended are marked `started_ranks`: theirs are started as they are where a server runs.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from dataclasses import asdict

import pytest

from launcher_scripts.common.processes import Activity, is_suspended
from launcher_scripts.engine.ranks import ranks, worker
from launcher_scripts.engine.ranks.peers import RankOrder
from tests.forked_steps import FORKSERVER


class ForkedRank:
    """Stands for RankProcess."""

    def __init__(self, order: RankOrder) -> None:
        self.rank = order.rank
        self._process = FORKSERVER.Process(target=run_rank, args=(order, dict(os.environ)))
        self._process.start()
        self._activity = Activity(self.pid)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def failure(self) -> str | None:
        code = self._process.exitcode
        if code is None:
            return "is stopped (SIGSTOP)" if is_suspended(self.pid) else None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def works(self) -> bool:
        return self._activity.works()

    def finished(self) -> bool:
        return self._process.exitcode is not None

    def wait(self, timeout: float) -> bool:
        self._process.join(timeout)
        return self.finished()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def run_rank(order: RankOrder, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.stdin = io.StringIO(json.dumps(asdict(order)))
    sys.exit(worker.main(["--parent", str(os.getppid())]))


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("started_ranks") is None:
        monkeypatch.setattr(ranks, "RankProcess", ForkedRank)
