"""What a rank is doing, noted as it goes and told to rank 0 with every sign of life."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher_scripts.engine.messages import Beat

LOADING = "loading"
WAITING = "waiting"
COMPUTING = "computing"
SLOW_NETWORK = 1e7  # bytes per second that any network of a cluster carries


class Progress:
    """The state of one rank. Its main thread writes; the thread of the beats reads."""

    def __init__(self) -> None:
        self._step = 0
        self._phase = LOADING
        self._ticks = 0
        self._changed = time.monotonic()
        self._stretch = 0.0
        self._patience = 0.0

    def loaded(self) -> None:
        self._change(WAITING)

    def begin_step(self) -> None:
        self._step += 1
        self._change(COMPUTING)

    def end_step(self) -> None:
        self._change(WAITING)

    @contextmanager
    def exchange(self, name: str, size: int) -> Iterator[None]:
        """In the block, `size` bytes go between this rank and others, or come from them."""
        before = self._phase
        self._stretch = time.monotonic() - self._changed
        self._patience = size / SLOW_NETWORK
        self._ticks += 1
        self._change(name)
        yield
        self._change(before)

    @contextmanager
    def wait(self, name: str, patience: float) -> Iterator[None]:
        """In the block, the rank waits for something of its own."""
        before, self._patience = self._phase, patience
        self._change(name)
        yield
        self._change(before)

    def beat(self) -> Beat:
        """The state now."""
        quiet = time.monotonic() - self._changed
        state = (self._step, self._phase, self._ticks)
        return Beat(*state, quiet, self._stretch, self._patience)

    def _change(self, phase: str) -> None:
        self._phase = phase
        self._changed = time.monotonic()


def doing(beat: Beat) -> str:
    """A beat in words."""
    if beat.phase == LOADING:
        return "loading"
    if beat.phase == WAITING:
        return f"waiting after step {beat.step}"
    if beat.phase == COMPUTING:
        return f"computing step {beat.step}"
    return f"in step {beat.step}, {beat.phase}"
