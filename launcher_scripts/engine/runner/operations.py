"""Operations on all ranks: prepared while steps go on, then done between two steps of all ranks.

This is one rank's side; ranks/operations.py is that of the first one, which decides. A new
operation is a message in messages/message.py, a RankOperation, and a row in the table below.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from launcher_scripts.common.errors import LauncherError
from launcher_scripts.engine.distributed.heartbeat import OPERATING
from launcher_scripts.engine.messages.message import (
    ExchangeWeights,
    LoadLoRA,
    Operation,
    OperationReply,
    OperationRequest,
    RefitWeights,
    Sleep,
)
from launcher_scripts.engine.runner.loading import EngineSettings
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.engine.runner.weight_exchange import (
    LoRALoad,
    WeightExchange,
    WeightRefit,
    WeightSleep,
)


class Cancelled(Exception):
    """An operation was given up while a rank prepared it."""


class RankOperation(Protocol):
    """One rank's part of an operation."""

    def prepare(self, check: Callable[[], None]) -> None:
        """Do what takes time, on a thread beside the steps; nothing that is served changes.

        check: called now and then, it ends the work when the operation was given up
        Raises LauncherError where this rank cannot do it.
        """
        ...

    def apply(self) -> None:
        """Do it, between two steps. All ranks have prepared; one that raises is lost."""
        ...

    def revert(self) -> None:
        """Undo what `apply` did, between two steps."""
        ...


Build = Callable[[Any, Runner, EngineSettings, int], RankOperation]
OPERATIONS: Mapping[type[Operation], Build] = {
    ExchangeWeights: WeightExchange,
    LoadLoRA: LoRALoad,
    RefitWeights: WeightRefit,
    Sleep: WeightSleep,
}


class RankOperations:
    """The operation of one rank; there is one at a time."""

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        rank: int,
        reply: Callable[[OperationReply], None],
    ) -> None:
        """reply: tells rank 0, from any thread"""
        self._runner = runner
        self._settings = settings
        self._rank = rank
        self._reply = reply
        self._current: RankOperation | None = None
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def perform(self, request: OperationRequest) -> None:
        """Do what rank 0 asks for. Called by the thread that steps, but for `prepare`."""
        if request.action == "prepare":
            previous, self._cancelled = self._thread, threading.Event()
            arguments = (request, previous, self._cancelled)
            self._thread = threading.Thread(target=self._prepare, args=arguments, daemon=True)
            self._thread.start()
        elif request.action == "finish":
            self._cancelled.set()
            self._current = None
            if self._runner.device.type == "cuda":
                threading.Thread(target=_release_pinned_memory, daemon=True).start()
        else:
            progress = self._runner.communicator.progress
            if self._rank:
                progress.begin_step()
            with progress.phase(OPERATING), torch.inference_mode():
                self._carry_out(request)
            progress.end_step()
            self._reply(OperationReply(request.number, request.action))

    def _carry_out(self, request: OperationRequest) -> None:
        if self._current is None:
            raise RuntimeError(f"operation {request.number} was not prepared")
        if request.action == "apply":
            self._current.apply()
        else:
            self._current.revert()
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)

    def _prepare(
        self,
        request: OperationRequest,
        previous: threading.Thread | None,
        cancelled: threading.Event,
    ) -> None:
        """Prepare the operation after the one before has released what it had."""

        def check() -> None:
            if cancelled.is_set():
                raise Cancelled

        if previous is not None:
            previous.join()
        if self._runner.device.type == "cuda":
            torch.cuda.set_device(self._runner.device)
        operation, reason = request.operation, ""
        try:
            if operation is None:
                raise RuntimeError("nothing is to be prepared")
            build = OPERATIONS[type(operation)]
            prepared = build(operation, self._runner, self._settings, self._rank)
            with torch.inference_mode():
                prepared.prepare(check)
            check()
            self._current = prepared
        except Cancelled:
            return
        except LauncherError as error:
            reason = str(error)
        except (Exception, MemoryError) as error:  # the steps go on
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        try:
            self._reply(OperationReply(request.number, request.action, reason))
        except OSError:
            return  # rank 0 is gone, which the thread that steps notices


def _release_pinned_memory() -> None:
    """Give back what torch keeps of pinned memory that nobody uses; it may take seconds."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
