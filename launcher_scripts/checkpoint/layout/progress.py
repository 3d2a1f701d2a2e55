"""How far a long step is: one line redrawn for a person, a few log lines for a log file."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_BAR_WIDTH = 30
_REDRAW_SECONDS = 0.1
_LOG_PARTS = 10


class Progress:
    """Counts bytes of a total."""

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        """stream: where to write (default: standard error); a terminal gets a bar."""
        self.what = what
        self.total = max(total, 1)
        self.stream = sys.stderr if stream is None else stream
        self.attended = self.stream.isatty()
        self._done = 0
        self._start = time.monotonic()
        self._drawn = 0.0
        self._logged = 0

    def add(self, count: int) -> None:
        self._done += count
        if self.attended:
            self._draw()
        else:
            self._log()

    def close(self) -> None:
        """End the bar's line."""
        if self.attended:
            self._drawn = 0.0
            self._draw()
            self.stream.write("\n")
            self.stream.flush()

    def _draw(self) -> None:
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS:
            return
        self._drawn = now
        filled = _BAR_WIDTH * self._done // self.total
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        self.stream.write(f"\r{self.what} [{bar}] {self._text()}")
        self.stream.flush()

    def _log(self) -> None:
        part = _LOG_PARTS * self._done // self.total
        if part > self._logged:
            self._logged = part
            self.stream.write(f"{self.what}: {self._text()}\n")
            self.stream.flush()

    def _text(self) -> str:
        seconds = time.monotonic() - self._start
        mebibytes, total = self._done / 2**20, self.total / 2**20
        return (
            f"{100 * self._done // self.total}% of {total:.0f} MiB, "
            f"{mebibytes / max(seconds, 1e-9):.0f} MiB/s, {seconds:.1f} s"
        )
