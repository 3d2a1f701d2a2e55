"""The signals that ask a program to end, for as long as it takes them its own way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Ends a block by KeyboardInterrupt, or for SIGTERM and SIGHUP by SystemExit.

    Python drops an exception that a handler raises while a finalizer runs, so the block asks
    with check() before each thing that it begins.
    """

    def __init__(self) -> None:
        self._received: int | None = None

    def __call__(self, received: int, _frame: FrameType | None) -> None:
        self._received = self._received or received
        self.check()

    def check(self) -> None:
        """Raise if a signal has come."""
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals of the block."""
        with stop_signals(self):
            yield


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have `handler` called for the signals of the block; nohup's wish to ignore SIGHUP stays."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = (n for n in STOP_SIGNALS if not (nohup and n == signal.SIGHUP))
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, given in before.items():
            signal.signal(number, given)
