"""Operations on all ranks from the side of rank 0: two phases, so that all ranks do it or none.

Every rank prepares while steps go on. When all have, each gets the word to apply at the same place
among the plans, so they do it between the same two steps. A rank that is lost before, meanwhile or
after ends the engine, as it does at any time: no rank goes on without the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.manifest import source_digest
from launcher_scripts.common.errors import (
    BusyError,
    ConfigError,
    LauncherError,
    Problems,
    RequestError,
    ServerError,
    problem,
)
from launcher_scripts.engine.messages.message import (
    Action,
    LoadLoRA,
    Operation,
    OperationReply,
    OperationRequest,
)
from launcher_scripts.engine.ranks.ranks import POLL_SECONDS, Ranks
from launcher_scripts.engine.runner.loading import EngineSettings
from launcher_scripts.engine.runner.operations import RankOperations
from launcher_scripts.engine.runner.refit_source import RefitSource
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.models.adapters import LORA_NAME, MAX_LORAS_KEY, Adapters


class OperationError(LauncherError):
    """An operation was not done, and everything is as it was before."""


class Replies:
    """What the ranks have replied to requests."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[int, Action], dict[int, str]] = {}
        self._events = threading.Condition()

    def add(self, rank: int, reply: OperationReply) -> None:
        """Note the reply of a rank."""
        with self._events:
            self._reasons.setdefault((reply.number, reply.action), {})[rank] = reply.reason
            self._events.notify_all()

    def of(self, request: OperationRequest, count: int, timeout: float) -> dict[int, str] | None:
        """Return each rank's reason why it could not, "" if it could; None: not all have replied
        after `timeout` seconds.
        """
        key = (request.number, request.action)
        with self._events:
            if not self._events.wait_for(lambda: len(self._reasons.get(key, ())) >= count, timeout):
                return None
            return self._reasons.pop(key)


class Operations:
    """Operations on the ranks of one engine, one at a time."""

    def __init__(
        self, ranks: Ranks, replies: Replies, runner: Runner, settings: EngineSettings
    ) -> None:
        self._ranks = ranks
        self._replies = replies
        self._count = settings.parallelism.world_size
        self._number = 0
        self._lock = threading.Lock()
        self._local = RankOperations(runner, settings, 0, lambda reply: replies.add(0, reply))

    @contextmanager
    def exclusive(self) -> Iterator[Operations]:
        """Inside, the caller's operation is the only one. Raises BusyError during another one."""
        if not self._lock.acquire(blocking=False):
            raise BusyError("another operation on this server has not ended; ask again later")
        try:
            yield self
        finally:
            self._lock.release()

    def prepare(self, operation: Operation, source: RefitSource | None = None) -> None:
        """Have every rank prepare an operation while steps go on, and wait for all.

        source: of a refit, as rank 0 has opened it
        Raises OperationError with the reasons of those that cannot, and ServerError when a rank is
        lost; then none of them holds anything of it.
        """
        self._number += 1
        request = OperationRequest(self._number, "prepare", operation)
        self._local.perform(request, source)
        self._ranks.request(request)
        try:
            reasons = self._wait(request)
        except ServerError:
            self._local.perform(OperationRequest(self._number, "finish"))
            raise
        if any(reasons.values()):
            self.finish()
            self._raise(reasons)

    def carry_out(self, action: Action) -> float:
        """Have every rank apply or revert the operation; called between two steps.

        Returns the seconds that it took, once all have done it. Raises OperationError with the
        reasons of ranks that could not, where others may have done it; ServerError when a rank is
        lost: nobody knows then which of the others have done it, and the engine has to end.
        """
        began = time.perf_counter()
        request = OperationRequest(self._number, action)
        self._ranks.begin_step(request)
        self._local.perform(request)
        self._raise(self._wait(request))
        return time.perf_counter() - began

    def finish(self) -> None:
        """Have every rank release what the operation still holds."""
        request = OperationRequest(self._number, "finish")
        self._ranks.request(request)
        self._local.perform(request)

    def _raise(self, reasons: Mapping[int, str]) -> None:
        """Raise OperationError where ranks have reasons; what all say is said once."""
        by_reason: dict[str, list[str]] = {}
        for rank, reason in sorted(reasons.items()):
            if reason:
                by_reason.setdefault(reason, []).append(self._ranks.label(rank))
        if by_reason:
            parts = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
            raise OperationError("; ".join(parts) if self._count > 1 else next(iter(by_reason)))

    def _wait(self, request: OperationRequest) -> dict[int, str]:
        """Return what all ranks have replied; ranks that hang are noticed as in any step."""
        while True:
            reasons = self._replies.of(request, self._count, POLL_SECONDS)
            if self._ranks.failure is not None:
                raise self._ranks.failure
            if reasons is not None:
                return reasons


@dataclass
class AddedLoRA:
    """An adapter that was added, or is being added.

    number: by which requests choose it, which no other adapter ever has; None before it is ready
    """

    path: Path
    slot: int
    number: int | None = None


@dataclass
class LoRATable:
    """The LoRA adapters of a running engine: those of its files, and those that were added.

    Any thread may call. A slot is used again when the last row of its adapter has ended.
    """

    parts: Adapters
    operate: Callable[[Operation], None]
    _added: dict[str, AddedLoRA] = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)  # by slot
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._next = len(self.parts.lora_names)

    @property
    def numbers(self) -> dict[str, int]:
        """Name -> number of every adapter that requests may choose."""
        numbers = {name: number for number, name in enumerate(self.parts.lora_names)}
        with self._lock:
            added = {name: added.number for name, added in self._added.items()}
        return numbers | {name: number for name, number in added.items() if number is not None}

    def enter(self, number: int | None, row: Future[Any]) -> int | None:
        """Return the slot of the adapter that a row has chosen; it stays the adapter's until the
        row ends. Raises RequestError for a number that no adapter has.
        """
        if number is None or 0 <= number < len(self.parts.lora_names):
            return number
        with self._lock:
            slots = [added.slot for added in self._added.values() if added.number == number]
            for slot in slots:
                self._rows[slot] = self._rows.get(slot, 0) + 1
        if not slots:
            choices = [f"{number} ({name})" for name, number in self.numbers.items()]
            message = "lora_task_id names no LoRA adapter of the model"
            raise RequestError(problem(message, got=number, choices=choices or None))
        row.add_done_callback(lambda _: self._leave(slots[0]))
        return slots[0]

    def load(self, name: str, path: Path) -> int:
        """Add an adapter on all ranks between two steps; return the number by which requests choose
        it. One of this name and path that is there already stays.

        Raises ConfigError, OperationError with what does not fit, BusyError, and then nothing has
        changed; ServerError when a rank is lost.
        """
        added = self._reserve(name, path)
        if added.number is None:
            try:
                if not path.exists():
                    raise ConfigError(problem("the adapter is not there", got=str(path)))
                self.operate(LoadLoRA(path, source_digest(path), added.slot))
            except BaseException:
                with self._lock:
                    del self._added[name]
                raise
            with self._lock:
                added.number, self._next = self._next, self._next + 1
        return added.number

    def unload(self, name: str) -> None:
        """Take an added adapter away: rows that have it end with it, and no more get it.

        Raises ConfigError for a name that was not added.
        """
        with self._lock:
            added = self._added.get(name)
            if added is None or added.number is None:
                text = "there is no such adapter that was added"
                if name in self.parts.lora_names:
                    text = "this adapter is of the exported files, which stay as they are"
                raise ConfigError(problem(text, got=name, choices=list(self._added) or None))
            del self._added[name]

    def _leave(self, slot: int) -> None:
        with self._lock:
            self._rows[slot] -= 1

    def _reserve(self, name: str, path: Path) -> AddedLoRA:
        """Return the adapter of this name and path, or a free slot for it. Raises ConfigError."""
        problems, parts = Problems(f"the LoRA adapter {name}"), self.parts
        if not LORA_NAME.fullmatch(name):
            problems.add("a name may have letters, digits, dots, - and _", got=name)
        if parts.lora_slots is None:
            problems.add(
                "this model was started without slots for further adapters",
                got=0,
                change=f"{MAX_LORAS_KEY}=N (the number that can be added); restart the server",
            )
        problems.raise_if_any(ConfigError)
        slots = range(len(parts.lora_names), parts.loras.count)
        with self._lock:
            same = self._added.get(name)
            if same is not None and same.path == path and same.number is not None:
                return same
            if same is not None or name in parts.lora_names:
                message = "there is an adapter of this name: unload it first"
                raise ConfigError(problem(message, got=name))
            used = {added.slot for added in self._added.values()}
            free = [slot for slot in slots if slot not in used and not self._rows.get(slot)]
            if not free:
                running = " (rows of an unloaded one still run)" if len(used) < len(slots) else ""
                message = f"all {len(slots)} slots for adapters are taken{running}"
                choices = [f"unload {other}" for other in self._added] or ["try again"]
                raise ConfigError(problem(message, got=name, choices=choices, change=MAX_LORAS_KEY))
            return self._added.setdefault(name, AddedLoRA(path, free[0]))
