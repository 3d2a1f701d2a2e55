"""The signals that ask a program to end, for as long as it takes them its own way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
