"""What a rank is doing, noted as it goes and told to rank 0 with every sign of life."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from launcher_scripts.engine.device_steps import DeviceSteps
from launcher_scripts.engine.messages import Beat

LOADING = "loading"
WAITING = "waiting"
COMPUTING = "computing"
COMPILING = "compiling a kernel"
RECORDING = "recording a graph"
DEVICE = "waiting for its device"
# What a rank does by itself while others may wait, and the seconds it may take beyond the usual.
OWN_WORK = {COMPUTING: 0.0, COMPILING: 120.0, RECORDING: 60.0}
SLOW_NETWORK = 1e7  # bytes per second that any network of a cluster carries
# Of the first step of its kind: libraries load their kernels and connect to their peers.
FIRST_SECONDS = 60.0
ALONE_SECONDS = 120.0  # of a stage that is alone with work whose length nobody knows
SLOWER = 3.0  # so many times what it took before, a step may take
FORGETTING = 0.9  # what a token took at the most loses so much of its weight with every step


class _Now(NamedTuple):
    """What the rank does since `since`, and the seconds it may rightly take beyond the usual."""

    phase: str
    patience: float
    since: float


class Progress:
    """The state of one rank. Its main thread writes; the thread of the beats reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = 0
        self._ended = 0
        self._ticks = 0
        self._stretch = 0.0
        self._allowed = 0.0  # of the step that is being computed
        self._seconds_per_token = self._base = 0.0
        self._device: DeviceSteps | None = None
        self._known: set[Hashable] = set()
        self._begun = self._alone = 0.0
        self._tokens: tuple[Hashable, int] | None = None
        self._rates: dict[Hashable, float] = {}  # seconds that a token of a kind of step took
        self._interrupted: _Now | None = None
        self._now = _Now(LOADING, 0.0, clock())

    def on_device(self, device: DeviceSteps, seconds_per_token: float, base: float = 0.0) -> None:
        """The host only launches steps: `device` finishes them.

        A step may take `base` seconds, and so many per token, beyond the usual.
        """
        self._device, self._seconds_per_token, self._base = device, seconds_per_token, base

    def loaded(self) -> None:
        self._change(WAITING)

    def begin_step(self) -> None:
        self._step += 1
        self._allowed = 0.0
        self._tokens = None
        self._alone = 0.0 if self._device is None else ALONE_SECONDS
        self._begun = self._clock()
        self._change(COMPUTING)

    def expect(self, kind: Hashable, tokens: int) -> None:
        """The step that has begun computes so many tokens, in the way that `kind` stands for."""
        known = kind in self._known
        self._known.add(kind)
        if self._device is None:
            rate = self._rates.get(kind, 0.0)
            self._alone = SLOWER * rate * tokens if rate else ALONE_SECONDS
            self._tokens = (kind, max(tokens, 1)) if known else None
            return
        first = 0.0 if known else FIRST_SECONDS
        self._allowed = first + self._base + tokens * self._seconds_per_token
        self._now = self._now._replace(patience=self._allowed)

    def end_step(self) -> None:
        if self._device is not None:
            self._device.launched(self._step, self._allowed)
        elif self._tokens is not None:
            kind, tokens = self._tokens
            rate = (self._clock() - self._begun) / tokens
            self._rates[kind] = max(rate, FORGETTING * self._rates.get(kind, 0.0))
        self._ended = self._step
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
        """In the block, the rank does something of its own: RECORDING, or waits for its DEVICE."""
        with self._in(name, self._allowed + OWN_WORK.get(name, 0.0)):
            yield

    def compiles(self) -> None:
        """A kernel is compiled from now on; while loading that needs no mention."""
        if self._now.phase != LOADING:
            self._interrupted = self._now
            self._change(COMPILING, self._allowed + OWN_WORK[COMPILING])

    def compiled(self) -> None:
        """The kernel is compiled: the rank goes on with what it did before."""
        if self._interrupted is not None:
            self._change(self._interrupted.phase, self._interrupted.patience)
            self._interrupted = None

    def beat(self) -> Beat:
        """The state now. Raises ServerError when the device has failed."""
        phase, patience, since = self._now
        quiet = self._clock() - since
        state = (self._step, phase, self._ticks, quiet, self._stretch, patience)
        if self._device is None:
            return Beat(*state, launched=self._ended, finished=self._ended, alone=self._alone)
        return Beat(*state, *self._device.state(), alone=self._alone)

    @contextmanager
    def _in(self, name: str, patience: float) -> Iterator[None]:
        before = self._now
        self._change(name, patience)
        yield
        self._change(before.phase, before.patience)

    def _change(self, phase: str, patience: float = 0.0) -> None:
        self._now = _Now(phase, patience, self._clock())


def doing(beat: Beat) -> str:
    """A beat in words."""
    if beat.phase == LOADING:
        return "loading"
    if beat.phase == WAITING:
        return f"waiting after step {beat.step}"
    if beat.phase == COMPUTING:
        return f"computing step {beat.step}"
    return f"in step {beat.step}, {beat.phase}"
