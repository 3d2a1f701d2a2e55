"""The folder that an export writes: its name until it is complete, and how it gets its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher_scripts.common.errors import CheckpointError, problem


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


def _old_folder(folder: Path) -> Path:
    """Where a folder goes when another one takes its name."""
    return folder.with_name(folder.name + ".old")


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """Raises CheckpointError when there is something at `folder` that may not be replaced.

    A link there, or under one of the names on the way, leads to files of somebody else.
    """
    refuse_links(folder, partial_folder(folder), _old_folder(folder))
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


def refuse_links(*paths: Path) -> None:
    """Raises CheckpointError when one of the places to write to is a link."""
    links = [str(path) for path in paths if path.is_symlink()]
    if links:
        raise CheckpointError(
            problem(
                "an export would overwrite or delete what a link leads to; remove the link",
                got=links,
            )
        )


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; nothing that a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def replace_folder(new: Path, target: Path) -> None:
    """Give `new` the name `target`; a folder that has the name is removed after the exchange."""
    old = _old_folder(target)
    shutil.rmtree(old, ignore_errors=True)
    with writing(target):
        if target.exists():
            target.rename(old)
        new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
