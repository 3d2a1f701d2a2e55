"""Heartbeats: every rank tells rank 0 what it is doing, and rank 0 finds one that hangs.

Ranks of one tensor-parallel group do the same work at the same time, so one that has not reached
an exchange in which the others have waited for seconds is stuck. Pipeline stages rightly wait for
each other as long as any of them computes. A long prefill is therefore no failure: all compute.

On CUDA the host only launches, so a rank that waits is seen by its device, which does not finish a
step. Then the ranks that have not launched that step are to blame; where all have, those whose
devices have not finished it.

Seconds alone do not say that a rank on the CPU is stuck: a large request on a busy machine takes
many. One that uses a processor, or waits for one, gets on, and has far more of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.processes import Activity
from launcher_scripts.engine.messages.message import Message

HEARTBEAT_SECONDS = 0.5
LOADING = "loading"
WAITING = "waiting"
COMPUTING = "computing"
COMPILING = "compiling a kernel"
RECORDING = "recording a graph"
OPERATING = "carrying out an operation"
DEVICE = "waiting for its device"
# What a rank does by itself while others may wait, and the seconds it may take beyond the usual.
LOCAL_WORK = {COMPUTING: 0.0, COMPILING: 120.0, RECORDING: 60.0, OPERATING: 60.0}
SLOW_NETWORK = 1e7  # bytes per second that any network of a cluster carries
# Of the first step of its kind: libraries load their kernels and connect to their peers.
FIRST_SECONDS = 60.0
SOLO_SECONDS = 120.0  # of a stage that is alone with work whose length nobody knows
SLOWER = 3.0  # so many times what it took before, a step may take
FORGETTING = 0.9  # what a token took at the most loses so much of its weight with every step
# Seconds in vain, beside what ranks announce. Cores that have much else to do need the longer ones.
EXCHANGE_SECONDS = {"cpu": 4.0, "cuda": 3.0}
WORKING_SECONDS = 600.0  # more, for a rank that works
HEARTBEAT_AGE = 1.0  # what is known of a rank may be so many seconds old
SKEW = 3.0  # ranks with the same work take at most so many times as long as each other


class Heartbeat(Message, frozen=True):
    """A sign of life, and what a rank is doing. A node's host leaves it empty.

    step:    the latest step that the rank has begun
    phase:   loading, waiting, computing, or the exchange that it is in
    ticks:   how many exchanges with other ranks it has begun
    quiet:   seconds since it last went from one thing to the next
    stretch: seconds that it computed before its latest exchange
    timeout: seconds that what it is in may rightly take beyond the usual
    launched: the latest step of which everything has been launched
    finished: the latest step that the device has finished
    held:    seconds since the device finished a step, or was given the one it is at; 0: idle
    allowed: seconds that the step it is at may rightly take beyond the usual
    solo_seconds: those beyond the usual that it may compute while other stages wait for it; of a
             device `allowed` says it
    idle:    of `quiet`, the seconds since it was last seen at work on the CPU; None: not looked at
    """

    step: int = 0
    phase: str = WAITING
    ticks: int = 0
    quiet: float = 0.0
    stretch: float = 0.0
    timeout: float = 0.0
    launched: int = 0
    finished: int = 0
    held: float = 0.0
    allowed: float = 0.0
    solo_seconds: float = 0.0
    idle: float | None = None

    def doing(self) -> str:
        """In words."""
        if self.phase == LOADING:
            return "loading"
        if self.phase == WAITING:
            return f"waiting after step {self.step}"
        if self.phase == COMPUTING:
            return f"computing step {self.step}"
        return f"in step {self.step}, {self.phase}"

    def hangs(self) -> str:
        """In words, of a rank that does not go on."""
        if self.held > 0 and self.phase in (WAITING, DEVICE):
            return f"hangs: its device has been at step {self.finished + 1} for {self.held:.0f} s"
        return f"hangs {self.doing()}, for {self.quiet:.0f} s"


class Mark(Protocol):
    """Something that the device passes behind what was launched before it, as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has passed it; RuntimeError when the device has failed."""


class _Launched(NamedTuple):
    step: int
    allowed: float
    mark: Mark
    at: float


class _Steps:
    """The steps on one device. The main thread launches, the heartbeats' thread asks."""

    def __init__(self, mark: Callable[[], Mark], clock: Callable[[], float]) -> None:
        self._mark = mark
        self._clock = clock
        self._under_way: deque[_Launched] = deque()
        self._latest = 0
        self._finished = 0
        self._moved = clock()

    def launched(self, step: int, allowed: float) -> None:
        """Everything of the step has been launched; it may take `allowed` s beyond the usual."""
        self._under_way.append(_Launched(step, allowed, self._mark(), self._clock()))
        self._latest = step

    def state(self) -> tuple[int, int, float, float]:
        """A Heartbeat's launched, finished, held and allowed; ServerError for a failed device."""
        latest = self._latest
        try:
            while self._under_way and self._under_way[0].mark.query():
                self._finished = self._under_way.popleft().step
                self._moved = self._clock()
        except RuntimeError as error:
            raise ServerError(f"its device failed: {error}") from error
        if not self._under_way:
            return latest, latest, 0.0, 0.0
        at = self._under_way[0]
        duration = self._clock() - max(self._moved, at.at)
        return max(latest, at.step), self._finished, duration, at.allowed


class _Now(NamedTuple):
    """The rank's activity since `since`, and the seconds it may take beyond the usual."""

    phase: str
    timeout: float
    since: float


class RankProgress:
    """The state of one rank. The main thread writes, the heartbeats' thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = 0
        self._completed = 0
        self._ticks = 0
        self._stretch = 0.0
        self._allowed = 0.0  # of the step that is being computed
        self._seconds_per_token = self._base = 0.0
        self._device: _Steps | None = None
        self._timed_kinds: set[Hashable] = set()
        self._started = self._solo_seconds = 0.0
        self._thread: int | None = None  # that computes, and is looked at
        self._activity: Activity | None = None
        self._worked = 0.0
        self._tokens: tuple[Hashable, int] | None = None
        self._rates: dict[Hashable, float] = {}  # seconds that a token of a kind of step took
        self._interrupted: _Now | None = None
        self._now = _Now(LOADING, 0.0, clock())

    def on_device(
        self, mark: Callable[[], Mark], seconds_per_token: float, base: float = 0.0
    ) -> None:
        """The host only launches steps, and a device finishes them.

        mark leaves a mark behind everything that was launched until now. A step may take `base`
        seconds, and so many per token, beyond the usual.
        """
        self._device = _Steps(mark, self._clock)
        self._seconds_per_token, self._base = seconds_per_token, base

    def loaded(self) -> None:
        self._change(WAITING)

    def begin_step(self) -> None:
        self._step += 1
        self._allowed = 0.0
        self._tokens = None
        self._solo_seconds = 0.0
        self._started = self._clock()
        thread = threading.get_native_id()
        if self._device is None and thread != self._thread:
            self._thread, self._activity = thread, Activity(f"self/task/{thread}")
        self._change(COMPUTING)

    def expect(self, kind: Hashable, tokens: int) -> None:
        """The step that has begun computes so many tokens, in the way that `kind` stands for."""
        is_expected = kind in self._timed_kinds
        self._timed_kinds.add(kind)
        if self._device is None:
            rate = self._rates.get(kind, 0.0)
            self._solo_seconds = SLOWER * rate * tokens if rate else SOLO_SECONDS
            self._tokens = (kind, max(tokens, 1)) if is_expected else None
            return
        first = 0.0 if is_expected else FIRST_SECONDS
        self._allowed = first + self._base + tokens * self._seconds_per_token
        self._now = self._now._replace(timeout=self._allowed)

    def end_step(self) -> None:
        if self._device is not None:
            self._device.launched(self._step, self._allowed)
        elif self._tokens is not None:
            kind, tokens = self._tokens
            rate = (self._clock() - self._started) / tokens
            self._rates[kind] = max(rate, FORGETTING * self._rates.get(kind, 0.0))
        self._completed = self._step
        self._change(WAITING)

    @contextmanager
    def exchange(self, name: str, size: int) -> Iterator[None]:
        """In the block, `size` bytes go between this rank and others, or come from them."""
        self._stretch = self._clock() - self._now.since
        self._ticks += 1
        with self._in(name, self._allowed + size / SLOW_NETWORK):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """In the block, the rank does something by itself: RECORDING, OPERATING, or waits for its
        DEVICE.
        """
        with self._in(name, self._allowed + LOCAL_WORK.get(name, 0.0)):
            yield

    def compiles(self) -> None:
        """A kernel is compiled from now on; while loading that needs no mention."""
        if self._now.phase != LOADING:
            self._interrupted = self._now
            self._change(COMPILING, self._allowed + LOCAL_WORK[COMPILING])

    def compiled(self) -> None:
        """The kernel is compiled: the rank goes on with what it did before."""
        if self._interrupted is not None:
            self._change(self._interrupted.phase, self._interrupted.timeout)
            self._interrupted = None

    def heartbeat(self) -> Heartbeat:
        """The state now. Raises ServerError when the device has failed."""
        phase, allowed, since = self._now
        now = self._clock()
        state = (self._step, phase, self._ticks, now - since, self._stretch, allowed)
        if self._device is None:
            idle = None
            if self._activity is not None:
                self._worked = now if self._activity.works() else self._worked
                idle = now - max(self._worked, since)
            return Heartbeat(
                *state, self._completed, self._completed, solo_seconds=self._solo_seconds, idle=idle
            )
        return Heartbeat(*state, *self._device.state(), solo_seconds=self._solo_seconds)

    @contextmanager
    def _in(self, name: str, allowed: float) -> Iterator[None]:
        """While loading, ranks wait for each other as long as it takes."""
        before = self._now
        if before.phase == LOADING:
            yield
            return
        self._change(name, allowed)
        yield
        self._change(before.phase, before.timeout)

    def _change(self, phase: str, allowed: float = 0.0) -> None:
        self._now = _Now(phase, allowed, self._clock())


@dataclass(frozen=True)
class Watchdog:
    """Judges the ranks of one engine; `timeout` is in seconds."""

    parallelism: Parallelism
    timeout: float

    def stuck(self, heartbeats: Mapping[int, Heartbeat], sent: int, since: float) -> dict[int, str]:
        """rank -> what it hangs in; empty while all is well.

        heartbeats: the latest of every rank
        sent:  steps that rank 0 has sent out, the last of them `since` seconds ago
        """
        if any(heartbeat.phase == LOADING for heartbeat in heartbeats.values()):
            return {}
        stuck_ranks = (
            self._deaf(heartbeats, sent, since)
            or self._behind(heartbeats)
            or self._unfinished(heartbeats)
            or self._deadlocked(heartbeats)
        )
        return {rank: heartbeats[rank].hangs() for rank in stuck_ranks}

    def _deaf(self, heartbeats: Mapping[int, Heartbeat], sent: int, since: float) -> list[int]:
        """Ranks that do not begin the step they were sent."""
        return [
            rank
            for rank, heartbeat in heartbeats.items()
            if heartbeat.phase == WAITING
            and heartbeat.step < sent
            and min(heartbeat.quiet, since) > self.timeout + self._extra(heartbeat)
        ]

    def _behind(self, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
        """Ranks that compute while their peers have long reached the next exchange."""
        result = []
        idle = not any(
            heartbeat.held for heartbeat in heartbeats.values()
        )  # else hosts may wait for a device
        for rank, status in heartbeats.items():
            if status.phase == DEVICE and not status.held and status.quiet > SOLO_SECONDS:
                result.append(rank)  # with what its device has given it
            if status.phase not in LOCAL_WORK:
                continue
            ahead = [peer for peer in self._peers(rank, heartbeats) if _is_ahead(peer, status)]
            allowed = max([self.timeout, *(SKEW * peer.stretch for peer in ahead)])
            others = [other for other in heartbeats.values() if other.phase not in LOCAL_WORK]
            quiet = status.quiet - status.timeout - self._extra(status)
            limit = self.timeout + status.solo_seconds
            if (ahead and quiet > allowed) or (idle and others and quiet > limit):
                result.append(rank)
        return result

    def _comes(self, heartbeat: Heartbeat, step: int) -> bool:
        """Return whether the rank may still come to an exchange of the step: it computes, or reads
        it."""
        reads = heartbeat.phase == WAITING and heartbeat.step < step and self._extra(heartbeat) > 0
        return reads or (heartbeat.phase in LOCAL_WORK and heartbeat.step <= step)

    def _extra(self, heartbeat: Heartbeat) -> float:
        """Seconds more for a rank that works."""
        working = heartbeat.idle is not None and heartbeat.idle <= self.timeout
        return WORKING_SECONDS if working else 0.0

    def _unfinished(self, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
        """Ranks that have not launched a step for which devices wait, or do not finish it."""
        overdue = [
            heartbeat
            for heartbeat in heartbeats.values()
            if heartbeat.held > self.timeout + heartbeat.allowed
        ]
        if not overdue:
            return []
        step = min(heartbeat.finished for heartbeat in overdue) + 1
        absent = [rank for rank, heartbeat in heartbeats.items() if heartbeat.launched < step]
        if absent:
            return [
                rank
                for rank in absent
                if heartbeats[rank].quiet > self.timeout + heartbeats[rank].timeout
            ]
        waiting_ranks = [
            rank for rank, heartbeat in heartbeats.items() if heartbeat.finished < step
        ]
        return waiting_ranks if all(heartbeats[rank] in overdue for rank in waiting_ranks) else []

    def _deadlocked(self, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
        """Ranks in an exchange that does not end although nobody computes for it any more."""
        deadlocked = []
        for rank, heartbeat in heartbeats.items():
            idle = heartbeat.phase in (WAITING, DEVICE, *LOCAL_WORK)
            awaited = any(self._comes(other, heartbeat.step) for other in heartbeats.values())
            if not idle and not awaited:
                deadlocked.append(rank)
        overdue = {
            rank: heartbeats[rank].quiet - self.timeout - heartbeats[rank].timeout
            for rank in deadlocked
        }
        if max(overdue.values(), default=0.0) <= 0:
            return []
        deadlocked = [rank for rank in deadlocked if overdue[rank] > -HEARTBEAT_AGE]
        lowest = [
            rank
            for rank in deadlocked
            if all(heartbeats[rank].ticks <= peer.ticks for peer in self._peers(rank, heartbeats))
        ]
        return lowest or deadlocked

    def _peers(self, rank: int, heartbeats: Mapping[int, Heartbeat]) -> Sequence[Heartbeat]:
        """The other ranks that share this one's layers."""
        group = self.parallelism.tp_group(self.parallelism.pp_rank(rank))
        return [heartbeats[peer] for peer in group if peer != rank and peer in heartbeats]


def _is_ahead(peer: Heartbeat, heartbeat: Heartbeat) -> bool:
    """Return whether `peer` has been done with what `heartbeat` computes."""
    finished = peer.phase == WAITING and peer.step >= heartbeat.step
    return peer.ticks > heartbeat.ticks or (finished and peer.step > 0)
