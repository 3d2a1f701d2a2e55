"""A server's ready file: its name among those of several servers, and how old its word is.

A server that is held back until a verdict has a candidate file in its place, which no client reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher_scripts.common.atomic_write import atomic_write

READY = "ready.json"
CANDIDATE = "ready.candidate.json"
_PROMOTION = "promotion.json"
STALE_SECONDS = 60.0  # a server renews its file every few seconds


def replica_file(path: Path, replica: int | None) -> Path:
    """The file of one of several servers of the same run: ready-0.json, ready-1.json, ..."""
    return path if replica is None else path.with_name(f"{path.stem}-{replica}{path.suffix}")


def replica_files(path: Path, replicas: int) -> tuple[Path, ...]:
    """The files of all `replicas` servers; 0: of the only one."""
    if not replicas:
        return (path,)
    return tuple(replica_file(path, number) for number in range(replicas))


def ask_to_publish(job_folder: Path) -> None:
    """Tell every server of the job, also one that is started again, to have a ready file."""
    asked_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    atomic_write(job_folder / _PROMOTION, f'{{"asked_at": "{asked_at}"}}\n')


def may_publish(job_folder: Path) -> bool:
    """Whether ask_to_publish was called for the job."""
    return (job_folder / _PROMOTION).exists()


def seconds_silent(ready: Mapping[str, Any]) -> float | None:
    """Seconds since the server said that it lives; None for a file that does not say.

    Raises ValueError for a time that is none.
    """
    alive_at = ready.get("alive_at")
    if alive_at is None:
        return None
    return (datetime.now(timezone.utc) - datetime.fromisoformat(alive_at)).total_seconds()
