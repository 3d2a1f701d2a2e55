"""The folder that an export writes: its name until it is complete, and how it gets its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher_scripts.errors import CheckpointError, problem


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file or folder the system did not take."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def partial_folder(folder: Path) -> Path:
    """The name of a checkpoint's folder until it is complete."""
    return folder.with_name(folder.name + ".partial")


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """Raises CheckpointError when there is something at `folder` that may not be replaced."""
    with writing(folder):
        exists = folder.exists()
    if exists and not overwrite:
        raise CheckpointError(
            problem(
                "the output already exists",
                got=str(folder),
                change="export.model.overwrite to replace it",
            )
        )


def replace_folder(new: Path, target: Path) -> None:
    """Give `new` the name `target`; a folder that has the name is removed after the exchange."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
