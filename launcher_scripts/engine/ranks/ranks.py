"""All ranks of one engine from the side of rank 0: brought together, told, and taken apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed import TCPStore

from launcher_scripts.common.errors import ServerError
from launcher_scripts.engine.distributed.communicator import (
    Communicator,
    ProcessGroupCommunicator,
    close_store,
    open_store,
)
from launcher_scripts.engine.distributed.heartbeat import RankProgress
from launcher_scripts.engine.messages.message import Loaded, RankInfo, Ready
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.ranks.node_group import NodeGroup
from launcher_scripts.engine.ranks.workers import WorkerGroup
from launcher_scripts.engine.runner.loading import EngineSettings, rank_info
from launcher_scripts.engine.runner.timeline import Timeline

NAMING_SECONDS = 3.0
_POLL_SECONDS = 0.1


class Ranks:
    """Rank 0's own progress, the other ranks if there are any, and how they exchange tensors."""

    def __init__(self, settings: EngineSettings, on_failure: Callable[[ServerError], None]) -> None:
        self.progress = RankProgress()
        self.timeline = Timeline()
        self.infos: list[RankInfo] = []
        self._settings = settings
        self._failure: ServerError | None = None
        self._on_failure = on_failure
        self._workers: WorkerGroup | None = None
        self._store: TCPStore | None = None
        self._communicator: Communicator | None = None

    def start(self, group: NodeGroup) -> None:
        """Start the other ranks of this node, let other nodes join, and open the meeting place."""
        several = self._settings.parallelism.world_size > 1
        if several or group.node_rank.nodes > 1:
            self._workers = WorkerGroup(self._settings, group, self.progress, self._lost)
        if self._workers is not None and several:
            self._store = open_store(self._workers.host, self._settings.start_timeout)

    def meet(self, device: torch.device) -> Communicator:
        """Join the other ranks once all have read their weights."""
        self.timeline.note("rank 0 has its weights")
        if self._store is None or self._workers is None:
            return Communicator()
        self._await(Loaded)
        self.timeline.note("all ranks have their weights")
        self._workers.meet(self._store.port)
        self._communicator = ProcessGroupCommunicator(
            self._settings.parallelism,
            0,
            self._store,
            device,
            self._settings.start_timeout,
            host=self._workers.meeting_host,
            progress=self.progress,
        )
        if self._settings.device_type == "cpu":  # NCCL's watchdogs may connect again
            close_store(self._store)
        self.timeline.note("the ranks are connected")
        return self._communicator

    def complete(self, device: torch.device) -> None:
        """Wait until every rank waits for plans."""
        self._await(Ready)
        self.infos = [rank_info(0, device)]
        if self._workers is not None:
            self.infos += self._workers.infos
        self.progress.loaded()
        self.timeline.note("all ranks are ready")

    def begin_step(self, plan: Plan) -> None:
        """Tell every rank the next step; rank 0 begins it as well."""
        if self._workers is not None:
            self._workers.send(plan)
        self.progress.begin_step()

    def dismiss(self) -> None:
        """Tell every rank to end; from now on one that ends is no failure."""
        if self._workers is not None:
            self._workers.dismiss()

    def close(self, *, failed: bool) -> None:
        """End every other rank: in order, or at once after a failure."""
        if self._workers is not None:
            self._workers.kill() if failed else self._workers.close()

    def cause(self, error: Exception) -> ServerError:
        """Why a step failed: a lost rank, where that is what broke an exchange."""
        if isinstance(error, ServerError):
            return error
        deadline = time.monotonic() + (NAMING_SECONDS if self._workers is not None else 0.0)
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._failure or ServerError(f"rank 0 failed: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """After a failure on the CPU; NCCL would wait for the lost rank, so it ends with us."""
        if self._communicator is not None and self._settings.device_type == "cpu":
            with suppress(RuntimeError):
                self._communicator.close()

    def _lost(self, error: ServerError) -> None:
        self._failure = error
        self._on_failure(error)

    def _await(self, message: type) -> None:
        timeout = self._settings.start_timeout
        if self._workers is not None and not self._workers.wait_for(message, timeout):
            late = f"not within {timeout:.0f} s: {self._workers.missing()}"
            raise self._failure or ServerError(late)
