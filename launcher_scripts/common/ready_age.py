"""How old the word of a server's ready file is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

STALE_SECONDS = 60.0  # a server renews its file every few seconds


def seconds_silent(ready: Mapping[str, Any]) -> float | None:
    """Seconds since the server said that it lives; None for a file that does not say.

    Raises ValueError for a time that is none.
    """
    alive_at = ready.get("alive_at")
    if alive_at is None:
        return None
    return (datetime.now(timezone.utc) - datetime.fromisoformat(alive_at)).total_seconds()
