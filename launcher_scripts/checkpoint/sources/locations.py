"""Locations of checkpoints, and advice about a path without one.

Neither numpy nor torch is needed here: the login side asks, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.config.settings import CHECKPOINT_KEY

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOTS = "snapshots"
_FILES = (".nemo", ".gguf")
_MAX_FOLDERS = 200
_MAX_LISTED = 10


def snapshot_of(path: Path) -> Path:
    """The one snapshot of a model's folder in the hub's cache (`models--x--y`); else `path`.

    Raises CheckpointError where there are several, or none.
    """
    folder = path if path.name == _SNAPSHOTS else path / _SNAPSHOTS
    if not folder.parent.name.startswith("models--") or not folder.is_dir():
        return path
    snapshots = sorted(snapshot for snapshot in folder.iterdir() if snapshot.is_dir())
    if len(snapshots) != 1:
        raise CheckpointError(
            problem(
                f"{path} is a model in the hub's cache with {len(snapshots)} snapshots; expected 1",
                choices=snapshots,
                change=CHECKPOINT_KEY,
            )
        )
    return snapshots[0]


def hub_advice(path: str) -> str:
    """Return advice about a path that looks like a model's name on the hub; "" for another."""
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        return ""
    return (
        f"; it looks like the name of a model on a hub, which is not downloaded here: run "
        f"`hf download {path} --local-dir FOLDER` first, and name the folder"
    )


def checkpoints_below(path: Path, is_checkpoint: Callable[[Path], bool]) -> list[str]:
    """Names of the files and folders in a folder, or one below, that are checkpoints."""
    names = [
        str(candidate.relative_to(path)) for candidate in _below(path) if is_checkpoint(candidate)
    ]
    return [*names[:_MAX_LISTED], *(["..."] if names[_MAX_LISTED:] else [])]


def _below(path: Path) -> Iterator[Path]:
    """Files that may be a checkpoint, and folders; those within folders after all others."""
    folders: list[Path] = []
    for candidate in sorted(path.iterdir()) if path.is_dir() else []:
        if candidate.suffix in _FILES and candidate.is_file():
            yield candidate
        elif candidate.is_dir() and len(folders) < _MAX_FOLDERS:
            folders.append(candidate)
    yield from folders
    for folder in folders:
        for candidate in sorted(folder.iterdir())[:_MAX_FOLDERS]:
            if candidate.is_dir() or (candidate.suffix in _FILES and candidate.is_file()):
                yield candidate
