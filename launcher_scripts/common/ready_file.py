"""A server's ready file: its name among those of several servers, and how old its word is.

A server that is held back until a verdict has a candidate file in its place, which no client reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from launcher_scripts.common.atomic_write import atomic_write

READY = "ready.json"
CANDIDATE = "ready.candidate.json"
# ready.json of a server alone, ready-0.json, ready-1.json, ... of replicas
READY_FILES = (READY, "ready-[0-9]*.json")
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


def ready_paths(place: Path) -> list[Path]:
    """Returns the ready files of a place: the file itself, or those in the folder."""
    if not place.is_dir():
        return [place]
    # Path.glob may hide that it cannot look.
    return sorted(p for p in place.iterdir() if any(fnmatch(p.name, n) for n in READY_FILES))


def has_servers(places: Iterable[Path]) -> bool:
    """Returns False if no ready file is of a server that may live; True where nobody can look."""
    try:
        paths = [path for place in places for path in ready_paths(place) if path.exists()]
        ages = [seconds_silent(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    except (OSError, ValueError, TypeError, AttributeError):
        return True
    return any(age is None or age <= STALE_SECONDS for age in ages)


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
