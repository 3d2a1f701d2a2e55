"""Operations on all ranks: prepared while steps go on, then done between two steps of all ranks.

This is one rank's side; ranks/operations.py is that of the first one, which decides. A new
operation is a message in messages/message.py, a RankOperation, and a row in the table below.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from launcher_scripts.common.errors import ConfigError, LauncherError
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
from launcher_scripts.engine.runner.graphs import device_memory
from launcher_scripts.engine.runner.loading import EngineSettings
from launcher_scripts.engine.runner.refit_source import RefitSource
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.engine.runner.weight_exchange import (
    LoRALoad,
    WeightExchange,
    WeightRefit,
    check_memory,
    named_tensors,
    total_bytes,
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
        """Do it, between two steps. All ranks have prepared.

        Raises LauncherError where nothing has changed on this rank; it is lost with another error.
        """
        ...

    def revert(self) -> None:
        """Undo what `apply` did, between two steps. Raises as `apply`."""
        ...


class WeightSleep:
    """One rank's part of a sleep: the host has the weights meanwhile, nobody has the cache.

    Tensors keep their storages, whose memory is given back: whoever has a tensor has it again
    afterwards. CUDA graphs know addresses, so they are made again.
    """

    def __init__(
        self, _operation: Sleep, runner: Runner, _settings: EngineSettings, _: int
    ) -> None:
        self._runner = runner
        runners = [runner, *([] if runner.draft is None else [runner.draft])]
        self._weights = storages(
            tensor for item in runners for tensor in named_tensors(item.decoder.weights).values()
        )
        self._cache = storages(pool for item in runners for pool in item.decoder.cache.pools)
        self._parked: list[Tensor] = []

    def prepare(self, _: Callable[[], None]) -> None:
        """Find memory for the weights. Raises ConfigError where the host has too little."""
        on_device = [item for item in self._weights if item.is_cuda]
        check_memory(total_bytes(on_device), "the weights of a rank that sleeps")
        self._parked = [
            torch.empty(item.numel(), dtype=torch.uint8, pin_memory=True) for item in on_device
        ]

    def apply(self) -> None:
        """Bring the weights to the host, and give the device's memory back. Weights on the CPU are
        where they should be.
        """
        self._runner.forget_graphs()
        park([item for item in self._weights if item.is_cuda], self._parked)
        self._free_device()

    def revert(self) -> None:
        """Bring the weights back; the cache is empty. Raises ConfigError where the device has too
        little memory, and then nobody has any of it, as before.
        """
        try:
            unpark([item for item in self._weights if item.is_cuda], self._parked)
            for pool in self._cache:
                pool.untyped_storage().resize_(pool.numel())
        except torch.OutOfMemoryError as error:
            self._free_device()
            count = sum(item.numel() for item in (*self._parked, *self._cache))
            free, _ = device_memory(self._runner.device)
            message = (
                f"{self._runner.device} has too little free memory to wake up, {free / 1e9:.2f} GB "
                f"of {count / 1e9:.2f} GB: end what uses it, and try again ({error})"
            )
            raise ConfigError(message) from error

    def _free_device(self) -> None:
        """Take the memory of the weights that the host has, and of the cache."""
        for item in (*(item for item in self._weights if item.is_cuda), *self._cache):
            item.untyped_storage().resize_(0)
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
            torch.cuda.empty_cache()


def storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The memory of the tensors, as bytes; what several share once."""
    unique = {item.untyped_storage().data_ptr(): item.untyped_storage() for item in tensors}
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in unique.values()
        if storage.nbytes()
    ]


def park(served: Sequence[Tensor], host: Sequence[Tensor]) -> None:
    """Copy storages, see `storages`, and give their memory back; those without memory stay so."""
    for tensor, copy in zip(served, host, strict=True):
        if tensor.untyped_storage().nbytes():
            copy.copy_(tensor)
            tensor.untyped_storage().resize_(0)


def unpark(served: Sequence[Tensor], host: Sequence[Tensor]) -> None:
    """Undo `park`."""
    for tensor, copy in zip(served, host, strict=True):
        tensor.untyped_storage().resize_(copy.numel())
        tensor.copy_(copy, non_blocking=True)


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

    def perform(self, request: OperationRequest, source: RefitSource | None = None) -> None:
        """Do what rank 0 asks for. Called by the thread that steps, but for `prepare`.

        source: of a refit, where this process has opened it
        """
        if request.action == "prepare":
            previous, self._cancelled = self._thread, threading.Event()
            arguments = (request, source, previous, self._cancelled)
            self._thread = threading.Thread(target=self._prepare, args=arguments, daemon=True)
            self._thread.start()
        elif request.action == "finish":
            self._cancelled.set()
            self._current = None
            if self._runner.device.type == "cuda":
                threading.Thread(target=_release_memory, daemon=True).start()
        else:
            progress, reason = self._runner.communicator.progress, ""
            if self._rank:
                progress.begin_step()
            try:
                with progress.phase(OPERATING), torch.inference_mode():
                    self._carry_out(request)
            except LauncherError as error:
                reason = str(error)
            progress.end_step()
            self._reply(OperationReply(request.number, request.action, reason))

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
        source: RefitSource | None,
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
            if self._runner.decoder.has_copies and not isinstance(operation, Sleep):
                raise ConfigError("with deterministic_ranks a model's weights stay the same")
            build = OPERATIONS[type(operation)]
            prepared = build(operation, self._runner, self._settings, self._rank)
            if isinstance(prepared, WeightRefit):
                prepared.opened = source
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


def _release_memory() -> None:
    """Give back what torch keeps of memory that nobody uses; of pinned memory it may take
    seconds.
    """
    torch.cuda.empty_cache()
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
