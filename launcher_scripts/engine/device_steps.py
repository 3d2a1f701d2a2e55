"""How far a device has come with the steps that its rank has launched."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from launcher_scripts.errors import ServerError


class Mark(Protocol):
    """Something that the device passes behind what was launched before it, as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has passed it; RuntimeError when the device has failed."""


class DeviceState(NamedTuple):
    """launched: the latest step of which everything has been launched
    finished: the latest step that the device has finished
    held:     seconds since the device finished a step, or was given the one it is at; 0: idle
    allowed:  seconds that the step it is at may rightly take beyond the usual
    """

    launched: int = 0
    finished: int = 0
    held: float = 0.0
    allowed: float = 0.0


class _Launched(NamedTuple):
    step: int
    allowed: float
    mark: Mark
    at: float


class DeviceSteps:
    """The steps on one device. The rank's main thread launches; the thread of the beats asks."""

    def __init__(
        self, mark: Callable[[], Mark], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """mark: leaves a mark behind everything that was launched until now."""
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

    def state(self) -> DeviceState:
        """How far the device is. Raises ServerError when it has failed."""
        latest = self._latest
        try:
            while self._under_way and self._under_way[0].mark.query():
                self._finished = self._under_way.popleft().step
                self._moved = self._clock()
        except RuntimeError as error:
            raise ServerError(f"its device failed: {error}") from error
        if not self._under_way:
            return DeviceState(latest, latest)
        at = self._under_way[0]
        held = self._clock() - max(self._moved, at.at)
        return DeviceState(max(latest, at.step), self._finished, held, at.allowed)
