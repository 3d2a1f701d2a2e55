"""Where the time of a start goes, from the submission of the job to the first tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from launcher_scripts.common.processes import process_stat, seconds_since

Event = tuple[str, float]


def process_started() -> float:
    """When this process was started, in seconds since 1970."""
    return time.time() - seconds_since(process_stat(os.getpid()).started)


def start_table(events: Iterable[Event]) -> str:
    """Each event with the seconds since the first one and since the one before.

    >>> print(start_table([("b", 12.5), ("a", 10.0)]))
      0.00    +0.00  a
      2.50    +2.50  b
    """
    lines = []
    ordered = sorted(events, key=lambda event: event[1])
    before = first = ordered[0][1]
    for what, at in ordered:
        lines.append(f"{at - first:6.2f}  {at - before:+6.2f}  {what}")
        before = at
    return "\n".join(lines)
