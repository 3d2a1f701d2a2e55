"""When decode steps are recorded as CUDA graphs: before requests need them, as far as can be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from launcher_scripts.engine.messages.plan import Plan, StepShape

LOAD_SECONDS = 2.0  # that loading is prolonged by; what is left comes when nothing else is to do
QUIET_SECONDS = 0.2  # without a request: who asks again at once should not wait for a recording
MEMORY_SHARE = 0.02  # of the device's memory, for all graphs


class Recording:
    """The shapes that are to be recorded still, those needed first in front.

    take: has all ranks carry out a plan;  memory: bytes of the device, those free and all
    """

    def __init__(
        self,
        shapes: Iterable[StepShape],
        take: Callable[[Plan], object],
        memory: Callable[[], tuple[int, int]],
    ) -> None:
        self._left = deque(shapes)
        self._take = take
        self._memory = memory
        self._done = 0
        self._seconds = 0.0
        self._quiet_since = -QUIET_SECONDS
        self._before, total = memory()
        self._most_bytes = total * MEMORY_SHARE

    @property
    def pending(self) -> bool:
        return bool(self._left)

    def disturbed(self) -> None:
        """A request was there: nothing is recorded until none has come for a while."""
        self._quiet_since = time.monotonic()

    def pause(self) -> float | None:
        """Seconds to wait for a request before the next shape is due; None: no shape is left."""
        if not self._left:
            return None
        return max(0.0, self._quiet_since + QUIET_SECONDS - time.monotonic())

    def record_next(self) -> None:
        """Record one shape; shapes that memory is not meant for are left to requests."""
        started = time.monotonic()
        self._take(Plan(record=(self._left.popleft(),)))
        self._done += 1
        self._seconds += time.monotonic() - started
        if self._bytes() > self._most_bytes:
            self._left.clear()

    def record_at_load(self) -> str | None:
        """Record for LOAD_SECONDS; says what was done, if there was anything to do."""
        while self._left and self._seconds < LOAD_SECONDS:
            self.record_next()
        if not self._done:
            return None
        left = f", {len(self._left)} left for idle moments" if self._left else ""
        cost = f"{self._seconds:.1f} s, {self._bytes() / 1e6:.0f} MB"
        return f"decode steps recorded: {self._done} ({cost}){left}"

    def _bytes(self) -> int:
        return self._before - self._memory()[0]


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes free, and in all; of a device without graphs it does not matter."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
