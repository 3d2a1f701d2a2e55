"""When the steps of a start were done, for whoever wants to know where the time goes."""

from __future__ import annotations

import time


class Timeline:
    """What happened, with the time of day in seconds since 1970, in order."""

    def __init__(self) -> None:
        self._events: list[tuple[str, float]] = []

    def note(self, what: str) -> None:
        self._events.append((what, round(time.time(), 3)))

    @property
    def events(self) -> list[tuple[str, float]]:
        return list(self._events)
