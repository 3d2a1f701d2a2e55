"""How a service is asked to end: by a signal, noted for whoever waits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from launcher_scripts.common.processes import stop_signals


@dataclass
class StopRequest:
    """Whether somebody asked this program to end; `received` is the first signal."""

    received: int | None = None

    def __call__(self, received: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = received

    @property
    def name(self) -> str:
        return "nobody asked" if self.received is None else signal.Signals(self.received).name

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals of the block."""
        with stop_signals(self):
            yield
